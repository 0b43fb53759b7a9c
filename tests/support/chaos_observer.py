"""Checks a dataset that others write, read and clean, and reports violations.

It lists and reads without packstore (the folder, or botocore, never over the proxy), and uses only
its decoding of shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos_jobs import KEEP, Scene, kind_of, markers_of, read_log, records

import packstore
from packstore.errors import DatasetNotFoundError, PackstoreError

MANIFEST = re.compile(r"manifest-([0-9]{6,})\.json")


class Raw:
    """Files of a dataset, without packstore."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._client = scene.store.client() if scene.store else None

    def files(self) -> dict[str, tuple[int, str]]:
        """Path -> bytes, and what changes when it is replaced, of all that lies there now."""
        if self._client is None:
            found = {}
            for folder, _, names in os.walk(self._scene.url):  # passes over what is removed
                for path in (os.path.join(folder, name) for name in names):
                    with contextlib.suppress(FileNotFoundError):
                        told = os.stat(path)
                        tag = f"{told.st_ino}-{told.st_mtime_ns}"
                        found[os.path.relpath(path, self._scene.url)] = (told.st_size, tag)
            return found
        prefix = self._prefix
        pages = self._client.get_paginator("list_objects_v2")
        entries = (
            entry
            for page in pages.paginate(Bucket=self._scene.store.bucket, Prefix=prefix)
            for entry in page.get("Contents", ())
        )
        return {
            e["Key"][len(prefix) :]: (e["Size"], f"{e['ETag']} {e['LastModified']}")
            for e in entries
        }

    def read(self, path: str) -> bytes | None:
        """The bytes of a file; None if it is not there."""
        if self._client is None:
            try:
                return Path(self._scene.url, path).read_bytes()
            except FileNotFoundError:
                return None
        try:
            bucket = self._scene.store.bucket
            return self._client.get_object(Bucket=bucket, Key=self._prefix + path)["Body"].read()
        except self._client.exceptions.NoSuchKey:
            return None

    @property
    def _prefix(self) -> str:
        return f"{self._scene.store.path}/{self._scene.name}/"


@dataclass
class Seen:
    """A version: the hash of its manifest, its files, and job -> examples of it.

    `tag` is what a listing told of the manifest when it was read.
    """

    sha256: str
    tag: str
    files: dict[str, int]
    markers: dict[int, int] = field(default_factory=dict)


def manifest_path(version: int) -> str:
    return f"_packstore/manifest-{version:06d}.json"


class Observer:
    """Watches from the start of a run to its end, over all rounds."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.raw = scene, Raw(scene)
        self.seen: dict[int, Seen] = {}
        self.problems: list[str] = []

    def save(self, path: Path) -> None:
        """Keeps what was seen for the observer of the next round."""
        seen = {version: asdict(found) for version, found in self.seen.items()}
        path.write_text(json.dumps({"seen": seen, "problems": self.problems}))

    def load(self, path: Path) -> None:
        """Goes on from what another has kept, if it has."""
        if path.exists():
            kept = json.loads(path.read_text())
            self.problems = kept["problems"]
            for version, found in kept["seen"].items():
                markers = {int(job): n for job, n in found.pop("markers").items()}
                self.seen[int(version)] = Seen(**found, markers=markers)

    def look(self) -> set[int]:
        """Every manifest is the one that was there before; every version has its files."""
        files = self.raw.files()
        there = {int(m[1]) for f in files if (m := MANIFEST.fullmatch(f.rpartition("/")[2]))}
        for version in sorted(there):
            tag = files[manifest_path(version)][1]
            if version in self.seen and self.seen[version].tag == tag:
                continue
            data = self.raw.read(manifest_path(version))
            if data is None:
                continue
            sha256 = hashlib.sha256(data).hexdigest()
            if version not in self.seen:
                self.seen[version] = Seen(sha256, tag, named(data))
                self._check_new(version)
            elif self.seen[version].sha256 != sha256:
                self._note(f"the manifest of version {version} was replaced")
        self._check_files(there)
        top = max(there, default=0)
        for version in [v for v in self.seen if v not in there and v > top - KEEP]:
            if self.raw.read(manifest_path(version)) is None:
                self._note(f"version {version} is gone, and the newest is {top}")
        return there

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def _check_files(self, there: set[int]) -> None:
        """Versions that lack files while their manifest is there, before and after the look."""
        files = self.raw.files()
        for version in there & self.seen.keys():
            wanted = self.seen[version].files
            lost = [p for p, size in wanted.items() if files.get(p, (-1, ""))[0] != size]
            if lost and self.raw.read(manifest_path(version)) is not None:
                found = f"{len(lost)} of {len(wanted)} files, first {lost[0]}"
                self._note(f"version {version} lacks {found}")

    def _check_new(self, version: int) -> None:
        """Verifies a version, and reads whose records it holds."""
        try:
            dataset = packstore.open(self.scene.url, self.scene.options(False), version=version)
            report = dataset.verify(jobs=1)
            markers = markers_of(dataset) if report.ok else {}
        except DatasetNotFoundError:
            return
        except PackstoreError as error:
            report, markers = None, {}
            told = [str(error)]
        if report is None or not report.ok:
            told = list(report.problems) if report else told
            if self.raw.read(manifest_path(version)) is not None:
                self._note(f"version {version}: {told[0]}")
            return
        self.seen[version].markers = markers
        for job, examples in markers.items():
            whole = len(records(self.scene, job))
            # A killed concat that runs again may read the version that it had committed.
            repeats = examples % whole == 0 and kind_of(self.scene, job) == "concat"
            if job and examples != whole and not repeats:
                self._note(f"version {version} has {examples} examples of job {job}")

    def verify_all(self) -> int:
        """Verifies versions that are there once more, 50 at most; returns how many."""
        there = sorted(self.look())
        some = there[:: max(len(there) // 50, 1)]
        for version in some:
            self._check_new(version)
        return len(some)

    def check_logs(self) -> dict[str, Any]:
        """Compares the logs of the processes with the versions seen."""
        events = defaultdict[str, list[dict[str, Any]]](list)
        for path in sorted((self.scene.folder / "logs").glob("*.jsonl")):
            for event in read_log(path):
                events[event["event"]].append({**event, "by": path.stem})
        kinds = {e["job"]: e["kind"] for e in events["begin"]}
        removed = {v for e in events["cleaned"] for v in e["versions"]}
        self._check_done(events["done"], kinds, removed)
        for event in events["epoch"] + events["opened"]:
            if not event["right"]:
                self._note(f"{event['by']}: {event}")
        unnamed = [e for e in events["error"] if not e["named"]]
        done = {e["job"] for e in events["done"]}
        held = {j for s in self.seen.values() for j in s.markers}
        beaten = [e for e in events["error"] if "only one writer may commit" in e["text"]]
        begun = Counter(e["job"] for e in events["begin"])
        # Not killed jobs that ran again: the first run may have committed before it was killed.
        lost = {e["job"] for e in beaten if begun[e["job"]] == 1} - done
        return {
            "commits": max(self.seen, default=0),
            "jobs": dict(Counter(kinds.values())),
            "jobs_done": len(done),
            "versions_seen": len(self.seen),
            "versions_removed": len(removed),
            "told_lost_but_committed": sorted(lost & held),
            "epochs": len(events["epoch"]),
            "opened": len(events["opened"]),
            "cleaned": {
                "calls": len(events["cleaned"]),
                "files": sum(e["files"] for e in events["cleaned"]),
            },
            "errors": {
                role: dict(Counter(e["name"] for e in events["error"] if e["by"].startswith(role)))
                for role in ("writer", "cleaner", "reader", "opener")
            },
            "unnamed": [{k: e[k] for k in ("by", "name", "text", "trace")} for e in unnamed],
        }

    def _check_done(
        self, done: list[dict[str, Any]], kinds: dict[int, str], removed: set[int]
    ) -> None:
        """Each job that told of success has its version, and no other job has the same."""
        by_version: dict[int, int] = {}
        top = max(self.seen, default=0)
        for event in done:
            job, version = event["job"], event["version"]
            seen = self.seen.get(version)
            if by_version.setdefault(version, job) != job:
                self._note(f"jobs {by_version[version]} and {job} both got {version}")
            if seen is None:
                if version > top - KEEP or version not in removed | {0}:
                    self._note(f"version {version} of job {job} is nowhere")
            elif set(event["shards"]) - seen.files.keys():
                self._note(f"version {version} is not what job {job} committed")
            elif seen.markers and job not in seen.markers:
                self._note(f"version {version} has nothing of job {job}")
        for version, seen in self.seen.items():
            before, job = self.seen.get(version - 1), by_version.get(version)
            if job is None or not seen.markers:
                continue
            known = {"pack": {}, "append": before.markers if before else None}
            others = known.get(kinds[job])  # concat was given the version to begin with
            if others is not None and {**others, job: seen.markers.get(job)} != seen.markers:
                self._note(f"version {version} lost records of version {version - 1}")


def named(data: bytes) -> dict[str, int]:
    """The files that a manifest names."""
    manifest = json.loads(data)
    files = [*manifest["shards"], *filter(None, [manifest.get("pack_index")])]
    return {f["path"]: f["bytes"] for f in files}

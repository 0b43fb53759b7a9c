"""Checks a dataset that others write, read and clean, and reports violations.

It lists and reads without packstore (the folder, or botocore, never over the proxy),
and uses only its decoding of shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_jobs import KEEP, NAMES, Scene, kind_of, markers_of, records

import packstore
from packstore.errors import DatasetNotFoundError, PackstoreError

MANIFEST = "_packstore/manifest-{:06d}.json"


class Raw:
    """Files of a dataset, without packstore."""

    def __init__(self, scene: Scene) -> None:
        self._store, self._url = scene.store, scene.url
        if scene.store:
            self._client = scene.store.client()
            self._prefix = f"{scene.store.path}/{scene.name}/"

    def files(self) -> dict[str, tuple[int, str]]:
        """Path -> bytes, and what changes when it is replaced, of all that lies there
        now.
        """
        found = {}
        if self._store:
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._store.bucket, Prefix=self._prefix):
                for e in page.get("Contents", ()):
                    tag = f"{e['ETag']} {e['LastModified']}"
                    found[e["Key"][len(self._prefix) :]] = (e["Size"], tag)
            return found
        for folder, _, names in os.walk(self._url):  # passes over what is removed
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(path)
                    tag = f"{stat.st_ino}-{stat.st_mtime_ns}"
                    found[os.path.relpath(path, self._url)] = (stat.st_size, tag)
        return found

    def read(self, path: str) -> bytes | None:
        """The bytes of a file; None if it is not there."""
        if not self._store:
            try:
                return Path(self._url, path).read_bytes()
            except FileNotFoundError:
                return None
        try:
            place = {"Bucket": self._store.bucket, "Key": self._prefix + path}
            return self._client.get_object(**place)["Body"].read()
        except self._client.exceptions.NoSuchKey:
            return None


@dataclass
class Seen:
    """A version: the hash of its manifest, its files, and job -> examples of it.

    `tag` is what a listing told of the manifest when it was read.
    """

    sha256: str
    tag: str
    files: dict[str, int]
    markers: dict[int, int] = field(default_factory=dict)


class Observer:
    """Watches from the start of a run to its end, over all rounds, in one process after
    another.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene, self.raw, self._kept = scene, Raw(scene), scene.folder / "observer"
        self.seen: dict[int, Seen] = {}
        self.problems: dict[str, None] = {}
        if self._kept.exists():
            self.seen, self.problems = pickle.loads(self._kept.read_bytes())

    def save(self) -> None:
        """Keeps what was seen for the observer of the next process."""
        self._kept.write_bytes(pickle.dumps((self.seen, self.problems)))

    def note(self, problem: str) -> None:
        self.problems[problem] = None

    def look(self) -> list[int]:
        """Every manifest is the one that was there before; every version has
        its files.
        """
        files = self.raw.files()
        matches = [
            re.fullmatch(r"_packstore/manifest-(\d{6,})\.json", name) for name in files
        ]
        there = sorted(int(match[1]) for match in matches if match)
        for version in there:
            tag = files[MANIFEST.format(version)][1]
            known = self.seen.get(version)
            data = (
                None
                if known and known.tag == tag
                else self.raw.read(MANIFEST.format(version))
            )
            if data is None:
                continue
            sha256 = hashlib.sha256(data).hexdigest()
            if known is None:
                manifest = json.loads(data)
                named = [
                    *manifest["shards"],
                    *filter(None, [manifest.get("pack_index")]),
                ]
                sizes = {entry["path"]: entry["bytes"] for entry in named}
                self.seen[version] = Seen(sha256, tag, sizes)
                self.verify(version)
            elif known.sha256 != sha256:
                self.note(f"the manifest of version {version} was replaced")
        files = self.raw.files()
        for version in (
            self.seen.keys() & there
        ):  # has its manifest before and after its files
            wanted = self.seen[version].files
            lost = [
                p for p, size in wanted.items() if files.get(p, (-1, ""))[0] != size
            ]
            if lost and self.is_there(version):
                self.note(
                    f"version {version} lacks {len(lost)} of its files, first {lost[0]}"
                )
        newest = max(there, default=0)
        for version in self.seen.keys() - set(there):
            if version > newest - KEEP and not self.is_there(version):
                self.note(f"version {version} is gone, and the newest is {newest}")
        return there

    def is_there(self, version: int) -> bool:
        return self.raw.read(MANIFEST.format(version)) is not None

    def verify(self, version: int) -> None:
        """Verifies a version, and reads whose records it holds."""
        try:
            dataset = packstore.open(
                self.scene.url, self.scene.options(), version=version
            )
            wrong = [*dataset.verify(jobs=1).problems]
            markers = {} if wrong else markers_of(dataset)
        except DatasetNotFoundError:
            return
        except PackstoreError as error:
            wrong = [str(error)]
        if wrong:
            if self.is_there(version):
                self.note(f"version {version}: {wrong[0]}")
            return
        self.seen[version].markers = markers
        for job, examples in markers.items():
            whole = len(records(self.scene, job))
            # A killed concat that runs again may read the version that it had
            # committed.
            repeats = examples % whole == 0 and kind_of(self.scene, job) == "concat"
            if job and examples != whole and not repeats:
                self.note(f"version {version} has {examples} examples of job {job}")

    def check_logs(self) -> dict[str, Any]:
        """Compares the logs of the processes with the versions seen; returns counts."""
        events = defaultdict[str, list[dict[str, Any]]](list)
        for name in NAMES:
            for event in self.scene.log_of(name):
                events[event["event"]].append({**event, "by": name})
        removed = {v for e in events["cleaned"] for v in e["versions"]}
        self._check_done(events["done"], removed)
        opened = [event["version"] for event in events["opened"]]
        if opened != sorted(opened):
            self.note(f"the newest version fell: {opened}")
        for event in events["epoch"]:
            if not event["right"]:
                self.note(f"not every pack once: {event}")
        jobs = {e["job"]: e["kind"] for e in events["begin"]}
        errors = Counter(
            f"{e['by'].partition('-')[0]} {e['name']}" for e in events["error"]
        )
        return {
            "commits": max(self.seen, default=0),
            "jobs": dict(Counter(jobs.values())),
            "jobs_done": len({e["job"] for e in events["done"]}),
            "versions_seen": len(self.seen),
            "versions_removed": len(removed),
            "epochs": len(events["epoch"]),
            "opened": len(opened),
            "cleaned": len(events["cleaned"]),
            "files_removed": sum(e["files"] for e in events["cleaned"]),
            "errors": dict(errors),
            "unnamed": [e for e in events["error"] if not e["named"]],
        }

    def _check_done(self, done: list[dict[str, Any]], removed: set[int]) -> None:
        """Each job that told of success has its version, and no other job has
        the same.
        """
        job_of: dict[int, int] = {}
        newest = max(self.seen, default=0)
        for event in done:
            job, version = event["job"], event["version"]
            seen = self.seen.get(version)
            if job_of.setdefault(version, job) != job:
                self.note(f"jobs {job_of[version]} and {job} both got {version}")
            if seen is None:
                if version > newest - KEEP or version not in removed | {0}:
                    self.note(f"version {version} of job {job} is nowhere")
            elif set(event["shards"]) - seen.files.keys():
                self.note(f"version {version} is not what job {job} committed")
            elif seen.markers and job not in seen.markers:
                self.note(f"version {version} has nothing of job {job}")
        for version, seen in self.seen.items():
            before, job = self.seen.get(version - 1), job_of.get(version)
            if job is None or not seen.markers or kind_of(self.scene, job) == "concat":
                continue  # concat was given the version to begin with
            if kind_of(self.scene, job) == "append":
                kept = before.markers if before else None
            else:
                kept = {}
            if (
                kept is not None
                and {**kept, job: seen.markers.get(job)} != seen.markers
            ):
                self.note(f"version {version} lost records of version {version - 1}")

"""The journal of a run: what a job has finished, for the rerun of one that was killed.

Small files in ``_packstore/runs/``, each put once, as object stores can neither append nor rename:
``<run>-head.json`` says what the job is, ``<run>-00000.json`` and so on tell of a finished shard
(or of all shards of a partition), ``<run>-index.json`` of the pack index. They go when the job has
committed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from packstore.errors import (
    CompatibilityError,
    DatasetExistsError,
    FormatError,
    PackstoreError,
    StorageError,
    quote,
    sentence,
)
from packstore.io.commit import FOLDER
from packstore.io.fields import Fields
from packstore.io.manifest_json import dump_shard, parse_shard
from packstore.io.shard import ShardInfo
from packstore.io.statistics import PackCounter
from packstore.io.storage import Location, check_relative
from packstore.io.upkeep import remove_all, replace_bytes
from packstore.loss_counts import COUNTS
from packstore.records import PackSizes

RUNS = f"{FOLDER}/runs"
VERSION = 1

_NAME = re.compile(r"([0-9a-f]{12})-(head|index|[0-9]{5,})\.json")
_CHECKS = 4
"""Shards that are hashed at a time."""
_CHUNK = 1 << 20
_CONSEQUENCES = ("lineage", "plan")
"""Parts of a head that differ only where another part does, mostly."""

_COUNTED = [f.name for f in dataclasses.fields(PackCounter) if f.name != "histogram"]
_SIZES = ("tokens", "examples", "squares")


@dataclass(frozen=True, eq=False)
class Finished:
    """A shard that is in its place: what the manifest says of it, and what its packs add up to."""

    shard: ShardInfo
    counter: PackCounter
    sizes: PackSizes


class Journal:
    """The journal at a place; only the holder of its lease may use it.

    Args:
        location: the dataset.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self.run = ""

    def runs(self) -> dict[str, dict[str, Any]]:
        """The unfinished runs there -> what each is; {} where that cannot be read."""
        found: dict[str, dict[str, Any]] = {run: {} for run, _, _ in self._files()}
        for run in found:
            with contextlib.suppress(PackstoreError):
                found[run] = self._read(_path(run, "head"))
        return found

    def begin(self, run: str, about: Mapping[str, Any]) -> list[Finished]:
        """Goes on with a run, or begins it; returns the shards that are finished, in order.

        Only shards whose bytes have the hash that was noted count, up to the first that has not.

        Args:
            run: 12 hexadecimal digits.
            about: everything that decides the bytes of the result.
        """
        noted = self.open(run, about)
        parts: list[Finished] = []
        while (number := f"{len(parts):05d}") in noted:
            try:
                parts.append(_parse(self._read(_path(run, number)), _path(run, number)))
            except FormatError:
                break
        whole = self._are_whole(parts)
        good = whole.index(False) if False in whole else len(whole)
        for number in sorted(noted - {"head"})[good:]:
            self._location.remove(_path(run, number))
        return parts[:good]

    def open(self, run: str, about: Mapping[str, Any]) -> set[str]:
        """Begins a run if it was not begun yet; returns the names of its entries."""
        self.run = run
        noted = {number for found, number, _ in self._files() if found == run}
        # A rerun puts it again, so that `clean` sees the files that are taken over as young.
        head = {"journal_version": VERSION, **about}
        replace_bytes(self._location, _path(run, "head"), _text(head))
        return noted

    def finished(self, number: int, part: Finished) -> None:
        """Notes that a shard is in its place."""
        self._put(f"{number:05d}", _entry(part))

    def finished_partition(
        self, number: int, parts: Sequence[Finished], about: Mapping[str, Any]
    ) -> None:
        """Notes that all shards of a partition are in their places.

        Args:
            number: of the partition.
            parts: its shards, in order.
            about: what it is, and what else was made of it; JSON values.
        """
        self._put(f"{number:05d}", {"shards": [_entry(p) for p in parts], **about})

    def partition(self, number: int) -> tuple[list[Finished], dict[str, Any]] | None:
        """What was noted of a partition; None if nothing was, or a shard is not as it was put."""
        path = _path(self.run, f"{number:05d}")
        try:
            about = self._read(path)
            parts = [_parse(entry, path) for entry in about.pop("shards")]
        except (FormatError, KeyError, TypeError):
            return None
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            return None
        return (parts, about) if all(self._are_whole(parts)) else None

    def intends(self, path: str) -> None:
        """Notes a file whose name does not tell the run, before it is put."""
        self._put("index", {"path": path})

    def files_of(self, run: str) -> list[str]:
        """Paths that the run may have put and whose names do not tell it."""
        try:
            entry = Fields(self._read(_path(run, "index")), run)
            return [check_relative(entry.text("path"), run)]
        except PackstoreError:
            return []

    def remove(self, run: str) -> None:
        """Removes the journal of a run; its head last, so that what is left is still explained."""
        *others, last = self.paths(run) or [_path(run, "head")]
        remove_all(self._location, others)
        self._location.remove(last)

    def paths(self, run: str) -> list[str]:
        """The files of a run's journal, unfinished ones first, its head last."""
        names = [entry.name for entry in self._location.files(RUNS)]
        own = [n for n in names if n.lstrip(".").startswith(f"{run}-")]
        own.sort(key=lambda n: (not n.startswith("."), n.endswith("-head.json"), n))
        return [f"{RUNS}/{name}" for name in own]

    def _are_whole(self, parts: Sequence[Finished]) -> list[bool]:
        with ThreadPoolExecutor(_CHECKS) as pool:
            return list(pool.map(self._is_whole, (p.shard for p in parts)))

    def _is_whole(self, shard: ShardInfo) -> bool:
        """Whether the shard in the store has the bytes that were written."""
        try:
            if self._location.size(shard.path) != shard.bytes:
                return False
            digest = hashlib.sha256()
            with self._location.open_read(shard.path) as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        except PackstoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        return digest.hexdigest() == shard.sha256

    def _put(self, name: str, value: Mapping[str, Any]) -> None:
        try:
            self._location.create_bytes(_path(self.run, name), _text(value))
        except DatasetExistsError:  # by a run before
            replace_bytes(self._location, _path(self.run, name), _text(value))

    def _read(self, path: str) -> dict[str, Any]:
        """Raises :class:`FormatError` if it is not what was put."""
        head, _, text = self._location.read_bytes(path).partition(b"\n")
        text = text.removesuffix(b"\n")
        try:
            sha256 = Fields(orjson.loads(head), path).sha256("sha256")
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise FormatError(sentence(path, "must be valid JSON", str(error))) from error
        found = hashlib.sha256(text).hexdigest()
        if found != sha256 or not isinstance(value, dict):
            raise FormatError(sentence(path, "must have the hash in its first line", found))
        return value

    def _files(self) -> list[tuple[str, str, int]]:
        """Run, number and bytes of each file."""
        matches = ((_NAME.fullmatch(e.name), e.size) for e in self._location.files(RUNS))
        return [(m[1], m[2], size) for m, size in matches if m]


def refuse_other(
    location: Location, runs: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]
) -> None:
    """Refuses to begin where a run lies that is unfinished and not this one.

    Args:
        location: the dataset.
        runs: the unfinished runs there -> what each is.
        about: what this one is, as far as it is known.

    Raises:
        CompatibilityError: says what differs, and what to do.
    """
    for run, other in runs.items():
        if found := differences(other, about):
            more = "" if len(found) <= 4 else f", and {len(found) - 4} more"
            raise CompatibilityError(
                sentence(
                    location.display,
                    f"an unfinished run ({run}) must be gone on with as it was begun",
                    "; ".join(found[:4]) + more,
                    "Repeat its call to finish it, give it up (fresh=True, --fresh, or "
                    "`packstore clean --delete`), or name another place",
                )
            )


def differences(other: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    """Where two jobs differ: `name X then, Y now` for each part of `about` that is another."""
    if not other:
        return ["a head that cannot be read"]
    before, now = dict(_flat(other)), dict(_flat(about))
    names = [n for n in {**now, **before} if n.split(".")[0] in about]
    names = [n for n in names if before.get(n) != now.get(n)]
    causes = [n for n in names if n not in _CONSEQUENCES]
    return [
        f"{name} {quote(before.get(name), 24)} then, {quote(now.get(name), 24)} now"
        for name in causes or names
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, list) and inner and all(isinstance(i, Mapping) for i in inner):
            inner = {str(i): part for i, part in enumerate(inner)}
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(inner) if isinstance(inner, tuple) else inner


def _path(run: str, name: str) -> str:
    return f"{RUNS}/{run}-{name}.json"


def _text(value: Mapping[str, Any]) -> bytes:
    text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return b'{"sha256":"%s"}\n%s\n' % (hashlib.sha256(text).hexdigest().encode(), text)


def _entry(part: Finished) -> dict[str, Any]:
    counter = {name: int(getattr(part.counter, name)) for name in _COUNTED}
    counter["histogram"] = part.counter.histogram.tolist()
    return {
        "shard": dump_shard(part.shard),
        "counter": counter,
        "sizes": {name: getattr(part.sizes, name).tolist() for name in _SIZES},
        "counts": [] if part.sizes.counts is None else part.sizes.counts.tolist(),
    }


def _parse(value: object, where: str) -> Finished:
    top = Fields(value, where)
    shard = parse_shard(top.mapping("shard"), where)
    counts, sizes = top.child("counter"), top.child("sizes")
    counter = PackCounter(
        **{name: counts.count(name) for name in _COUNTED},
        histogram=np.array(counts.items("histogram"), np.int64),
    )
    columns = {name: np.array(sizes.items(name), np.int64) for name in _SIZES}
    if {len(c) for c in columns.values()} != {shard.rows} or counter.packs != shard.rows:
        top.refuse("sizes", f"of {shard.rows} packs", counter.packs)
    divided = np.array(top.items("counts"), np.int64)
    if divided.shape != (shard.rows, len(COUNTS)):
        top.refuse("counts", f"{len(COUNTS)} of each of {shard.rows} packs", divided.shape)
    return Finished(shard, counter, PackSizes(**columns, counts=divided))

"""A job that writes to a place, and is able to go on where a killed one stopped.

1. Look whether a dataset may be put there, and which number its manifest will have.
2. Put a marker, and warn if there is that of another job (:mod:`packstore.io.writers`).
3. Refuse to go on with an unfinished run of other settings or inputs, unless its job is at work.
4. Take over the finished shards of the same run, by hash.
5. Before the commit: every shard is there.
6. After it: the journal goes, and the marker.

Of several jobs at work the one that puts the manifest of that number first wins.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from packstore.errors import (
    DatasetExistsError,
    DatasetNotFoundError,
    MissingFilesError,
    PackstoreError,
    StorageError,
    sentence,
)
from packstore.io.commit import FOLDER, refuse_existing, require_exclusive
from packstore.io.dataset import Dataset
from packstore.io.journal import Finished, Journal, refuse_other
from packstore.io.manifest import Manifest
from packstore.io.merge import Part, check_alike, merge
from packstore.io.named import named_paths
from packstore.io.shard import ShardInfo
from packstore.io.storage import Location
from packstore.io.upkeep import list_folder, pruned
from packstore.io.writers import marked, writers
from packstore.records import PackSizes

log = logging.getLogger("packstore")

DATA = "data"


class AppendedBefore(DatasetExistsError):
    """What a job appends is the last part of the dataset that it extends."""


class WriteJob:
    """What :func:`writing` gives: the next version of a place, and the journal there.

    Attributes:
        version: the number that the next manifest will have.
        resumed: the shards of an interrupted run that :meth:`begin` took over.
        extends: the dataset whose packs come first in the next version; None: there are none.
    """

    extends: Dataset | None = None

    def __init__(self, location: Location, marker: str, version: int, fresh: bool) -> None:
        self.location, self.version = location, version
        self._marker, self._fresh = marker, fresh
        self._journal = Journal(location)
        self.resumed: list[Finished] = []

    def check_fits(
        self, kind: str, carry: Mapping[str, str], provenance: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Refuses what cannot stand behind the dataset that this job extends.

        Raises:
            CompatibilityError: says what differs.
        """
        if self.extends is not None:
            manifest = replace(self.extends.manifest, kind=kind, carry=carry)
            told = {**manifest.provenance, "tokenizer": provenance().get("tokenizer")}
            added = Part("what is appended", replace(manifest, provenance=told))
            check_alike(Part(self.extends.url, self.extends.manifest), added)

    def earlier(self) -> Iterator[PackSizes]:
        """Sizes of the packs of each shard that comes before those of this job."""
        if self.extends is not None:
            for number in range(len(self.extends.manifest.shards)):
                yield self.extends.shard_sizes(number)

    def whole(self, manifest: Manifest) -> Manifest:
        """The manifest to commit: of what this job wrote, behind what it extends."""
        if self.extends is None:
            return manifest
        url = self.extends.url
        merged = merge([Part(url, self.extends.manifest), Part(url, manifest)])
        return replace(merged, pack_index=manifest.pack_index)

    def refuse_again(self, about: Mapping[str, Any]) -> None:
        """Most likely a call that was repeated though it had ended well.

        Raises:
            AppendedBefore: these very records are its last part, appended with the same settings.
            DatasetExistsError: the dataset that it extends holds these very records.
        """
        old, new = (
            {s.get("sha256") for s in told.get("sources", ())} - {None}
            for told in (self.extends.manifest.provenance if self.extends else {}, about)
        )
        if not new & old:
            return
        if not new <= old:
            log.warning("%d of %d inputs are in the dataset already", len(new & old), len(new))
            return
        last = (self.extends.manifest.provenance if self.extends else {}).get("combined_from")
        if last and last[-1].get("lineage") == about.get("lineage"):
            raise AppendedBefore(self.location.display)
        must = "records that are appended must not be in it yet"
        do = "To have them twice, pack them elsewhere and use concat"
        found = "these very ones, by the hash of the input"
        raise DatasetExistsError(sentence(self.location.display, must, found, do))

    def compare(self, about: Mapping[str, Any]) -> None:
        """Refuses an unfinished run of another job, by as much as is known of this one.

        That of a job that seems to be at work is not refused: the manifest's number decides. With
        `fresh`, unfinished runs are given up instead: their journals are removed.

        Raises:
            CompatibilityError: says what differs.
        """
        unfinished = self._journal.runs()
        if not unfinished:
            return
        named = named_paths(self.location)
        for run in list(unfinished):
            committed = any(path.startswith(f"{DATA}/{run}-") for path in named)
            if self._fresh or (committed and run != self._journal.run):
                self._journal.remove(run)
                del unfinished[run]
        if unfinished and not writers(self.location, besides=self._marker):
            refuse_other(self.location, unfinished, about)

    def begin_partitions(self, run: str, about: Mapping[str, Any]) -> None:
        """As :meth:`begin`; but each partition finds and takes over its own shards."""
        self._open(run, about)
        self._journal.open(run, about)

    def begin(self, run: str, about: Mapping[str, Any]) -> list[Finished]:
        """The finished shards of this very run, if it was begun before; else begins it.

        Args:
            run: begins the names of its shards.
            about: everything that decides the bytes of the result.

        Raises:
            CompatibilityError: another unfinished run lies there.
            DatasetExistsError: the dataset that it extends holds these very records.
        """
        self._open(run, about)
        self.resumed = self._journal.begin(run, about)
        if self.resumed:
            shards, packs = len(self.resumed), sum(p.shard.rows for p in self.resumed)
            log.info("going on with an interrupted run: %d shards, %d packs", shards, packs)
        return self.resumed

    def _open(self, run: str, about: Mapping[str, Any]) -> None:
        self.refuse_again(about)
        self._journal.run = run
        self.compare(about)
        self._fresh = False

    def finished(self, number: int, part: Finished) -> None:
        """Notes a shard that was put."""
        self._journal.finished(number, part)

    def intends(self, path: str) -> None:
        """Notes a file that is going to be put, and whose name does not tell the run."""
        self._journal.intends(path)

    def has_finished(self) -> bool:
        """Whether something finished is noted."""
        with contextlib.suppress(PackstoreError):
            return any(not p.endswith("-head.json") for p in self._journal.paths(self._journal.run))
        return True

    def keeps(self, error: BaseException) -> bool:
        """Whether what is finished stays for a rerun, which may well end better."""
        final = isinstance(error, DatasetExistsError | DatasetNotFoundError | MissingFilesError)
        passing = isinstance(error, StorageError | KeyboardInterrupt | SystemExit)
        return passing and not final

    def leave(self, error: BaseException, finished: bool) -> None:
        """Ends the job after an error. No shard is removed: another job may be about to commit it.

        The journal goes, so that another job is not refused, unless a rerun can go on with what is
        `finished`.
        """
        if finished and self.keeps(error):
            log.warning("the finished shards stay: run it again to go on, or `packstore clean` it")
            return
        self.done()

    def confirm(self, shards: Iterable[ShardInfo]) -> None:
        """What must hold in the moment of the commit.

        Raises:
            StorageError: a shard was removed.
        """
        there = {f.path: f.bytes for f in list_folder(self.location, DATA)}
        for shard in shards:
            if there.get(shard.path) != shard.bytes:
                found = f"{shard.path} removed or changed"
                must = "its shards must stay while a job writes there"
                raise StorageError(sentence(self.location.display, must, found, "Run it again"))

    def done(self) -> None:
        """Removes the journal: the dataset is committed, or given up; never fails."""
        with contextlib.suppress(PackstoreError):
            if self._journal.run:
                self._journal.remove(self._journal.run)


@contextlib.contextmanager
def writing(
    location: Location,
    overwrite: bool,
    fresh: bool = False,
    call: str = "pack",
    *,
    single_writer: bool = False,
) -> Iterator[WriteJob]:
    """A context in which a job writes to `location`, maybe beside others.

    Args:
        location: the dataset.
        overwrite: a dataset that is there is going to be replaced.
        fresh: give up unfinished runs there, rather than go on with them.
        call: what the job does, for people.
        single_writer: no other job writes there meanwhile.

    Raises:
        ConfigError: two writers could both commit there, and `single_writer` is False.
        DatasetExistsError: a dataset is there, and `overwrite` is False.
        StorageError: the store refuses.
    """
    require_exclusive(location, single_writer)
    version = refuse_existing(location, overwrite)
    with pruned(location), marked(location, call) as marker:
        try:
            yield WriteJob(location, marker, version, fresh)
        finally:
            if location.local_path is not None:
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(location.local_path, FOLDER, "runs"))

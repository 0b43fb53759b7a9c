"""A job that writes the next version of a place.

1. Look whether a dataset may be put there, and which number its manifest will have.
2. Put a marker, and warn if there is that of another job (:mod:`packstore.io.writers`).
3. Before the commit: every shard is there.
4. After it, or an error: the marker goes. An error removes nothing else.

Of several jobs at work the one that puts the manifest of that number first wins.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from packstore.errors import DatasetExistsError, StorageError, sentence
from packstore.io.commit import DATA, DATASET, refuse_existing, require_exclusive
from packstore.io.dataset import Dataset
from packstore.io.manifest import Manifest, commit_manifest
from packstore.io.merge import Part, check_alike, merge
from packstore.io.presence import require_committed
from packstore.io.shard import ShardInfo
from packstore.io.storage import Location
from packstore.io.upkeep import list_folder, pruned
from packstore.io.writers import marked
from packstore.records import PackSizes

log = logging.getLogger("packstore")


class AppendedBefore(DatasetExistsError):
    """What a job appends is the last part of the dataset that it extends."""


class WriteJob:
    """The next version of a place.

    Attributes:
        location: the place.
        version: the number that the next manifest will have.
        extends: the dataset whose packs come first in the next version; None: there are none.
        committed: the version that :meth:`commit` made.
    """

    extends: Dataset | None = None
    committed: Dataset

    def __init__(self, location: Location, version: int) -> None:
        self.location, self.version = location, version

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

    def commit(self, manifest: Manifest) -> None:
        """Puts the manifest under the number of this job, and looks whether its files are there.

        Raises:
            DatasetExistsError: another writer was faster.
            MissingFilesError: the version is on record, and broken.
            StorageError: the store refuses.
        """
        commit_manifest(self.location, manifest, version=self.version)
        require_committed(self.location, manifest, self.version)
        # As a reader gets it. The newest version may be that of another job by now.
        as_stored = Manifest.from_json(manifest.to_json(), self.location.display)
        self.committed = Dataset(self.location, as_stored, self.version)


@contextlib.contextmanager
def writing(
    location: Location,
    overwrite: bool,
    call: str = "pack",
    *,
    single_writer: bool = False,
    name: str = DATASET,
) -> Iterator[WriteJob]:
    """A context in which a job writes to `location`, maybe beside others.

    Args:
        location: the dataset.
        overwrite: a dataset that is there is going to be replaced.
        call: what the job does, for people.
        single_writer: no other job writes there meanwhile.
        name: first part of the name of its manifest.

    Raises:
        ConfigError: two writers could both commit there, and `single_writer` is False.
        DatasetExistsError: a dataset is there, and `overwrite` is False.
        StorageError: the store refuses.
    """
    require_exclusive(location, single_writer)
    version = refuse_existing(location, overwrite, name)
    with pruned(location), marked(location, call):
        yield WriteJob(location, version)

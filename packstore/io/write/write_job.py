"""A job that writes the next version of a place.

1. Check that a dataset may be written there, and choose the number of its manifest.
2. Write a marker, and warn if another job has one.
3. Before the commit, check that every shard exists.
4. After the commit or an error, remove the marker. An error removes nothing else.
Of several running jobs, the first to write the manifest of that number commits.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from packstore.errors import DatasetExistsError, sentence
from packstore.format.arrays import PackSizes
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.commit import (
    DATASET,
    refuse_existing,
    require_committed,
    require_exclusive,
    require_files,
)
from packstore.io.manifest.concat import Member, check_alike, merge
from packstore.io.manifest.manifest import Manifest, commit_manifest
from packstore.io.shards.shard import ShardInfo
from packstore.io.store.location import Location
from packstore.io.store.operations import removing_empty_folders
from packstore.io.write.writer_markers import writer_marker

log = logging.getLogger("packstore")


class AppendedBefore(DatasetExistsError):
    """The records to append already are the last part of the dataset."""


class WriteJob:
    """The next version of a dataset.

    Attributes:
        version: number of the next manifest.
        extends: the dataset whose packs come first in the next version; None: no other packs.
        committed: the version written by :meth:`commit`.
    """

    extends: Dataset | None = None
    committed: Dataset

    def __init__(self, location: Location, version: int) -> None:
        self.location, self.version = location, version

    def check_fits(
        self, kind: str, carry: Mapping[str, str], provenance: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Raises CompatibilityError if the packs cannot be appended to the extended dataset."""
        if self.extends is not None:
            manifest = self.extends.manifest
            about = {**manifest.provenance, "tokenizer": provenance().get("tokenizer")}
            added = replace(manifest, kind=kind, carry=carry, provenance=about)
            check_alike(Member(self.extends.url, manifest), Member("what is appended", added))

    def earlier(self) -> Iterator[PackSizes]:
        """Yields the sizes of the packs of each shard of the extended dataset."""
        if self.extends is not None:
            for number in range(len(self.extends.manifest.shards)):
                yield self.extends.shard_sizes(number)

    def whole(self, manifest: Manifest) -> Manifest:
        """Returns the manifest to commit: the extended dataset, then this job's shards."""
        if self.extends is None:
            return manifest
        url = self.extends.url
        merged = merge([Member(url, self.extends.manifest), Member(url, manifest)])
        return replace(merged, pack_index=manifest.pack_index)

    def refuse_again(self, about: Mapping[str, Any]) -> None:
        """Refuses to append records twice: AppendedBefore for those that its last part has."""
        past = self.extends.manifest.provenance if self.extends else {}
        old, new = (
            {s.get("sha256") for s in told.get("sources", ())} - {None} for told in (past, about)
        )
        if not new & old:
            return
        if not new <= old:
            log.warning("%d of %d inputs are in the dataset already", len(new & old), len(new))
            return
        last = past.get("combined_from")
        if last and last[-1].get("lineage") == about.get("lineage"):
            raise AppendedBefore(self.location.display)
        must = "records that are appended must not be in it yet"
        do = "To have them twice, pack them elsewhere and use concat"
        found = "these very ones, by the hash of the input"
        raise DatasetExistsError(sentence(self.location.display, must, found, do))

    def confirm(self, shards: Iterable[ShardInfo]) -> None:
        """Raises MissingFilesError unless all shards still exist, right before the commit."""
        files = {shard.path: shard.bytes for shard in shards}
        must = "its shards must stay while a job writes there"
        require_files(self.location, files, must, "Run it again")

    def commit(self, manifest: Manifest) -> None:
        """Writes the manifest under the number of this job, then checks that its files exist."""
        commit_manifest(self.location, manifest, version=self.version)
        require_committed(self.location, manifest.files, self.version)
        # Read back like a reader does. By now the newest version may be another job's.
        as_stored = Manifest.from_json(manifest.to_json(), self.location.display)
        self.committed = Dataset(self.location, as_stored, self.version)


@contextlib.contextmanager
def writing(
    location: Location, overwrite: bool, call: str = "pack", name: str = DATASET
) -> Iterator[WriteJob]:
    """Opens a job that writes to `location`; `call` names it in messages, `name` its manifests."""
    require_exclusive(location)
    version = refuse_existing(location, overwrite, name)
    with removing_empty_folders(location), writer_marker(location, call):
        yield WriteJob(location, version)

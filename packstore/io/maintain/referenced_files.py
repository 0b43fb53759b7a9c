"""Lists the files of committed versions, which must not be removed."""

from __future__ import annotations

from collections.abc import Iterable

from packstore.io.manifest.commit import DATASET
from packstore.io.manifest.manifest import read_manifest
from packstore.io.manifest.side_manifest import SIDE
from packstore.io.side.side_reader import open_side_at
from packstore.io.store.location import Location


def paths_of(location: Location, numbers: Iterable[int], name: str = DATASET) -> set[str]:
    """Returns the paths of the shards and pack indexes of these versions.

    Raises:
        FormatError: a manifest is not valid.
        StorageError: the store refuses.
    """
    found: set[str] = set()
    for number in numbers:
        if name == SIDE:
            found |= {shard.path for shard in open_side_at(location, number).manifest.shards}
            continue
        manifest, _ = read_manifest(location, number)
        found |= {shard.path for shard in manifest.shards}
        found |= {manifest.pack_index.path} if manifest.pack_index else set()
    return found

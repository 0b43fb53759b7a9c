"""Tells early of a job that is too large for the way in which it is cut."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from packstore.etl.partitions.resume import Partition
from packstore.etl.partitions.slices import READERS, Slice
from packstore.io.manifest import commit
from packstore.io.manifest.manifest import manifest_bytes
from packstore.io.store.location import Location

MANY_READS = 8
"""Reads of each file, by tasks of a cluster, above which two fifths of their time and more are
reading (``benchmarks/scale.py``)."""

log = logging.getLogger("packstore")


def warn_of_reads(slices: Sequence[Sequence[Slice]], files: int) -> None:
    """Logs if tasks of a cluster read each file many times."""
    reads = sum(map(len, slices)) / files
    if reads > MANY_READS:
        log.warning(
            "%d partitions take blocks of %d files, so each file is read %.0f times: reading may "
            "take longer than packing. With %d files it would be read %d times",
            *(len(slices), files, reads, 4 * len(slices), READERS),
        )


def check_growth(first: Partition, partitions: int, places: Sequence[Location]) -> None:
    """Refuses a job whose manifest would be larger than readers accept.

    Args:
        first: its first partition, by which the others are judged.
        partitions: number of partitions.
        places: of each dataset.

    Raises:
        FormatError: a manifest would have more than 1.5 times the bytes allowed.
    """
    for place, one in zip(places, first.written, strict=True):
        size = partitions * manifest_bytes([part.shard for part in one.shards])
        if size > 1.5 * commit.MAX_MANIFEST_BYTES:
            raise commit.too_large(place.display, f"about {size} from {partitions} partitions")

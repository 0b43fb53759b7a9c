"""The next version of a place, and the removal of old ones; see ``README.md``."""

from packstore.io.versions.shard_writer import ShardWriter

__all__ = [
    "ShardWriter",
]

"""Writes the next version of a dataset, publishes one, and removes old ones.

See ``README.md``.
"""

from packstore.io.versions.shard_writer import ShardWriter

__all__ = [
    "ShardWriter",
]

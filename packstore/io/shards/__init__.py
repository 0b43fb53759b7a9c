"""One shard file; see ``README.md``."""

from packstore.io.shards.shard import PackShape

__all__ = ["PackShape"]

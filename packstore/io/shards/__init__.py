"""One shard file; see ``README.md``."""

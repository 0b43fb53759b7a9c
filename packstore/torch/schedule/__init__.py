"""Which packs, on which rank, in which step; see ``README.md``."""

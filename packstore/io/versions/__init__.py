"""The next version of a place, and what becomes of old ones; see ``README.md``."""

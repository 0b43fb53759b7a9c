"""The next version of a place, and the removal of old ones; see ``README.md``."""

"""The versions of a dataset; see ``README.md``."""

"""A committed dataset, read; see ``README.md``."""

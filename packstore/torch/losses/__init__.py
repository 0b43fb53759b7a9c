"""A sum and a count; see ``README.md``."""

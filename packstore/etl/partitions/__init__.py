"""Partitions of an input, each packed on its own; see ``README.md``."""

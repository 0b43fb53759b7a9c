"""Partitions of an input, each made on its own; see ``README.md``."""

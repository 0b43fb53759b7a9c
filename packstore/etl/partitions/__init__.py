"""Partitions, parts of an input that are packed on their own; see ``README.md``."""

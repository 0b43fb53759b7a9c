"""The definition of a dataset, without I/O; see ``README.md``."""

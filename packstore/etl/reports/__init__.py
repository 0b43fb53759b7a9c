"""Reports on an input, without a dataset; see ``README.md``."""

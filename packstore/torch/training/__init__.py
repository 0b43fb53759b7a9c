"""A whole training run; see ``README.md``."""

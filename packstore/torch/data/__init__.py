"""Datasets and loaders; see ``README.md``."""

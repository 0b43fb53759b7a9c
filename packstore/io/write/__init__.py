"""Packs into the next version of a place; see ``README.md``."""

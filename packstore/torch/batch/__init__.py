"""Packs as one flat row; see ``README.md``."""

"""One number per segment; see ``README.md``."""

"""Pages to look at in a browser; see ``README.md``."""

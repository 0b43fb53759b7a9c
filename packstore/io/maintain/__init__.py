"""A place before and after jobs; see ``README.md``."""

"""A local folder or any URL that fsspec knows; see ``README.md``."""

"""One record of any accepted shape; see ``README.md``."""

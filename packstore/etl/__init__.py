"""From records to a committed dataset; see ``README.md``."""

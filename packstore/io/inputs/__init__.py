"""Files, tables and frames as blocks of records; see ``README.md``."""

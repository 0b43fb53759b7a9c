"""Reports before a job, which write no dataset; see ``README.md``."""

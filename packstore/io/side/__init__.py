"""Values derived from a dataset, by example id; see ``README.md``."""

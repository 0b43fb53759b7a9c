"""Other trainers; see ``README.md``."""

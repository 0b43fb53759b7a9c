"""Log-probs of the reference model, and whose they are; see ``README.md``."""

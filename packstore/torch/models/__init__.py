"""Hugging Face models on packed rows; see ``README.md``."""

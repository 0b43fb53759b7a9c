"""A whole training run; the steps are in ``README.md`` beside this file."""

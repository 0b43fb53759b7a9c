"""Schedules packs over ranks and optimizer steps; see ``README.md``."""

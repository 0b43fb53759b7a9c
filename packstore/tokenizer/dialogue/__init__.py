"""Messages to text; see ``README.md``."""

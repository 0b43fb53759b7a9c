"""io.side."""

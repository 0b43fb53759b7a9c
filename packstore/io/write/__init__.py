"""io.write."""

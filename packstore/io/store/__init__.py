"""io.store."""

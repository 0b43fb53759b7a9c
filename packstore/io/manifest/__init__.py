"""io.manifest."""

"""io.maintain."""

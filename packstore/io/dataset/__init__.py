"""io.dataset."""

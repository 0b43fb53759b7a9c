"""Plans packs from lengths and copies tokens into them; uses numpy and numba, no files."""

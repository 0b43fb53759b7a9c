"""Plans packs from lengths and copies tokens into them: numpy and numba, no files."""

"""io.shards."""

"""Storage: inputs, shards, the manifest, and the order in which packs are read."""

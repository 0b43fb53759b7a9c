"""Storage: inputs, shards, the manifest, and the order of the packs."""

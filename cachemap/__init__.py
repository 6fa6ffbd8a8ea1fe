"""Who holds which prefix: block hashing, the block table, KV event intake."""

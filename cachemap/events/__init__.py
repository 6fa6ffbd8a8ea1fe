"""What engines report of their caches: sockets, decoding, the order of batches, replay, and writing it into a
CacheMap."""

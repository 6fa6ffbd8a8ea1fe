"""Engines' cache events: sockets, decoding, the order of batches, replay, and their application to a CacheMap."""

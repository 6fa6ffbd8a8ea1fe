"""Workers: several gateway processes on one machine that share a port.

Like gateways on several machines, they share the cache map and the load through Redis.
"""

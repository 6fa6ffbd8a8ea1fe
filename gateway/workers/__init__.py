"""Workers: several gateways on one machine that share a port and a Redis.

They share the Redis as gateways on several machines do.
"""

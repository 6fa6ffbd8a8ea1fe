"""Workers: several gateways on one machine that share a port and a Redis, as gateways on several machines share a
Redis."""

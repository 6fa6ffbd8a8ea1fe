"""Workers: several gateway processes on one machine that share a port, and a Redis as on several machines."""

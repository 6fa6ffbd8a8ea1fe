"""Workers: several gateway processes on one machine that share a port.

They share their state through a Redis, as gateways on several machines do.
"""

"""One cache map for many gateways: which replica holds which KV cache blocks, in Redis and in every gateway.

For each replica one gateway, the leader, holds a lease in Redis: it reads the engine's events and writes the changes.
"""

from cachemap.cluster.connect import RedisClients, RedisUrl, parse, without_password
from cachemap.cluster.intake import SharedIntake
from cachemap.cluster.shared import SharedMap

__all__ = ["RedisClients", "RedisUrl", "SharedIntake", "SharedMap", "parse", "without_password"]

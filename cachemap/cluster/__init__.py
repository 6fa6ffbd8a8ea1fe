"""One cache map for many gateways: the blocks that each replica holds, kept in Redis and mirrored by every gateway.

For each replica one gateway, the leader, holds a lease in Redis: it follows the engine's events and writes the changes.
"""

from cachemap.cluster.connect import Place, Ways, parse, without_password
from cachemap.cluster.intake import SharedIntake
from cachemap.cluster.shared import SharedMap

__all__ = ["Place", "SharedIntake", "SharedMap", "Ways", "parse", "without_password"]

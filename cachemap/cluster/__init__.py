"""One map for many gateways: what each replica holds, kept in Redis and mirrored by every gateway."""

from cachemap.cluster.connect import Place, Ways, parse, without_password
from cachemap.cluster.intake import SharedIntake
from cachemap.cluster.shared import SharedMap

__all__ = ["Place", "SharedIntake", "SharedMap", "Ways", "parse", "without_password"]

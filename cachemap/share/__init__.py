"""One map for many gateways: what each replica holds, kept in Redis, mirrored by every gateway."""

from cachemap.share.connect import Place, Ways, parse, without_password
from cachemap.share.intake import SharedIntake
from cachemap.share.shared import SharedMap

__all__ = ["Place", "SharedIntake", "SharedMap", "Ways", "parse", "without_password"]

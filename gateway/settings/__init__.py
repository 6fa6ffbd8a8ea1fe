"""The settings of a gateway: their schema, the source of each value, and checks.

Importing the package `policies` takes a fifth of a second, so `overload_of` and the module `warnings` do it only when
they are used.
"""

from .derived import (
    ADMIN_SIDE,
    Secrets,
    admin_headers,
    admin_url,
    known_urls,
    overload_of,
    read_engine_key,
    read_secrets,
    read_token,
)
from .errors import ConfigError, flag, place_of
from .schema import SIZES, Settings
from .sources import ALIASES, DEFAULT_FILE, ENV_PREFIX, Config, load, read_file, unknown_variables

__all__ = [
    "ADMIN_SIDE", "ALIASES", "DEFAULT_FILE", "ENV_PREFIX", "SIZES", "Config", "ConfigError", "Secrets", "Settings",
    "admin_headers", "admin_url", "flag", "known_urls", "load", "overload_of", "place_of",
    "read_engine_key", "read_file", "read_secrets", "read_token", "unknown_variables",
]  # fmt: skip

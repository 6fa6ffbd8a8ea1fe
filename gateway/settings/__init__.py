"""The settings of a gateway: their schema, where each value comes from, and what is wrong with one.

`overload` and `warnings` import the policies, which takes a fifth of a second: whoever needs them imports them.
"""

from .errors import place_of
from .schema import SIZES, Settings, flag
from .sources import (
    ADMIN_SIDE,
    ALIASES,
    DEFAULT_FILE,
    ENV_PREFIX,
    Config,
    ConfigError,
    Secrets,
    admin_headers,
    admin_url,
    kept_replicas,
    known_urls,
    load,
    read_engine_key,
    read_file,
    read_secrets,
    read_token,
    unknown_variables,
)

__all__ = [
    "ADMIN_SIDE", "ALIASES", "DEFAULT_FILE", "ENV_PREFIX", "SIZES", "Config", "ConfigError", "Secrets", "Settings",
    "admin_headers", "admin_url", "flag", "kept_replicas", "known_urls", "load", "place_of", "read_engine_key",
    "read_file", "read_secrets", "read_token", "unknown_variables",
]  # fmt: skip

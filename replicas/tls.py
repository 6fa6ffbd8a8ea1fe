"""TLS towards engines: whose certificates are believed."""

import ssl
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=4)
def context(authorities: Path | None) -> ssl.SSLContext:
    """For connections to engines behind https. `authorities`: a PEM file with the certificates of the authorities that
    are believed, in place of the system's. Raises OSError, of which ssl.SSLError is one, for a file that is none."""
    made = ssl.create_default_context(cafile=str(authorities) if authorities else None)
    made.set_alpn_protocols(["http/1.1"])
    return made


def context_for(url: str, authorities: Path | None) -> ssl.SSLContext | None:
    """The context for an engine's URL, None where it is plain HTTP."""
    return context(authorities) if url.startswith("https://") else None

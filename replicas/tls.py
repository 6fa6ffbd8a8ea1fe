"""TLS contexts for connections to engines, which decide whose certificates are trusted."""

import ssl
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=4)
def context(authorities: Path | None) -> ssl.SSLContext:
    """Return the TLS context for connections to engines over https.

    `authorities`: a PEM file of certificates to trust, in place of the system's. Raises OSError (ssl.SSLError is a
    subclass) if the file is invalid.
    """
    made = ssl.create_default_context(cafile=str(authorities) if authorities else None)
    made.set_alpn_protocols(["http/1.1"])
    return made


def context_for(url: str, authorities: Path | None) -> ssl.SSLContext | None:
    """Return the TLS context for an engine's URL, None for plain HTTP."""
    return context(authorities) if url.startswith("https://") else None

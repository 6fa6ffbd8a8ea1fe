"""TLS for connections to engines: whose certificates are trusted."""

import ssl
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=4)
def context(authorities: Path | None) -> ssl.SSLContext:
    """Return the context for connections to engines over https.

    `authorities`: a PEM file of trusted authorities, in place of the system's. Raises OSError (ssl.SSLError is one) for
    an invalid file.
    """
    made = ssl.create_default_context(cafile=str(authorities) if authorities else None)
    made.set_alpn_protocols(["http/1.1"])
    return made


def context_for(url: str, authorities: Path | None) -> ssl.SSLContext | None:
    """Return the context for an engine's URL, None for plain HTTP."""
    return context(authorities) if url.startswith("https://") else None

"""What the kernel knows of a connection and the event loop does not tell."""

from __future__ import annotations

import asyncio
import select


def has_left(transport: asyncio.Transport) -> bool:
    """Whether the peer has closed its side, which is not read of while reading is paused."""
    asked = select.poll()
    asked.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(asked.poll(0))

"""What the kernel knows of a connection and the event loop does not tell."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import select
import socket
import struct
import termios

_BYTES, _LINGER = struct.Struct("i"), struct.Struct("ii")


def has_left(transport: asyncio.Transport) -> bool:
    """Whether the peer has closed its side, which is not read of while reading is paused."""
    asked = select.poll()
    asked.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(asked.poll(0))


def reset_when_closed(transport: asyncio.Transport) -> None:
    """Let the peer see that what it has is not all: what is not sent yet will not be."""
    connection: socket.socket = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it is closed
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))


def has_unacknowledged(transport: asyncio.Transport) -> bool:
    """Whether the peer's kernel lacks a part of what was sent to it, so that nobody there can have read all of it. It
    can be asked after a reset, too. What the peer's kernel had, and nobody read, is not told."""
    asked: socket.socket = transport.get_extra_info("socket")
    try:
        (left,) = _BYTES.unpack(fcntl.ioctl(asked.fileno(), termios.TIOCOUTQ, bytes(_BYTES.size)))
    except (OSError, ValueError):  # the kernel does not tell, or the socket is closed
        return False
    return bool(left)

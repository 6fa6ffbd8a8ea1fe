"""What the kernel knows of a connection and the event loop does not tell."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import termios

_BYTES, _LINGER = struct.Struct("i"), struct.Struct("ii")
# Seconds of silence before the kernel asks whether the peer is there, and between two such questions; how many of them
# stay unanswered.
SILENT_SECONDS, ASK_SECONDS, MOST_UNANSWERED = 10, 5, 3


def has_left(transport: asyncio.Transport) -> bool:
    """Whether the peer has closed its side, which is not read of while reading is paused."""
    return bool(_events(transport, select.POLLRDHUP))


def has_data(transport: asyncio.Transport) -> bool:
    """Whether the peer has sent what is not read yet, and has not left."""
    return _events(transport, select.POLLIN | select.POLLRDHUP) == select.POLLIN


def _events(transport: asyncio.Transport, asked: int) -> int:
    poll = select.poll()
    try:
        poll.register(_socket(transport).fileno(), asked)
    except (OSError, ValueError):  # it is closed
        return 0
    return next((found for _, found in poll.poll(0)), 0)


def _socket(transport: asyncio.Transport) -> socket.socket:
    """Return the socket below a connection. Raises OSError once uvloop has closed it: then it names None."""
    found: socket.socket | None = transport.get_extra_info("socket")
    if found is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return found


def reset_when_closed(transport: asyncio.Transport) -> None:
    """Let the peer see that what it has is not all: what is not sent yet will not be."""
    with contextlib.suppress(OSError):  # it is closed
        _socket(transport).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))


def ask_when_silent(transport: asyncio.Transport) -> None:
    """Have the kernel find out that the peer's machine is gone, which closes nothing: it ends the connection then."""
    with contextlib.suppress(OSError):  # it is closed
        connection = _socket(transport)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MOST_UNANSWERED)


def has_unacknowledged(transport: asyncio.Transport) -> bool:
    """Whether the peer's kernel lacks a part of what was sent to it, so that nobody there can have read all of it. It
    can be asked after a reset, too. What the peer's kernel had, and nobody read, is not told."""
    try:
        (left,) = _BYTES.unpack(fcntl.ioctl(_socket(transport).fileno(), termios.TIOCOUTQ, bytes(_BYTES.size)))
    except (OSError, ValueError):  # the kernel does not tell, or the socket is closed
        return False
    return bool(left)

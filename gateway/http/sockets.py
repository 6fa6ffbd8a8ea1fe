"""The state of a connection that the kernel knows and the event loop does not report, such as unread data."""

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
# TCP keep-alive: seconds without data before the first probe, seconds between probes, and how many unanswered probes
# end the connection.
SILENT_SECONDS, ASK_SECONDS, MOST_UNANSWERED = 10, 5, 3


def has_left(transport: asyncio.Transport) -> bool:
    """Return whether the peer has closed its side, which the event loop does not notice while reading is paused."""
    return bool(_events(transport, select.POLLRDHUP))


def has_data(transport: asyncio.Transport) -> bool:
    """Return whether the peer has sent data that is not read yet, and has not closed its side."""
    return _events(transport, select.POLLIN | select.POLLRDHUP) == select.POLLIN


def _events(transport: asyncio.Transport, asked: int) -> int:
    """Return the bit mask of those poll events in the mask `asked` that the connection has now; 0 if it is closed."""
    poll = select.poll()
    try:
        poll.register(_socket(transport).fileno(), asked)
    except (OSError, ValueError):  # it is closed
        return 0
    return next((found for _, found in poll.poll(0)), 0)


def _socket(transport: asyncio.Transport) -> socket.socket:
    """Return a connection's socket; raises OSError if it is closed, for which uvloop returns None."""
    found: socket.socket | None = transport.get_extra_info("socket")
    if found is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return found


def reset_when_closed(transport: asyncio.Transport) -> None:
    """Make the next close a TCP reset, so that the peer cannot take a response that was cut off for a complete one.

    Bytes that are not sent by then are dropped.
    """
    with contextlib.suppress(OSError):  # it is closed
        _socket(transport).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))


def ask_when_silent(transport: asyncio.Transport) -> None:
    """Enable TCP keep-alive, so that the kernel ends the connection if the peer's machine is gone."""
    with contextlib.suppress(OSError):  # it is closed
        connection = _socket(transport)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MOST_UNANSWERED)


def has_unacknowledged(transport: asyncio.Transport) -> bool:
    """Return whether some bytes that were sent are not acknowledged by the peer's kernel.

    Then the peer's process cannot have read all of them. This also holds after the connection was reset. The reverse
    does not hold: bytes may be acknowledged by the peer's kernel and not read by its process.
    """
    try:
        (left,) = _BYTES.unpack(fcntl.ioctl(_socket(transport).fileno(), termios.TIOCOUTQ, bytes(_BYTES.size)))
    except (OSError, ValueError):  # not supported by the kernel, or the socket is closed
        return False
    return bool(left)

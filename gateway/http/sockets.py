"""What the kernel knows of a connection and the event loop does not tell."""

from __future__ import annotations

import asyncio
import select
import socket
import struct

# Of Linux's tcp_info: how many segments were sent that the peer's kernel does not have.
_UNACKED = struct.Struct("24xI")


def has_left(transport: asyncio.Transport) -> bool:
    """Whether the peer has closed its side, which is not read of while reading is paused."""
    asked = select.poll()
    asked.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(asked.poll(0))


def left_unread(transport: asyncio.Transport) -> bool:
    """Whether a peer that has just closed its side cannot have read all that was sent to it: some of it had not reached
    its kernel by then, or was answered with a reset. Without TCP_INFO (Linux) only the reset tells."""
    if transport.get_write_buffer_size():
        return True
    asked: socket.socket = transport.get_extra_info("socket")
    if asked.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return True
    if not hasattr(socket, "TCP_INFO"):
        return False
    (unacked,) = _UNACKED.unpack(asked.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED.size))
    return bool(unacked)

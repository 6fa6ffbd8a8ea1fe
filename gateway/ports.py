"""Ports on which this process could listen."""

from __future__ import annotations

import socket


def bound(kind: int, address: tuple, shared: bool) -> socket.socket:
    """A socket that has this address, with others of this user where all of them have it `shared`. OSError if it cannot
    be had."""
    one = socket.socket(kind, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if kind == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
    except BaseException:
        one.close()
        raise
    return one


def why_taken(host: str, port: int) -> OSError | None:
    """Why nobody could listen there, or None. Of every address of the host; "" is all that this machine has."""
    if port == 0:
        return None
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for kind, *_, address in dict.fromkeys(found):
            with bound(kind, address, shared=False) as probe:
                probe.listen(1)
    except OSError as error:
        return error
    return None

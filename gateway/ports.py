"""Functions that find and bind the addresses on which this process listens."""

from __future__ import annotations

import errno
import socket


def bound(kind: int, address: tuple, shared: bool) -> socket.socket:
    """Return a socket of the family `kind` bound to this address. Raises OSError.

    With `shared`, other processes of this user may bind the address too, if all of them do so with `shared`.
    """
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


def addresses(host: str, port: int) -> list[tuple]:
    """Return the addresses of a host as `getaddrinfo` gives them; the host "" stands for all addresses of this machine.

    Addresses of a family that the kernel does not support, such as IPv6, are left out, as the server skips them too. If
    no address is left, all are returned.
    """
    found = dict.fromkeys(socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
    kinds = {kind for kind in {one[0] for one in found} if _has_sockets(kind)}
    return [one for one in found if one[0] in kinds] or list(found)


def _has_sockets(kind: int) -> bool:
    try:
        socket.socket(kind, socket.SOCK_STREAM).close()
    except OSError as error:
        return error.errno != errno.EAFNOSUPPORT
    return True


def why_taken(host: str, port: int) -> OSError | None:
    """Return the first error in binding the addresses of a host, or None if this process can listen on all of them.

    Port 0 (any free port) always gives None.
    """
    if port == 0:
        return None
    try:
        for kind, *_, address in addresses(host, port):
            with bound(kind, address, shared=False) as probe:
                probe.listen(1)
    except OSError as error:
        return error
    return None

"""Host names: how they are written, and the addresses that they resolve to."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future
from ipaddress import ip_address

MOST_ADDRESSES = 8  # tried per name, one after the other


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def bracketed(host: str) -> str:
    """Return a host as it is written in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def resolve(host: str) -> asyncio.Future[tuple[str, ...]]:
    """Start to resolve a host name; return a future of its IP addresses, which raises OSError if there are none.

    At most MOST_ADDRESSES (8) are returned. IPv4 addresses come first, since an engine that binds its event sockets to
    `tcp://*` has them on IPv4 alone. Each family is in numeric order, so that every gateway prefers the same address.
    The lookup runs in a thread of its own: a name server that does not answer blocks nothing else, and the thread does
    not outlive the process.
    """
    found: Future[tuple[str, ...]] = Future()
    found.set_running_or_notify_cancel()  # from here on nobody can cancel it

    def ask() -> None:
        try:
            answers = {str(where[0]) for _, _, _, _, where in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
            order = sorted(answers, key=lambda one: (":" in one, ip_address(one)))
            found.set_result(tuple(order[:MOST_ADDRESSES]))
        except OSError as error:
            found.set_exception(error)
        except UnicodeError as error:  # a label is empty or too long
            found.set_exception(OSError(str(error)))

    threading.Thread(target=ask, daemon=True, name=f"resolve {host}").start()
    return asyncio.wrap_future(found)

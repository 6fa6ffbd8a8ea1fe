"""The one address at which an engine is reached: by probes, by requests and for its KV events.

A host name may resolve to several machines, and later to other ones. A gateway that resolved the name for each
connection could send prompts to one machine and get the cache events of another. So the engine's watcher resolves the
name once, and all connections use the address that it found. The name is resolved again when the engine does not answer
at that address.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterable
from ipaddress import ip_address

from replicas.deadline import within

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


class HostName:
    """A host name, its IP addresses at the last lookup (`addresses`) and the one in use (`address`, set by callers)."""

    def __init__(self, host: str):
        self.host = host
        self.address = host if is_address(host) else ""  # in use; "" until one was found
        self.addresses: tuple[str, ...] = (host,) if self.address else ()
        self._asking: asyncio.Future[tuple[str, ...]] | None = None

    @property
    def fixed(self) -> bool:
        """Whether the host is an IP address, not a name."""
        return self.address == self.host

    async def look_up(self, deadline: float) -> tuple[str, ...]:
        """Return all addresses of the host, IPv4 first, each family in numeric order.

        The order makes every gateway prefer the same address. IPv4 comes first because an engine that binds its event
        sockets to `tcp://*` has them on IPv4 alone. Raises OSError, such as TimeoutError after `deadline` seconds.

        The lookup runs in a thread of its own, one at a time: a name server that does not answer costs one thread per
        name and blocks nothing else.
        """
        if self.fixed:
            return self.addresses
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_future()
            self._asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
            threading.Thread(
                target=_ask, args=(self.host, self._asking), daemon=True, name=f"resolve {self.host}"
            ).start()
        try:
            await within(deadline, asyncio.wait((self._asking,)))
        except TimeoutError:
            raise TimeoutError(f"host name {self.host!r} was not resolved within {deadline:g} s") from None
        asked, self._asking = self._asking, None
        self.addresses = asked.result()
        return self.addresses

    @property
    def others(self) -> tuple[str, ...]:
        """The addresses of the same family (IPv4 or IPv6) as the one in use: these must be other machines."""
        family = ":" in self.address
        return tuple(one for one in self.addresses if one != self.address and (":" in one) is family)


def _ask(host: str, asking: asyncio.Future[tuple[str, ...]]) -> None:
    """Resolve `host` in this thread, and pass the addresses or the error to the future `asking` in its event loop."""
    answer: tuple[str, ...] | OSError
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        answer = _in_order(str(where[0]) for _, _, _, _, where in found)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that is empty or too long
        answer = error if isinstance(error, OSError) else OSError(str(error))

    def tell() -> None:
        if asking.done():
            return
        if isinstance(answer, OSError):
            asking.set_exception(answer)
        else:
            asking.set_result(answer)

    with contextlib.suppress(RuntimeError):  # the loop is closed, nothing waits
        asking.get_loop().call_soon_threadsafe(tell)


def _in_order(found: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct addresses, IPv4 before IPv6, at most MOST_ADDRESSES; a scope id (fe80::1%eth0) is kept."""
    return tuple(sorted(set(found), key=lambda one: (":" in one, ip_address(one))))[:MOST_ADDRESSES]

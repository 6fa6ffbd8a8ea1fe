"""The one address at which an engine is reached: by probes, by requests and for its KV events.

A host name may lead to several machines, and to others tomorrow. Whoever resolved it again for each connection would
send prompts to one machine and believe the cache events of another. So a name is resolved here, by the engine's
watcher, and everybody else connects to the address it found. It stays for as long as the engine is the same
incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterable
from ipaddress import ip_address
from time import monotonic

from replicas.deadline import within

MOST_ADDRESSES = 8  # of one name, tried one after the other
REMEMBERED_SECONDS = 600.0  # a name that comes back to an address within this time may only alternate
# for which it has to lead there before it is followed; twice as long each time that happens again
STEADY_SECONDS = 60.0


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def bracketed(host: str) -> str:
    """A host as it stands in a URL before the port."""
    return f"[{host}]" if ":" in host else host


class HostName:
    """A host name and what it was last seen to lead to. The address in use is chosen by the caller, told by `use`."""

    def __init__(self, host: str):
        self.host = host
        self.address = host if is_address(host) else ""  # in use; "" before the first one was found
        self.addresses: tuple[str, ...] = (host,) if self.address else ()
        self._asking: asyncio.Future[tuple[str, ...]] | None = None
        self._left: dict[str, float] = {}  # addresses that were in use before, and when they were left
        self._returns = 0  # how often it was followed back to one of them
        self._steady_since = float("-inf")  # when it began to lead where it does

    @property
    def fixed(self) -> bool:
        """Whether it is an address itself."""
        return self.address == self.host

    async def look_up(self, deadline: float) -> tuple[str, ...]:
        """All addresses of the host, IPv4 first, each family in numeric order so that every gateway prefers the same
        one. Raises OSError, of which TimeoutError is one, when none is known within `deadline` seconds.

        IPv4 comes first because an engine that binds its event sockets to `tcp://*` has them on IPv4 alone. The
        question runs in a thread of its own, and never in two at a time: a name server that does not answer costs one
        thread for each name, and keeps nobody else waiting."""
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
        now = monotonic()
        if self.addresses != asked.result():
            self.addresses, self._steady_since = asked.result(), now
        self._left |= {one: now for one in self.addresses if self._was_left(one, now)}
        return self.addresses

    def to_try(self, in_use: bool) -> tuple[str, ...]:
        """The addresses at which the engine may be, the likeliest first. `in_use`: the present address answers, and is
        left only for one that the name did not lead to before."""
        if self.address in self.addresses:
            return (
                (self.address,) if in_use else (self.address, *(one for one in self.addresses if one != self.address))
            )
        if not in_use:
            return self.addresses or ((self.address,) if self.address else ())
        return (self.address,) if self.alternates else (*self.addresses, self.address)

    @property
    def alternates(self) -> bool:
        """Whether the name leads back to an address that was left a short while ago, and may be elsewhere again soon.
        One that stays there has moved back: to the engine before an upgrade that was taken back, say."""
        now = monotonic()
        return any(self._was_left(one, now) for one in self.addresses) and now - self._steady_since < min(
            STEADY_SECONDS * 2**self._returns, REMEMBERED_SECONDS
        )

    @property
    def others(self) -> tuple[str, ...]:
        """Addresses beside the one in use that must be other machines: of the same family, or met in turn."""
        family = ":" in self.address
        same = [one for one in self.addresses if one != self.address and (":" in one) is family]
        return tuple(same) if self.address in self.addresses else self.addresses if self.alternates else ()

    def _was_left(self, address: str, now: float) -> bool:
        """A short while ago. Each time that the name leads there again counts as well."""
        return now - self._left.get(address, float("-inf")) < REMEMBERED_SECONDS

    def use(self, address: str) -> None:
        """Take `address`, and remember when another one was left for it."""
        if self.address and address != self.address:
            now = monotonic()
            self._returns = self._returns + 1 if self._was_left(address, now) else 0
            self._left[self.address] = now
            while len(self._left) > MOST_ADDRESSES:
                del self._left[next(iter(self._left))]
        self.address = address


def _ask(host: str, asking: asyncio.Future[tuple[str, ...]]) -> None:
    """In a thread: ask the system, and tell the event loop of `asking`."""
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

    with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
        asking.get_loop().call_soon_threadsafe(tell)


def _in_order(found: Iterable[str]) -> tuple[str, ...]:
    """IPv4 before IPv6. A scope id, as in fe80::1%eth0, is kept."""
    return tuple(sorted(set(found), key=lambda one: (":" in one, ip_address(one))))[:MOST_ADDRESSES]

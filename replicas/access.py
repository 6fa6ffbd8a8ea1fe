"""The connection to one engine: its resolved address, and a session pinned to that address."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from replicas.adopt import Facts, probe
from replicas.ask import PLAIN, Connector, Response, unresolved
from replicas.deadline import within
from replicas.event_source import EventSource
from replicas.names import is_address, resolve
from replicas.problems import Problem

PROBE_SECONDS = 2.0  # deadlines when an engine is probed once: for resolving its name, and for each answer


class Access:
    """The one address at which an engine is reached: by probes, by requests and for its KV events.

    A host name may resolve to several machines, and later to other ones. A gateway that resolved the name for each
    connection could send prompts to one machine and get the cache events of another. So `find` resolves the name once,
    all connections use the `address` that it found, and the name is resolved again when the engine does not answer.
    """

    def __init__(
        self,
        url: str,
        host: str,
        tls: ssl.SSLContext | None = None,
        events: EventSource | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """Set the access up for an engine's URL and host name; nothing is looked up yet.

        `tls`: for https. `events`: where the engine publishes KV events, as the operator wrote it. `headers`: sent with
        each request to the engine.
        """
        self.url, self._host, self._tls, self._events = url, host, tls, events
        self._headers = dict(headers or {})
        self.address = host if is_address(host) else ""  # an IP address; "" until an engine answered at one
        self._addresses: tuple[str, ...] = ()  # the host name's addresses at the last lookup
        self._lookup: asyncio.Future[tuple[str, ...]] | None = None  # the lookup in progress, at most one
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session for requests to the engine. Raises ConnectionError as long as no address is known."""
        if not self.address:
            raise ConnectionError(f"{self._host} has not been found yet")
        if self._session is None:
            self._session = session_to(self.address, self._tls, headers=self._headers)
        return self._session

    @property
    def events(self) -> EventSource | None:
        """The operator's event source, with the engine's host name replaced by its address; None if none was given."""
        return self._events.at(self._host, self.address) if self._events and self.address else self._events

    async def close(self) -> None:
        if self._lookup is not None:
            self._lookup.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def find(self, deadline: float, in_use: bool = False, patience: float = 0.0) -> Facts:
        """Probe the engine and return what it reports; look its host name up again if it does not answer. Never raises.

        The last known address is probed first; then all addresses that the name resolves to.
        `deadline`: seconds for a name lookup and for each answer; `patience`: further seconds for /health.
        `in_use`: the engine is thought to be healthy, so its address is kept while the name still resolves to it.
        """
        known = None
        if self.address:
            known = await probe(self.url, self.session, deadline, self.address, patience)
            if known.alive or known.fault == "own" or self.address == self._host:
                return known
        try:
            self._addresses = await self._look_up(deadline)
        except TimeoutError:
            why = f"host name {self._host!r} was not resolved within {deadline:g} s; check DNS"
            return known or Facts(fault="connect", error=why)
        except OSError:
            return known or Facts(fault="connect", error=unresolved(self._host))
        if known is not None and in_use and self.address in self._addresses:
            return known
        tried = []
        for address in self._addresses:
            if address != self.address:
                facts = await self._try(address, deadline, patience)
                if facts.alive or facts.fault == "own":
                    return facts
                tried.append(facts)
        return known or next((facts for facts in tried if facts.fault != "connect"), tried[-1])

    async def _look_up(self, deadline: float) -> tuple[str, ...]:
        """Return the addresses of the host name. Raises OSError, such as TimeoutError after `deadline` seconds."""
        if self._lookup is None:
            self._lookup = resolve(self._host)
            self._lookup.add_done_callback(lambda done: done.cancelled() or done.exception())
        await within(deadline, asyncio.wait((self._lookup,)))
        done, self._lookup = self._lookup, None
        return done.result()

    async def _try(self, address: str, deadline: float, patience: float) -> Facts:
        """Probe the engine at `address`; use that address from then on if it answers."""
        session = session_to(address, self._tls, headers=self._headers)
        unused: aiohttp.ClientSession | None = session
        try:
            facts = await probe(self.url, session, deadline, address, patience)
            if facts.alive:
                self.address = address
                unused, self._session = self._session, session
        finally:
            if unused is not None:
                await unused.close()
        return facts

    @property
    def problem(self) -> Problem | None:
        """Return a problem if the host name resolves to other machines besides the one that is used, else None.

        Only other addresses of the same family (IPv4 or IPv6) count, as one machine may have one address of each.
        """
        is_v6 = ":" in self.address
        others = [one for one in self._addresses if one != self.address and (":" in one) is is_v6]
        if not others:
            return None
        return Problem(
            f"host name {self._host!r} leads to other addresses as well ({', '.join(others)}), of which none is used: "
            f"all requests go to {self.address}",
            "give each engine its own address or name as a replica URL; behind a load balancer no cache can be known",
        )


class _Pinned(AbstractResolver):
    """A resolver that resolves every name to one address."""

    def __init__(self, address: str):
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        kind, numeric = socket.AF_INET6 if ":" in self._address else socket.AF_INET, socket.AI_NUMERICHOST
        return [ResolveResult(hostname=host, host=self._address, port=port, family=kind, proto=0, flags=numeric)]

    async def close(self) -> None:
        pass


def session_to(
    address: str, tls: ssl.SSLContext | None = None, headers: Mapping[str, str] | None = None, **more: Any
) -> aiohttp.ClientSession:
    """Return a session for requests to an engine; all its connections go to the IP address `address`.

    The host in a request's URL does not change where the request goes. The session asks for uncompressed answers.
    `tls`: for https; None: the system's trusted certificates. `more`: further arguments of `aiohttp.ClientSession`.
    """
    # vLLM closes a connection that is idle for 5 s, so no connection is kept idle for longer than 4 s.
    pinned = Connector(limit=0, keepalive_timeout=4.0, resolver=_Pinned(address), use_dns_cache=False, ssl=tls or True)
    more |= {"connector": pinned, "headers": {**PLAIN, **(headers or {})}, "cookie_jar": aiohttp.DummyCookieJar()}
    return aiohttp.ClientSession(response_class=Response, auto_decompress=False, **more)

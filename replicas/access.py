"""The way to one engine: which address its name leads to now, and a session that asks nobody else."""

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
from replicas.event_source import EventSource
from replicas.names import HostName
from replicas.problems import Problem

PROBE_SECONDS = 2.0  # the deadline of who looks once: for a name to be resolved, and for each answer


class Access:
    """`find` looks for the engine; then `address` is where it answered last and `session` goes there."""

    def __init__(
        self,
        url: str,
        host: str,
        tls: ssl.SSLContext | None = None,
        events: EventSource | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """`events`: where it publishes, as the operator wrote it. `headers`: what each request to it carries."""
        self.url, self._name, self._tls, self._events = url, HostName(host), tls, events
        self._headers = dict(headers or {})
        self._publishers = {one: HostName(one) for one in (events.hosts if events else ()) if one != host}
        self._session: aiohttp.ClientSession | None = None

    @property
    def address(self) -> str:
        """ "" until the name was resolved and something answered there."""
        return self._name.address

    @property
    def session(self) -> aiohttp.ClientSession:
        if not self.address:
            raise ConnectionError(f"{self._name.host} has not been found yet")
        if self._session is None:
            self._session = session_to(self.address, self._tls, headers=self._headers)
        return self._session

    @property
    def events(self) -> EventSource | None:
        """Where it publishes, as the operator knows it, by address."""
        known = {self._name.host: self.address} | {host: name.address for host, name in self._publishers.items()}
        return self._events and self._events.at({host: address for host, address in known.items() if address})

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def find(self, deadline: float, in_use: bool = False, patience: float = 0.0) -> Facts:
        """Look the name up and probe the engine at the present address or, where the name no longer leads there, at a
        new one. `in_use`: the engine is thought to be well, so its address is left only for one that answers.
        `deadline`: seconds for the name, and for each answer, `patience`: beyond that for /health. Never raises."""
        fault = await self._look_up(deadline)
        tried: dict[str, Facts] = {}
        for address in self._name.to_try(in_use):
            session = self.session if address == self.address else session_to(address, self._tls, headers=self._headers)
            try:
                facts = tried[address] = await probe(self.url, session, deadline, address, patience)
                found = facts.alive and (address == self.address or not in_use or bool(facts.models) or facts.locked)
                if found:
                    session = await self._use(address, session)
            finally:
                if session is not None and session is not self._session:
                    await session.close()
            if found or facts.fault == "own":
                return facts
        if not tried:
            return Facts(fault="connect", error=fault or unresolved(self._name.host))
        told = next((facts for facts in tried.values() if facts.fault != "connect"), facts)
        return tried.get(self.address, told)

    async def _look_up(self, deadline: float) -> str:
        """Resolve all names; why that of the engine did not, or ""."""
        names = [self._name, *self._publishers.values()]
        found = await asyncio.gather(*(name.look_up(deadline) for name in names), return_exceptions=True)
        for name, addresses in zip(names[1:], found[1:], strict=True):
            if isinstance(addresses, tuple) and addresses and name.address not in addresses:
                name.use(addresses[0])
        if isinstance(found[0], TimeoutError):
            return f"{found[0]}; check DNS"
        return unresolved(self._name.host) if isinstance(found[0], Exception) else ""

    async def _use(self, address: str, session: aiohttp.ClientSession) -> aiohttp.ClientSession | None:
        """The engine answered there. What has to be closed now, if anything."""
        if session is self._session:
            return None
        left, self._session = self._session, session
        self._name.use(address)
        return left

    @property
    def problem(self) -> Problem | None:
        """A name that leads to several machines, of which one is used."""
        others = self._name.others
        if not others:
            return None
        return Problem(
            f"host name {self._name.host!r} leads to other addresses as well ({', '.join(others)}), of which none is used: "
            f"all requests go to {self.address}",
            "give each engine its own address or name as a replica URL; behind a load balancer no cache can be known",
        )


class _Pinned(AbstractResolver):
    """Resolves every name to one address."""

    def __init__(self, address: str):
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        kind = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        return [
            ResolveResult(
                hostname=host, host=self._address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST
            )
        ]

    async def close(self) -> None:
        pass


def connector(address: str, tls: ssl.SSLContext | None = None) -> Connector:
    """For a session whose every request goes to `address`, whatever host its URL names; with `tls` for https."""
    # vLLM closes a connection that is idle for 5 s
    return Connector(limit=0, keepalive_timeout=4.0, resolver=_Pinned(address), use_dns_cache=False, ssl=tls or True)


def session_to(
    address: str, tls: ssl.SSLContext | None = None, headers: Mapping[str, str] | None = None, **more: Any
) -> aiohttp.ClientSession:
    """A session over such a connector, for looking at an engine, which is asked for answers that are not compressed;
    `more` as aiohttp.ClientSession takes it."""
    return aiohttp.ClientSession(
        connector=connector(address, tls),
        cookie_jar=aiohttp.DummyCookieJar(),
        response_class=Response,
        headers={**PLAIN, **(headers or {})},
        auto_decompress=False,
        **more,
    )

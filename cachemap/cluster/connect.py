"""Connections to Redis by one URL: a single server, Sentinel or a Cluster, with TLS, password and ACL user.

    redis://[USER:PASSWORD@]HOST:PORT[/DB]               rediss:// for TLS (?ssl_ca_certs=FILE and so on)
    redis+sentinel://[...]HOST:PORT,HOST:PORT/MASTER[/DB]    rediss+sentinel:// for TLS
    redis+cluster://[...]HOST:PORT,HOST:PORT                 rediss+cluster:// for TLS
    unix://[USER:PASSWORD@]/PATH[?db=DB]                     a server's socket on this machine

Query parameters are redis-py's: those that begin with ssl_, sentinel_username and sentinel_password. Options that set
how long a call may take or how replies are read (socket_timeout, protocol ...) are not allowed in a URL. No function
here retries a call or waits long: the callers work on without Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from hiredis import pack_command
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.cluster import parse_cluster_slots
from redis.crc import key_slot
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
)

from cachemap.cluster.parser import Parser

OLDEST = (6, 2)  # the first Redis with XTRIM MINID
ANSWER_SECONDS = 1.0  # a server that takes longer to answer counts as gone; a lease lasts three times as long
SCHEMES = ("unix", *(f"{scheme}{kind}" for scheme in ("redis", "rediss") for kind in ("", "+sentinel", "+cluster")))
LOGINS = ("sentinel_username", "sentinel_password")
HIDDEN = "********"
BEGIN = Path(__file__).with_name("ask.lua").read_text()

FAILURES = (RedisError, OSError, TimeoutError)  # the errors that Redis or the network can cause in a call
# The errors that can arise here when Redis's reply is of another kind than the command returns.
NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error)


# A server's refusal as a pattern, its meaning, and the remedy. The wording differs between versions and forks.
REFUSALS = (
    ("protected mode", "it is in protected mode, so it answers its own machine only", "give it a password, or start it with "
     "--protected-mode no where no stranger reaches it"),
    ("READONLY|read.only replica", "it is a read-only replica", "give the URL of the primary, or redis+sentinel://, which finds it"),
    ("NOPERM|no permissions?|ACL failure|can't run this command|can't access", "its ACL does not let this user do that",
     "grant the user what docs/scaling.md lists"),
    ("OOM|used memory > 'maxmemory'", "it has no memory left (maxmemory)", "raise its maxmemory, or give gateways a Redis of their own"),
    ("LOADING", "it is still loading its data", "it is of use once that is done"),
    ("NOAUTH|Authentication required|without any password|no password is set|invalid password|WRONGPASS|invalid username-password",
     "it does not accept this user and password", "put the right ones into HITHERTO_REDIS_URL"),
    ("MISCONF", "it takes no writes because it cannot save to disk", "see its log and its disk, or turn stop-writes-on-bgsave-error off"),
    ("NOREPLICAS", "it takes no writes because too few replicas follow it", "see its replicas, or min-replicas-to-write"),
    ("BUSY", "it is busy with a script", "it is of use once that ends; SCRIPT KILL ends one that does not"),
    ("MASTERDOWN|CLUSTERDOWN", "a part of it is down", "see its nodes"),
    ("MOVED|CROSSSLOT", "it is a Cluster", "write redis+cluster:// in the URL"),
    ("max number of clients", "it takes no more connections (maxclients)", "raise its maxclients, or see who holds so many"),
    ("nknown.*command", "it does not know that command", "run Redis 6.2 or later, with no command renamed or switched off"),
)  # fmt: skip
REFUSES = "Redis refuses"  # the start of a message about one of the refusals above
REFUSED = b"refuses "  # the start of a `refusal` in ask.lua
_SCRIPTED = re.compile(r"refuses (\S+(?: at \S+)?): (.*)", re.S)
_SOURCE = re.compile(
    r"@?user_script: ?\d+: ?|,? ?script: \w+, on @?user_script:\d+\.?|Error running script \(call to \w+\): ?|^(ERR |-)"
)


# redis-py's message for an address that it cannot reach: an errno or a list of errors (of a host with several
# addresses), the address, and the error's own words.
_UNREACHED = re.compile(r"Error (.*?) ?connecting to (.+?)\.(?: (.*?)\.?)?", re.S)


def strange(command: str, error: BaseException | None = None) -> InvalidResponse:
    """Return (do not raise) the error for a well-formed reply that is of another kind than this command returns.

    `error`: the exception that reading the reply raised, if any.
    """
    why = f": {type(error).__name__}: {error}" if error is not None else ""
    return InvalidResponse(f"the reply to {command} is of another kind{why}")


def describe(error: BaseException) -> str:
    """Return the error of a call to Redis as a message for operators.

    It says what Redis refuses, at which key, why, and what to do.
    """
    if isinstance(error, BusyLoadingError):
        return in_words(f"LOADING {error}")  # redis-py removes the code
    if isinstance(error, MasterNotFoundError):  # redis-py appends a page on its connections
        return f"no sentinel names a primary {str(error).partition(' : ')[0].removeprefix('No master found for ')}"
    if isinstance(error, InvalidResponse):
        return f"something else than Redis answers there ({error})"
    if unreached := _UNREACHED.fullmatch(str(error)):
        numbers, place, said = unreached.groups()
        refused = str(errno.ECONNREFUSED)
        if said and numbers != refused and not said.startswith("Connect call failed"):
            return f"cannot connect to {place}: {in_words(said)}"
        found = dict.fromkeys(re.findall(r"\[Errno (\d+)\]", numbers) or re.findall(r"^\d+$", numbers))
        whys = ["nothing listens there" if one == refused else os.strerror(int(one)) for one in found]
        return f"cannot connect to {place}: {', '.join(whys) or in_words(said or numbers)}"
    return in_words("; ".join([str(error) or "no answer in time", *getattr(error, "__notes__", [])]))


def in_words(said: str) -> str:
    """Return an error message (`said`) of a Lua script or of the Redis server in plain words.

    The result names the remedy if `REFUSALS` has one.
    """
    scripted = _SCRIPTED.search(said)
    what = f"{REFUSES} {scripted[1]}" if scripted else ""
    said = scripted[2] if scripted else said
    while (plain := _SOURCE.sub("", said).strip()) != said:
        said = plain
    for pattern, why, remedy in REFUSALS:
        if re.search(pattern, said):
            brief = said if len(said) <= 200 else said.partition(". ")[0][:200]
            return f"{what or REFUSES}: {why} ({brief}); {remedy}"
    return f"{what}: {said}" if what else said


class Trouble(NamedTuple):
    """The reason why one of a gateway's tasks cannot be done in Redis."""

    why: str  # a message for operators
    answered: bool  # Redis answered, with an error

    @classmethod
    def of(cls, error: BaseException) -> Trouble:
        return cls(describe(error), isinstance(error, (ResponseError, AuthenticationError, BusyLoadingError)))


class RedisUrl(NamedTuple):
    """The parts of a Redis URL."""

    kind: str  # single, sentinel, cluster or unix
    hosts: list[tuple[str, int]]
    master: str  # the name by which sentinels know the primary
    options: dict[str, Any]  # redis-py's connection options

    def __str__(self) -> str:
        """Return the server's address without user and password, for logs."""
        if self.kind == "unix":
            return f"{self.options['path']} (unix socket)"
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{hosts} ({self.kind}{f' {self.master}' if self.master else ''})"


def parse(url: str) -> RedisUrl:
    """Return the parts of a Redis URL. Raises ValueError with a message that says what is wrong and what is right."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(
            "its host cannot be read; write redis://HOST:PORT, and an IPv6 address as redis://[ADDRESS]:PORT"
        ) from None
    if not url.lower().startswith(f"{parts.scheme}://") or not parts.scheme:
        raise ValueError(
            "it is no URL: write redis://HOST:PORT. One with a password is best given as HITHERTO_REDIS_URL; @FILE is not read here"
        )
    if "@" in parts.path + parts.query + parts.fragment:
        raise ValueError("/, ?, # and @ in a password must be written as %2F, %3F, %23 and %40")
    scheme, _, kind = parts.scheme.partition("+")
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{parts.scheme}:// is not known; write redis://HOST:PORT, rediss:// for TLS, unix:///PATH, "
                         "redis+sentinel://HOST:PORT,HOST:PORT/MASTER or redis+cluster://HOST:PORT,HOST:PORT")  # fmt: skip
    kind = kind or ("unix" if scheme == "unix" else "single")
    for name in parse_qs(parts.query, keep_blank_values=True):
        if name != "db" if kind == "unix" else not name.startswith("ssl_") and name not in LOGINS:
            allowed = "db can" if kind == "unix" else f"ssl_ca_certs and the like, {' and '.join(LOGINS)} can"
            raise ValueError(f"{name} cannot be set in the URL; leave it out. {allowed}")
    found: list[tuple[str, int]] = []
    login, at, hosts = parts.netloc.rpartition("@")
    path, master = parts.path.strip("/"), ""
    if kind == "unix":
        if hosts or not path:
            raise ValueError("the socket's absolute path is missing; write unix:///run/redis/redis.sock")
    else:
        if kind == "sentinel":
            master, _, path = path.partition("/")
            if not master:
                raise ValueError(
                    "the name of the primary is missing; write redis+sentinel://HOST:PORT,HOST:PORT/MASTER"
                )
        elif kind == "cluster" and path not in ("", "0"):
            raise ValueError("a Redis Cluster has only database 0; leave the number out")
        found = [_host(one, 26379 if kind == "sentinel" else 6379) for one in hosts.split(",")]
        if kind == "single" and len(found) > 1:
            raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    host = "" if kind == "unix" else "localhost"  # the hosts are not in redis-py's form
    options = dict(parse_url(f"{scheme}://{login}{at}{host}/{path}?{parts.query}"))
    options.pop("host", None)
    if HIDDEN in (options.get("password"), options.get("sentinel_password")):
        raise ValueError("the password is hidden here, as `hitherto config` prints it; write the real one")
    return RedisUrl(kind, found, master, options)


def without_password(url: str) -> str:
    """Return a Redis URL with asterisks in place of its passwords."""
    scheme, separator, rest = url.partition("://")
    login, at, rest = rest.rpartition("@")
    user, colon, password = login.partition(":")
    if password:
        login = f"{user}:{HIDDEN}"
    return scheme + separator + login + at + re.sub(r"(password=)[^&#]+", rf"\1{HIDDEN}", rest)


def _host(text: str, port: int) -> tuple[str, int]:
    found = urlsplit(f"//{text}")
    try:
        if not found.hostname:
            raise ValueError
        return found.hostname, found.port or port
    except ValueError:
        raise ValueError(f"{text!r} is not HOST:PORT") from None


def connect(place: RedisUrl, seconds: float = ANSWER_SECONDS) -> Redis:
    """Return a client of one server, or of the primary that sentinels name (for a Cluster see `RedisClients`).

    `seconds`: the longest time that a call may take. The client connects at its first call.
    """
    options = {
        "socket_timeout": seconds, "socket_connect_timeout": seconds, "retry": Retry(NoBackoff(), 0),
        "protocol": 2, "client_name": "hitherto", "parser_class": Parser, **place.options,
    }  # fmt: skip
    if place.kind != "sentinel":
        options |= zip(("host", "port"), place.hosts[0]) if place.hosts else ()  # a unix socket's path is an option
        return _Client.from_pool(ConnectionPool(**options))
    tls = options.pop("connection_class", None) is SSLConnection
    login = {
        name: options.pop(f"sentinel_{name}") for name in ("username", "password") if f"sentinel_{name}" in options
    }
    sentinel_options = {"socket_timeout": seconds, "socket_connect_timeout": seconds, "ssl": tls, **login}
    sentinel_options |= {name: value for name, value in options.items() if name.startswith("ssl_")}
    sentinels = _Sentinels(place.hosts, sentinel_kwargs=sentinel_options, ssl=tls, **options)  # type: ignore[no-untyped-call]
    for one in sentinels.sentinels:  # redis-py's client does not take this option
        one.connection_pool.connection_kwargs["parser_class"] = Parser
    return sentinels.master_for(place.master, _Client)  # type: ignore[no-any-return]


class _Client(Redis):
    """redis-py's client, with two changes.

    It raises InvalidResponse if a reply is of another kind than the command returns. And the client of a primary that
    sentinels name also closes its connections to the sentinels.
    """

    async def parse_response(self, connection: Any, command_name: Any, **options: Any) -> Any:
        try:
            return await super().parse_response(connection, command_name, **options)
        except NONSENSE as error:
            raise strange(command_name, error) from error

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        sentinels = getattr(self.connection_pool, "sentinel_manager", None)
        for one in sentinels.sentinels if sentinels is not None else ():
            await one.aclose()


class _Sentinels(Sentinel):
    """The Redis sentinels, which are asked one after another for the address of the primary.

    After a failed or cancelled request, the next request starts with another sentinel. If two sentinels hang, a request
    takes 2 s; the gateway then repeats it.
    """

    async def discover_master(self, service_name: str) -> Any:
        try:
            return await super().discover_master(service_name)
        except BaseException as error:
            self.sentinels.append(self.sentinels.pop(0))
            if isinstance(error, NONSENSE):
                raise strange("SENTINEL MASTERS", error) from error
            raise


class RedisClients:
    """The Redis clients of a gateway: one client for all keys, or on a Cluster one for each shard.

    redis-py's own cluster client is not used, as it closes the connections to all shards when one shard fails.
    `many`: the Redis is a Cluster. `failures`: how many calls failed so far.
    """

    def __init__(self, place: RedisUrl):
        self._place = place
        self.many = place.kind == "cluster"
        self._clients: dict[tuple[str, int] | None, Redis] = {} if self.many else {None: connect(place)}
        self._slots: list[tuple[int, int, tuple[str, int]]] = []
        self._nodes: list[tuple[str, int]] = []  # all known nodes, including replicas, in the order to ask them in
        self._asking: asyncio.Task[None] | None = None
        self.failures = 0

    async def to(self, key: str) -> Redis:
        """Return the client for the Redis server that has this key. Raises RedisError if no node serves the key."""
        if not self.many:
            return self._clients[None]
        if not self._slots:
            await asyncio.shield(self._ask())
        slot = key_slot(key.encode())
        for first, last, node in self._slots:
            if first <= slot <= last:
                return self._client(node)
        self.failed()
        raise RedisError(f"no node of the cluster serves slot {slot}")

    def failed(self) -> None:
        """Count a failed call of a client that `to` returned; on a Cluster, also read again which node has which keys.

        A failover takes seconds, so this may have to be read several times until it is right.
        """
        self.failures += 1
        if self.many:
            self._ask()

    async def aclose(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        for client in self._clients.values():
            with contextlib.suppress(*FAILURES):  # one that fails must not keep the others from being closed
                await client.aclose()

    def _client(self, node: tuple[str, int]) -> Redis:
        if node not in self._clients:
            self._clients[node] = connect(self._place._replace(kind="single", hosts=[node]))
        return self._clients[node]

    def _ask(self) -> asyncio.Task[None]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._learn_slots(), name="share cluster")
        return self._asking

    async def _learn_slots(self) -> None:
        """Ask the nodes of a Cluster, one after another, which node serves which hash slots, until one answers.

        A newly set up node answers that no node serves any slot; such an answer is skipped. A node that is cut off from
        the others gives outdated slots, so the node that answered is asked last the next time.
        """
        for node in list(dict.fromkeys([*self._nodes, *self._place.hosts])):
            with contextlib.suppress(*FAILURES, *NONSENSE):
                told = await self._client(node).execute_command("CLUSTER SLOTS")
                parts = parse_cluster_slots(told, current_host=node[0])
                known = {one for nodes in parts.values() for one in (nodes["primary"], *nodes["replicas"])}
                kinds = {(type(host), type(port)) for host, port in known} | {
                    (str, type(end)) for ends in parts for end in ends
                }
                if kinds == {(str, int)}:  # redis-py passes on whatever it was told
                    self._slots = [(first, last, nodes["primary"]) for (first, last), nodes in parts.items()]
                    self._nodes = [*(known - {node}), node]
                    return


class RedisConnection:
    """A dedicated connection to the Redis server that has one key, for frequent requests.

    All commands of a request go out in one write. A request and its replies take half the CPU time that they take with
    redis-py's pipeline, which borrows a connection for each request.
    """

    def __init__(self, clients: RedisClients, key: str):
        self._clients, self._key = clients, key
        self._client: Redis | None = None
        self._connection: AbstractConnection | None = None
        self._failures = 0  # `RedisClients.failures` when this connection was made
        self.sent = False  # whether any command of the last `ask` can have reached the server

    async def ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands and return their replies in order; raise the error of the first command that fails.

        Make one call at a time, and limit its time yourself: redis-py's own time limits for each write and each reply
        take as much CPU time as the write and the reply.
        """
        self.sent = False
        client = await self._clients.to(self._key)
        connection = self._connection
        if connection is None or client is not self._client:  # the first time, or the key has moved
            if connection is not None and self._client is not None:
                self._connection, pool = None, self._client.connection_pool
                await connection.disconnect(nowait=True)
                connection.socket_timeout = pool.connection_kwargs["socket_timeout"]
                await pool.release(connection)
            connection = await client.connection_pool.get_connection()
            connection.socket_timeout = None
            self._client, self._connection = client, connection
        try:
            if self._is_doubtful(connection):
                await connection.disconnect(nowait=True)
            if not connection.is_connected:
                self._failures = self._clients.failures
                await connection.connect()
            self.sent = True
            await connection.send_packed_command(b"".join(map(pack_command, commands)), check_health=False)
            return [await connection.read_response() for _ in commands]
        except BaseException:  # an unread reply must not be taken for the next command's; the next call reconnects
            await connection.disconnect(nowait=True)
            self._clients.failed()
            raise

    def _is_doubtful(self, connection: AbstractConnection) -> bool:
        """Return whether this connection may be broken, or lead to the wrong server, although Redis can be reached.

        That is so if the server has closed it. It is also so if any call to Redis has failed since it was opened: in a
        Cluster, the key of this connection may then be at another server.
        """
        reader = connection._reader
        closed = reader is not None and (reader.at_eof() or reader.exception() is not None)
        return closed or self._failures != self._clients.failures


Entries = list[tuple[bytes, dict[bytes, bytes]]]  # the entries of a Redis stream: the id and the fields of each


async def xread(client: Redis, after: dict[str, str], count: int, milliseconds: int) -> list[tuple[str, Entries]]:
    """Read several Redis streams with one XREAD command; return the new entries of each, by the stream's name.

    `after`: by stream name, the id after which to read. `count`: the most entries of each stream. `milliseconds`: how
    long to wait for new entries. If one key is not a stream, the server refuses the whole command.
    """
    news = await client.execute_command(
        "XREAD", "COUNT", count, "BLOCK", milliseconds, "STREAMS", *after, *after.values()
    )
    try:
        news = news.items() if isinstance(news, dict) else news or ()
        found = [(name.decode(), entries_of("XREAD", entries)) for name, entries in news]
    except NONSENSE as error:
        raise strange("XREAD", error) from error
    if not {name for name, _ in found} <= after.keys():
        raise strange("XREAD")
    return found


def entries_of(command: str, reply: Any) -> Entries:
    """Return the entries in a reply to a command that reads a stream.

    `command`: its name, for the error. Raises InvalidResponse if the reply is of another kind.
    """
    try:
        if all(type(id) is type(fields.get(b"d", b"")) is bytes for id, fields in reply):
            return list(reply)
    except NONSENSE as error:
        raise strange(command, error) from error
    raise strange(command)


def heed_cancellation() -> None:
    """Raise CancelledError if the current task is being cancelled; call this in every loop that calls Redis.

    redis-py uses asyncio.wait_for. In Python 3.11 that swallows a cancellation which arrives as the awaited call ends.
    """
    if (task := asyncio.current_task()) is not None and task.cancelling():
        raise asyncio.CancelledError


class Script:
    """A Lua script for the Redis server, with the functions that all scripts share (`ask.lua`) in front.

    Call it with a client, the script's KEYS and its ARGV to run it. It is run by its SHA-1, so that the server runs
    exactly this text; the text itself is sent to a server that does not have it yet.
    """

    def __init__(self, text: str):
        self.text = BEGIN + text
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, client: Redis, keys: list[str], arguments: list[Any]) -> Any:
        try:
            try:
                return await client.execute_command("EVALSHA", self.sha, len(keys), *keys, *arguments)
            except NoScriptError:
                return await client.execute_command("EVAL", self.text, len(keys), *keys, *arguments)
        except NoPermissionError as error:  # the error does not name the key
            if keys:
                error.add_note(f"asked for {keys[0]}")
            raise

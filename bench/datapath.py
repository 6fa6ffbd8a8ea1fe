"""What our data path costs beside the Rust routers and nginx: CPU per request of the whole process.

    python -m bench.datapath [--quick] [--rounds 3] [--loads plain,stream,chat] [--peers sglang,smg,vllm,nginx]
                             [--gateway NAME=COMMAND ...] [--json FILE] [--install]

Starts two engines that answer at once (`bench.instant_engine`), then every gateway, and sends each of them the same
requests, in interleaved rounds of which the first is not counted:

    plain    a chat of 8 kB, one JSON answer
    stream   the same, 64 events 2 ms apart
    chat     conversations that grow to about 32 kB, one JSON answer a turn

Printed are medians: CPU microseconds a request, as the kernel accounts them to the process and all that it started, so
that a busy machine disturbs them little; time to the first byte; and the CPU's ratio to the best Rust router. Quote the
ratios. This gateway is `ours`, with exact routing on: real tokenizer, chat template, block hashes, prefix map,
`least_time`. `--gateway` adds another, such as an older checkout's: {port}, {aux}, {urls} and {model} are filled in.
`--install` puts the peers that are missing into environments under PEERS_HOME, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import uvloop

from bench.contenders import PEERS_HOME
from bench.head_to_head import cpu_seconds
from loadgen.drive.stack import die_with_parent, free_ports
from replicas.simulated.model import sim_model_dir

SERVE = "{bin}/hitherto serve --host 127.0.0.1 --port {port} --admin-port {aux} --log-level warning --model {model}"
PACKAGES = {"sglang": "sglang-router==0.3.2", "smg": "smg==1.13.0", "vllm": "vllm-router==0.1.17"}
ROUTED = "--host 127.0.0.1 --port {port} --policy cache_aware --worker-urls {urls} --prometheus-port {aux}"
PEERS = {
    "sglang": "{peers}/sglang/bin/sglang-router launch " + ROUTED,
    "smg": "{peers}/smg/bin/smg launch " + ROUTED,
    "vllm": "{peers}/vllm/bin/vllm-router " + ROUTED,
}
NGINX = """worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.err;
events {{ worker_connections 4096; }}
http {{ access_log off; client_max_body_size 64m; client_body_buffer_size 1m; client_body_temp_path {folder}/b;
 proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
 upstream e {{ {servers} keepalive 256; }}
 server {{ listen 127.0.0.1:{port} backlog=1024; location / {{ proxy_pass http://e; proxy_http_version 1.1;
  proxy_set_header Connection ""; proxy_buffering off; }} }} }}
"""
WORDS = ("the of and to in is you that it he was for on are as with his they at be this have from or had by hot word "
         "but what some we can out other were all there when up use your how said an each she which do their").split()  # fmt: skip
COUNTS = {"plain": 3000, "stream": 400, "chat": 1400}  # requests of a round
TURNS, CONNECTIONS, READY_SECONDS = 14, 32, 90.0


def prose(dice: random.Random, size: int) -> str:
    return " ".join(dice.choices(WORDS, k=size // 4))[:size]


def sessions(load: str, count: int, seed: int) -> list[list[bytes]]:
    """Bodies of so many requests in all; those of one list are sent in order on one connection."""
    dice = random.Random(seed)
    system = {"role": "system", "content": prose(random.Random(7), 4000)}

    def body(messages: Sequence[dict[str, str]]) -> bytes:
        told = {"model": "m", "stream": load == "stream", "max_tokens": 64, "messages": [system, *messages]}
        return json.dumps(told).encode()

    def said(role: str, size: int) -> dict[str, str]:
        return {"role": role, "content": prose(dice, size)}

    if load != "chat":
        return [[body([said("user", 4000)])] for _ in range(count)]
    found = []
    for _ in range(max(1, count // TURNS)):
        turns = [said(role, 1000) for _ in range(TURNS) for role in ("user", "assistant")]
        found.append([body(turns[: 2 * number + 1]) for number in range(TURNS)])
    return found


class Connection(asyncio.Protocol):
    """One client's connection, with one request at a time."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.lost, self.answered = transport, False, None

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self.answered is not None and not self.answered.done():
            self.answered.set_exception(ConnectionError("it was closed"))

    def send(self, body: bytes) -> asyncio.Future[bool]:
        """Send a chat; the future tells whether it was answered with 200."""
        self.answered: asyncio.Future[bool] | None = asyncio.get_running_loop().create_future()
        self.received, self.first, self.begun = b"", 0.0, perf_counter()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        return self.answered

    def data_received(self, data: bytes) -> None:
        if self.answered is None or self.answered.done():
            return
        self.first = self.first or perf_counter() - self.begun
        self.received += data
        end = self.received.find(b"\r\n\r\n")
        head = self.received[:end].lower()
        at = head.find(b"content-length:")
        if end < 0:
            return
        if at >= 0:
            whole = len(self.received) >= end + 4 + int(head[at + 15 :].split(b"\r", 1)[0])
        else:
            whole = self.received.endswith(b"0\r\n\r\n")
        if whole:
            self.answered.set_result(self.received.startswith(b"HTTP/1.1 200"))


async def drive(port: int, todo: list[list[bytes]]) -> tuple[list[float], int, float]:
    """Send all of it -> seconds to each first byte, how many were not answered well, seconds in all."""
    loop, firsts, bad = asyncio.get_running_loop(), [], 0

    async def client() -> None:
        nonlocal bad
        connection: Connection | None = None
        while todo:
            for body in todo.pop():
                if connection is None or connection.lost:
                    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
                try:
                    bad += not await asyncio.wait_for(connection.send(body), 60)
                except (ConnectionError, TimeoutError):
                    bad, connection.lost = bad + 1, True
                firsts.append(connection.first)
        if connection is not None:
            connection.transport.close()

    begun = perf_counter()
    await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
    return sorted(firsts), bad, perf_counter() - begun


def ready(port: int) -> bool:
    """Whether a gateway answers a chat in time."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    url, end = f"http://127.0.0.1:{port}/v1/chat/completions", monotonic() + READY_SECONDS
    while monotonic() < end:
        try:
            asked = urllib.request.Request(url, body, {"content-type": "application/json"})
            with urllib.request.urlopen(asked, timeout=2) as answer:
                if answer.status == 200:
                    return True
        except OSError:
            pass
        sleep(0.3)
    return False


def started(stack: ExitStack, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    file = stack.enter_context(log.open("wb"))
    env = {name: value for name, value in os.environ.items() if not name.startswith("HITHERTO_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE if log.stem == "engine" else file, stderr=file, env=env,
                               start_new_session=True, preexec_fn=die_with_parent)  # fmt: skip

    def stop() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()

    stack.callback(stop)
    return process


def measure(commands: dict[str, str], loads: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Print what each gateway costs, and return it by `LOAD.NAME`. In a command {first} and {second} are the engines'
    URLs, and {urls} is both."""
    folder = Path(tempfile.mkdtemp())
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        engines = [started(stack, [sys.executable, "-m", "bench.instant_engine"], folder / "engine") for _ in "12"]
        first, second = (engine.stdout.readline().decode().strip() for engine in engines if engine.stdout)
        filled: dict[str, Any] = {"first": first, "second": second, "urls": f"{first} {second}", "peers": PEERS_HOME,
                                  "bin": Path(sys.executable).parent, "model": sim_model_dir(), "folder": folder}  # fmt: skip
        gateways = {}
        for name, command in commands.items():
            port, aux = free_ports(2)
            if name == "nginx":
                servers = " ".join(f"server {url.removeprefix('http://')};" for url in (first, second))
                (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port, servers=servers))
            words = shlex.split(command.format(port=port, aux=aux, **filled))
            process = started(stack, words, folder / f"{name}.log")
            if ready(port):
                gateways[name] = port, process.pid
            else:
                print(f"{name} did not come up: {(folder / f'{name}.log').read_text()[-800:]}")
        rows: dict[tuple[str, str], list[tuple[float, ...]]] = {}
        for load in loads:
            for number in range(rounds + 1):
                for name, (port, pid) in gateways.items():
                    count = COUNTS[load] if number else COUNTS[load] // 4
                    before = cpu_seconds(pid)
                    firsts, bad, took = uvloop.run(drive(port, sessions(load, count, number)))
                    used, sent = cpu_seconds(pid) - before, len(firsts)
                    row = used / sent * 1e6, firsts[sent // 2] * 1e3, firsts[sent * 99 // 100] * 1e3, sent / took, bad
                    if number:
                        rows.setdefault((load, name), []).append(row)
    return shown(rows, loads, [*gateways])


def shown(rows: dict[tuple[str, str], list[tuple[float, ...]]], loads: Sequence[str], names: Sequence[str]) -> dict:
    found = {}
    print(
        f"{'load':7} {'gateway':10} {'cpu us':>7} {'vs best Rust':>12} {'first byte p50':>14} {'p99 ms':>7} {'per s':>6} {'bad':>4}"
    )
    for load in loads:
        medians = {name: [statistics.median(column) for column in zip(*rows[load, name])] for name in names}
        best = min((medians[name][0] for name in PEERS if name in medians), default=float("nan"))
        for name, (cpu, p50, p99, rate, _) in medians.items():
            bad = sum(int(row[-1]) for row in rows[load, name])
            found[f"{load}.{name}"] = {"cpu_us": round(cpu, 1), "ratio": round(cpu / best, 3),
                                       "ttfb_p50_ms": round(p50, 3), "ttfb_p99_ms": round(p99, 3), "bad": bad}  # fmt: skip
            print(f"{load:7} {name:10} {cpu:7.1f} {cpu / best:12.2f} {p50:14.2f} {p99:7.2f} {rate:6.0f} {bad:4d}")
    return found


def install() -> None:
    """Give each peer that is missing an environment of its own."""
    for name, package in PACKAGES.items():
        if not (PEERS_HOME / name / "bin").exists():
            subprocess.run([sys.executable, "-m", "venv", PEERS_HOME / name], check=True)
            subprocess.run([PEERS_HOME / name / "bin/pip", "install", "-q", package], check=True)


def there(peers: Sequence[str]) -> dict[str, str]:
    """Return the commands of these peers; says which of them are not installed."""
    found = {}
    for name in peers:
        if name == "nginx" and shutil.which("nginx"):
            found[name] = "nginx -c {folder}/nginx.conf"
        elif (PEERS_HOME / name / "bin").exists():
            found[name] = PEERS[name]
        else:
            print(f"{name} is not installed, and left out: see --install")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round without streams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="plain,stream,chat")
    parser.add_argument("--peers", default="sglang,smg,vllm,nginx")
    parser.add_argument("--gateway", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    if args.install:
        install()
        return 0
    others = {name: command for name, _, command in (one.partition("=") for one in args.gateway)}
    commands = {
        "ours": f"{SERVE} --replica-url {{urls}}",
        **others,
        **there(args.peers.split(",") if args.peers else ()),
    }
    loads, rounds = ("plain,chat", 1) if args.quick else (args.loads, args.rounds)
    found = measure(commands, loads.split(","), rounds)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

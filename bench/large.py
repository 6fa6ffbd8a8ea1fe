"""Prompts of 100,000 tokens at 50 a second, one of a million, and the memory of those that wait.

    python -m bench.large [--seconds 10] [--rounds 3] [--rate 50] [--model DIR] [--quick] [--json FILE]

One gateway process with everything on (bundled tokenizer and template unless `--model` says otherwise, hashes, map,
`least_time`), two engines that read a body, forget it and answer, and nginx passing the same bodies to them. Clients,
engines and gateway share the machine's cores. Bodies have 400 kB and are sent when they are due, whatever happened to
those before:

new            nothing of it was ever seen
shared         300 kB that all have, 100 kB of its own
conversation   long conversations, each body 2 kB longer than the one before

A stall is what anybody else's request would wait. It is measured twice: by a timer in the gateway's own loop
(`bench.watched`: `own` is what is left when waiting for a core is taken off, `work` what the loop's thread computed in
between), and from outside, by a client that asks for /health 200 times a second; its time at an idle gateway while
nginx has the load says what the machine itself does. `most` is what 16 clients get that never pause, themselves and the
engines on the same cores. Memory is the proportional set size of the gateway with 32 requests held by the engines, less
before, by the bytes of their bodies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import uvloop

from bench.large_load import BODY, Bodies, Client, body
from bench.large_parts import MODEL
from bench.workers import cpu_seconds, started
from gateway.prompt.pipeline import Pipeline
from loadgen.drive.stack import free_ports
from replicas.simulated.model import sim_model_dir

ALL = "memory,million,most,load"
LOADS = ("new", "shared", "conversation")
HELD = 32
NGINX = """worker_processes 1; daemon off; pid {tmp}/nginx.pid; error_log {tmp}/nginx.err;
events {{ worker_connections 4096; }}
http {{ access_log off; keepalive_requests 1000000; client_max_body_size 64m; client_body_buffer_size 8m; client_body_temp_path {tmp}/b;
 proxy_temp_path {tmp}/p; fastcgi_temp_path {tmp}/f; uwsgi_temp_path {tmp}/u; scgi_temp_path {tmp}/s;
 upstream e {{ {servers} keepalive 256; keepalive_requests 1000000; }}
 server {{ listen 127.0.0.1:{port} backlog=1024; location = /health {{ return 200 ""; }} location / {{ proxy_pass http://e; proxy_http_version 1.1;
  proxy_set_header Connection ""; proxy_buffering off; }} }} }}
"""


class Neighbour:
    def __init__(self, stack: ExitStack):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.large_parts", "neighbour"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(self.process.communicate)

    async def watch(self, port: int, seconds: float) -> dict[str, float]:
        self.process.stdin.write(f"{port} {seconds}\n")
        self.process.stdin.flush()
        took = sorted(1e3 * one for one in json.loads(await asyncio.to_thread(self.process.stdout.readline)))
        return {"floor": took[0], "p50": quantile(took, 0.5), "p99": quantile(took, 0.99), "max": took[-1]}


class Gateway:
    """Ours, in a process of its own whose loop is watched."""

    def __init__(self, stack: ExitStack, model: str, engines: list[str], tmp: str):
        self.file = Path(tmp, "watched")
        self.port, _ = started(
            stack, "-m", "bench.watched", str(self.file), "serve", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0",
            "--model", model, "--served-model-name", MODEL, "--replica-url", *engines, ports=2,
        )  # fmt: skip
        self.pid = pid_of(self.port)

    async def trimmed(self) -> None:
        """What its allocator kept of freed memory goes back to the kernel, so that it can't hide what comes."""
        os.kill(self.pid, signal.SIGUSR2)
        await asyncio.sleep(0.5)

    async def lateness(self) -> dict[str, dict[str, float]]:
        """Of its loop's timer, in ms, since this was asked before."""
        self.file.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        while not self.file.exists():
            await asyncio.sleep(0.01)
        return json.loads(self.file.read_text())


class Nginx:
    def __init__(self, stack: ExitStack, engines: list[str], tmp: str, port: int):
        servers = " ".join(f"server {url.removeprefix('http://')};" for url in engines)
        Path(tmp, "nginx.conf").write_text(NGINX.format(tmp=tmp, port=port, servers=servers))
        process = subprocess.Popen(["nginx", "-c", f"{tmp}/nginx.conf"], stderr=subprocess.DEVNULL)
        stack.callback(lambda: (process.terminate(), process.wait()))
        self.port, self.master = port, process.pid

    @property
    def pid(self) -> int:
        return int(Path(f"/proc/{self.master}/task/{self.master}/children").read_text().split()[0])


def pid_of(port: int) -> int:
    told = subprocess.run(["ss", "-ltnpH", f"sport = :{port}"], capture_output=True, text=True).stdout
    return int(re.search(r"pid=(\d+)", told)[1])


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def memory(pid: int, key: str = "Pss") -> int:
    """Bytes."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(re.search(rf"^{key}: +(\d+) kB", rollup, re.M)[1])


class Bench:
    def __init__(self, args: argparse.Namespace, stack: ExitStack):
        self.args, self.stack = args, stack
        self.tmp = stack.enter_context(tempfile.TemporaryDirectory(prefix="large-"))
        self.engines = [
            f"http://127.0.0.1:{started(stack, '-m', 'bench.large_parts', 'engine', ports=1)[0]}" for _ in range(2)
        ]
        self.neighbour = Neighbour(stack)
        self.bodies = Bodies(7)

    async def gateway(self) -> Gateway:
        gateway = Gateway(self.stack, self.args.model, self.engines, self.tmp)
        await self.answering(gateway.port)
        await self.neighbour.watch(gateway.port, 1)
        return gateway

    async def nginx(self) -> Nginx | None:
        if not shutil.which("nginx"):
            print("no nginx here: left out")
            return None
        nginx = Nginx(self.stack, self.engines, self.tmp, free_ports(1)[0])
        await self.answering(nginx.port)
        return nginx

    async def answering(self, port: int) -> None:
        for _ in range(300):
            try:
                client = Client(port)
                await client.ask(body(b"hi", b"hi"))
                return client.close()
            except (OSError, SystemExit):
                await asyncio.sleep(0.1)
        raise SystemExit("it did not come up")

    async def loaded(self, at: Gateway | Nginx, bodies: Iterator[bytes], seen: Gateway | Nginx | None = None) -> dict:
        """A window of the load on `at`, with the neighbour at `seen`. CPU is without what that and the watching
        take."""
        args, seen = self.args, seen or at
        alone = await self.alone(at) if seen is at else 0.0
        client = Client(at.port)
        await client.open_loop(bodies, args.rate, 1)
        if isinstance(seen, Gateway):
            await seen.lateness()
        cpu, begun = cpu_seconds(at.pid), perf_counter()
        took, beside = await asyncio.gather(
            client.open_loop(bodies, args.rate, args.seconds), self.neighbour.watch(seen.port, args.seconds)
        )
        wall, cpu = perf_counter() - begun, cpu_seconds(at.pid) - cpu
        client.close()
        ms = sorted(1e3 * one for one in took)
        found = {
            "carried": len(took) / wall,
            "cpu_ms": 1e3 * (cpu - alone * wall) / len(took),
            "ms": {"p50": quantile(ms, 0.5), "p99": quantile(ms, 0.99), "max": ms[-1]},
            "neighbour": beside,
        }
        return {**found, "timer": await seen.lateness()} if isinstance(seen, Gateway) else found

    async def alone(self, at: Gateway | Nginx) -> float:
        """What the neighbour and the watching cost, in CPU seconds a second."""
        cpu = cpu_seconds(at.pid)
        await self.neighbour.watch(at.port, self.args.seconds / 2)
        return (cpu_seconds(at.pid) - cpu) / (self.args.seconds / 2)

    async def round(self, ours: Gateway, nginx: Nginx | None) -> dict:
        found = {load: await self.loaded(ours, getattr(self.bodies, load)()) for load in self.args.loads.split(",")}
        if nginx is not None:
            found["nginx"] = await self.loaded(nginx, self.bodies.new())
            found["idle, nginx loaded"] = await self.loaded(nginx, self.bodies.new(), ours)
        return found

    async def most(self, at: Gateway | Nginx, load: str) -> float:
        client = Client(at.port)
        try:
            return round(await client.closed_loop(getattr(self.bodies, load)(), self.args.seconds / 2), 1)
        finally:
            client.close()

    async def million(self, ours: Gateway) -> dict:
        payload = next(self.bodies.new(10 * BODY))
        client = Client(ours.port)
        await ours.lateness()
        cpu, begun = cpu_seconds(ours.pid), perf_counter()
        await client.ask(payload)
        seconds, cpu = perf_counter() - begun, cpu_seconds(ours.pid) - cpu
        client.close()
        return {"body_bytes": len(payload), "ms": 1e3 * seconds, "cpu_ms": 1e3 * cpu, "timer": await ours.lateness()}

    async def memory(self, at: Gateway | Nginx) -> dict:
        """Bytes for each byte of the bodies held: bodies never seen before, the same ones again, and the peak of
        either.

        Before, as many others have been answered: the tokenizer's caches are there, one for each thread.
        """
        client, found = Client(at.port), {}
        await asyncio.gather(*[client.ask(one) for one in self.some()])
        payloads = self.some()
        size = sum(map(len, payloads))
        for name in ("unseen", "seen"):
            if isinstance(at, Gateway):
                await at.trimmed()
            for url in self.engines:
                await get(url, "/hold")
            before = memory(at.pid)
            Path(f"/proc/{at.pid}/clear_refs").write_text("5")  # the peak begins anew
            tasks = [asyncio.create_task(client.ask(one)) for one in payloads]
            while sum([int(await get(url, "/hold")) for url in self.engines]) < HELD:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            held, peak = (
                memory(at.pid),
                1024 * int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{at.pid}/status").read_text())[1]),
            )
            for url in self.engines:
                await get(url, "/release")
            await asyncio.gather(*tasks)
            found[name] = {"held": (held - before) / size, "peak": (peak - before) / size}
        client.close()
        return found

    def some(self) -> list[bytes]:
        return [one for _, one in zip(range(HELD), self.bodies.new(), strict=False)]


async def get(url: str, path: str) -> bytes:
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
    head = await reader.readuntil(b"\r\n\r\n")
    told = await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
    writer.close()
    return told


async def measure(args: argparse.Namespace) -> dict:
    found: dict = {"rate": args.rate, "seconds": args.seconds, "rounds": args.rounds}
    with ExitStack() as stack:
        bench = Bench(args, stack)
        one = next(bench.bodies.new())
        found["body"] = {
            "bytes": len(one),
            "tokens": Pipeline(Path(args.model), MODEL, 16).prepare("/v1/chat/completions", one).tokens,
        }
        print("body", found["body"], flush=True)
        if "memory" in args.parts:
            found["memory"] = {"held": HELD, "ours": await bench.memory(await bench.gateway())}
            if (nginx := await bench.nginx()) is not None:
                found["memory"]["nginx"] = await bench.memory(nginx)
            print("memory", json.dumps(found["memory"]), flush=True)
        ours, nginx = await bench.gateway(), await bench.nginx()
        if "million" in args.parts:
            found["million"] = [await bench.million(ours) for _ in range(3)]
            print("million", json.dumps(found["million"]), flush=True)
        if "most" in args.parts:
            found["most"] = {load: await bench.most(ours, load) for load in args.loads.split(",")}
            if nginx is not None:
                found["most"]["nginx"] = await bench.most(nginx, "new")
            print("most", json.dumps(found["most"]), flush=True)
        if "load" in args.parts:
            rounds = [await bench.round(ours, nginx) for _ in range(args.rounds)]
            found["load"] = {name: medians([one[name] for one in rounds]) for name in rounds[0]}
            show(found["load"])
    return found


def medians(rounds: list[dict]) -> dict:
    """Of each figure the median over the rounds; of a maximum the largest, and of a count of stalls the sum."""
    found = {}
    for name, value in rounds[0].items():
        column = [one[name] for one in rounds]
        if isinstance(value, dict):
            found[name] = medians(column)
        else:
            found[name] = round({"max": max, "above_5": sum, "ticks": sum}.get(name, statistics.median)(column), 3)
    return found


def show(load: dict) -> None:
    print(
        f"{'':22}{'carried/s':>10}{'CPU ms':>9}{'ms p50':>9}{'p99':>9}{'max':>9}   neighbour ms: floor, p50, p99, max"
        "   timer late, ms (own, work): p99, p99.9, max, above 5 ms"
    )
    for name, one in load.items():
        beside, timer = one["neighbour"], one.get("timer")
        line = f"{name:22}{one['carried']:10.1f}{one['cpu_ms']:9.2f}" + "".join(
            f"{one['ms'][key]:9.1f}" for key in ("p50", "p99", "max")
        )
        line += "   " + "".join(f"{beside[key]:9.2f}" for key in ("floor", "p50", "p99", "max"))
        if timer:
            line += "    " + "  ".join(
                f"{timer['all'][key]:.2f} ({timer['own'][key]:.2f}, {timer['work'][key]:.2f})"
                for key in ("p99", "p999", "max", "above_5")
            )
        print(line)
    if "nginx" in load:
        for name in [one for one in LOADS if one in load]:
            ours, nginx = load[name], load["nginx"]
            p99, most = (ours["neighbour"][key] / nginx["neighbour"][key] for key in ("p99", "max"))
            cpu = ours["cpu_ms"] / nginx["cpu_ms"]
            print(f"{name}: CPU {cpu:.2f} x nginx; neighbour's p99 {p99:.2f} x, max {most:.2f} x that beside nginx")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--model", default=str(sim_model_dir()))
    parser.add_argument("--parts", default=ALL, help="some of them: their figures alone are put into the file")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--quick", action="store_true", help="one round of 3 s")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.rounds = 3, 1
    found = uvloop.run(measure(args))
    if args.json:
        file = Path(args.json)
        if args.parts != ALL and file.exists():
            found = json.loads(file.read_text()) | found
        file.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Two workers beside one: CPU per request, requests a second, how evenly connections are spread, the hit rate.

    python -m bench.workers [--loads plain,paced,short,conversations,redis] [--rounds 5] [--seconds 6] [--clients 32]
    [--json FILE]

The same engines stand behind several gateways, which are asked in turns: one with one worker (which is a gateway of one
process: the default), one with two, and (for `plain` and `paced`) two of one worker that know nothing of each other and
have half of the clients each. What those cost more than one is what the machine takes for running two processes; the
rest is what sharing costs. CPU is that of all of a gateway's processes, all threads, by the kernel's own count; `cores`
says how many cores each party kept busy: gateway, engines and these clients share the machine. Each client has a
connection of its own and, but for `paced`, never pauses. Runs are added to what is in FILE.

plain           8 kB chats that are answered at once, as many as go through: two workers carry more
paced           the same at a fixed rate for all, PACE of what one process carries in this run
redis           `plain` with and without the ledger and the map in Redis
short           `plain` with a new connection for each request
conversations   four simulated engines at their own pace, six turns that begin with one of eight long prompts: the hit
                rate, and what a gateway costs that is a third busy
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import aiohttp
import orjson

from tests.redis_server import RedisServer
from tests.redis_server import running as redis_running

ENGINES, FAMILIES, TURNS = 4, 8, 6
PACE = 0.6
WORDS = (
    "river stone carry window because seven letter cloud market early answer paper north quiet between garden".split()
)
SERVES = re.compile(r"http://127\.0\.0\.1:(\d+)")


def started(stack: ExitStack, *command: str, ports: int, pids: list[int] | None = None) -> list[int]:
    """A process of ours, ended with the stack and added to `pids`; the ports it says it has."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def stop() -> None:
        process.terminate()
        process.communicate()

    stack.callback(stop)
    if pids is not None:
        pids.append(process.pid)
    for line in process.stdout:
        if len(found := SERVES.findall(line)) >= ports:
            return [*map(int, found)]
    raise SystemExit(f"{' '.join(command)} ended")


def cpu_seconds(pid: int) -> float:
    threads = (Path(f"/proc/{pid}/task/{thread}/schedstat") for thread in os.listdir(f"/proc/{pid}/task"))
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def below(pid: int) -> list[int]:
    """All processes that this one started, and those that they started."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(other for child in children for other in below(child))]


def _cpu(parties: dict[str, list[int]]) -> dict[str, list[float]]:
    return {name: [cpu_seconds(pid) for pid in pids] for name, pids in parties.items()}


class Gateway:
    def __init__(self, stack: ExitStack, workers: int, engines: list[str], redis: str | None = None):
        self.name = f"{workers} redis" if redis else str(workers)
        self.redis = redis
        port, self.admin = started(
            stack, "-m", "gateway", "serve", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--model", "sim", "--cached-tokens-header",
            "--workers", str(workers), *(["--redis-url", redis] if redis else []), "--replica-url", *engines, ports=2,
        )  # fmt: skip
        self.pids: list[int] = []
        self.ports = [port]

    async def ready(self, events: bool) -> None:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self.admin}") as session:
            while True:
                async with session.get("/status") as answer:
                    status = await answer.json()
                joined = not self.redis or status["map"]["redis"]["ledger_joined"]
                if joined and all(
                    one["state"] == "ready" and (one["events"] == "live" or not events) for one in status["replicas"]
                ):
                    break
                await asyncio.sleep(0.1)
        workers = [one["pid"] for one in status.get("workers", ())]
        control = self._control()
        # a Redis of their own, last
        self.pids = [control, *workers, *(pid for pid in below(control) if pid not in workers)]

    def _control(self) -> int:
        """The process that has the admin port."""
        told = subprocess.run(["ss", "-ltnpH", f"sport = :{self.admin}"], capture_output=True, text=True).stdout
        return int(re.search(r"pid=(\d+)", told)[1])

    async def spread(self) -> list[int]:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self.admin}") as session, session.get("/status") as answer:
            return [one["connections"] for one in (await answer.json()).get("workers", ())]


STUB = """
import asyncio, uvloop
ANSWERS = {
    b"/v1/models": b'{"object":"list","data":[{"id":"sim","object":"model","max_model_len":131072}]}',
    b"/version": b'{"version":"0.0.0"}', b"/health": b"",
}
CHAT = (b'{"id":"x","object":"chat.completion","created":1,"model":"sim","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":"' + b"word " * 60 + b'"},"finish_reason":"stop"}],'
        b'"usage":{"total_tokens":60,"completion_tokens":60}}')
def reply(status, body):
    return b"HTTP/1.1 %b\\r\\ncontent-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n%b" % (status, len(body), body)
CHAT, NONE = reply(b"200 OK", CHAT), reply(b"404 Not Found", b"{}")
ANSWERS = {path: reply(b"200 OK", body) for path, body in ANSWERS.items()}
class Stub(asyncio.Protocol):
    data = b""
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.data += data
        while (end := self.data.find(b"\\r\\n\\r\\n")) >= 0:
            head = self.data[:end].lower()
            at = head.find(b"content-length: ")
            size = int(head[at + 16 :].split(b"\\r", 1)[0]) if at >= 0 else 0
            if len(self.data) < end + 4 + size:
                return
            path, self.data = head.split(b" ", 2)[1], self.data[end + 4 + size :]
            self.transport.write(CHAT if path.startswith(b"/v1/chat") else ANSWERS.get(path, NONE))
async def main():
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
    print("http://127.0.0.1:%d" % server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
uvloop.run(main())
"""


class Apart:
    """Two gateways as one."""

    name = "apart"

    def __init__(self, *gateways: Gateway):
        self.gateways = gateways
        self.ports = [port for one in gateways for port in one.ports]

    @property
    def pids(self) -> list[int]:
        return [pid for one in self.gateways for pid in one.pids]

    async def ready(self, events: bool) -> None:
        for one in self.gateways:
            await one.ready(events)

    async def spread(self) -> list[int]:
        return []


class Load:
    """One window: clients that never pause, or keep to `rate` requests a second of all together, until it is over."""

    def __init__(
        self, gateway: Gateway | Apart, seed: int, load: str, others: dict[str, list[int]], rate: float | None = None
    ):
        self.gateway, self.seed, self.load, self.others, self.rate = gateway, seed, load, others, rate
        self.counts: Counter[str] = Counter()
        self.pause = 0.0  # seconds from one request of a client to its next
        self.ending = False
        self.open = asyncio.Event()  # clients of `_shout` ask nothing while it is not set
        self.open.set()

    async def run(self, clients: int, seconds: float) -> dict:
        talk = self._talk if self.load == "conversations" else self._shout
        self.pause = clients / self.rate if self.rate else 0.0
        tasks = [asyncio.create_task(talk(number)) for number in range(clients)]
        await asyncio.sleep(1)  # connections are there, what is new has been met
        parties = {"gateway": self.gateway.pids, "clients": [os.getpid()], **self.others}
        counts, before, began = self.counts.copy(), _cpu(parties), perf_counter()
        await asyncio.sleep(seconds)
        seconds, counts, after = perf_counter() - began, self.counts - counts, _cpu(parties)
        used = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in parties}
        cpu = used["gateway"]
        spread = await self.gateway.spread()
        self.ending = True
        await asyncio.gather(*tasks)
        return {
            "microseconds": 1e6 * sum(cpu) / counts["requests"],
            "by_process": [1e6 * part / counts["requests"] for part in cpu],
            "requests_per_second": counts["requests"] / seconds,
            "cores": {name: round(sum(parts) / seconds, 2) for name, parts in used.items()},
            "connections": spread,
            "hit_rate": counts["cached"] / max(1, counts["prompt"]),
            "mispredicted": counts["wrong"] / max(1, counts["prompt"]),
        }

    async def _shout(self, number: int) -> None:
        """Requests as bytes, almost made beforehand: the client must cost less than the gateway."""
        rng = random.Random(self.seed * 1000 + number)
        system = " ".join(random.Random(1).choices(WORDS, k=650))
        whole = orjson.dumps(
            {
                "model": "sim",
                "max_tokens": 60,
                "messages": [
                    {"role": "system", "content": system},
                    {"role": "user", "content": "@" + " ".join(rng.choices(WORDS, k=650))},
                ],
            }
        )
        start, end = whole.split(b"@")
        short, reader, writer = self.load == "short", None, None
        due = perf_counter() + self.pause * rng.random()
        for turn in itertools.count():
            if self.pause:
                await asyncio.sleep(due - perf_counter())
                due += self.pause
            await self.open.wait()
            if self.ending:
                break
            self.counts["asked"] += 1
            if writer is None:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", self.gateway.ports[number % len(self.gateway.ports)]
                )
            body = b"%b%d %b" % (start, turn, end)  # nobody has seen what comes after the system prompt
            close = b"connection: close\r\n" if short else b""
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
                % (close, len(body), body)
            )
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"answered {head!r}")
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
            self.counts["requests"] += 1
            if short:
                writer.close()
                writer = None
        if writer is not None:
            writer.close()

    async def _talk(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self.gateway.ports[0]}") as session:
            while not self.ending:
                family = random.Random(self.seed * 100 + rng.randrange(FAMILIES))
                messages = [{"role": "system", "content": " ".join(family.choices(WORDS, k=600))}]
                for _ in range(TURNS):
                    messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=120))})
                    await self._ask(session, messages)
                    messages.append({"role": "assistant", "content": " ".join(rng.choices(WORDS, k=60))})

    async def _ask(self, session: aiohttp.ClientSession, messages: list[dict]) -> None:
        body = {
            "model": "sim",
            "messages": messages,
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with session.post(
            "/v1/chat/completions", data=orjson.dumps(body), headers={"content-type": "application/json"}
        ) as answer:
            text, predicted = await answer.read(), int(answer.headers.get("x-hitherto-cached-tokens", 0))
        if answer.status != 200:
            raise SystemExit(f"status {answer.status}: {text[:300]!r}")
        self.counts["requests"] += 1
        self.counts["prompt"] += int(re.search(rb'"prompt_tokens": ?(\d+)', text)[1])
        cached = int(re.search(rb'"cached_tokens": ?(\d+)', text)[1])
        self.counts["cached"] += cached
        self.counts["wrong"] += abs(predicted - cached)


def summary(rounds: list[dict[str, dict]]) -> dict:
    names = list(rounds[0])

    def each(name: str, digits: int) -> dict[str, float]:
        return {one: round(statistics.median(found[one][name] for found in rounds), digits) for one in names}

    ratios = {
        name: [round(one[name]["microseconds"] / one["1"]["microseconds"], 3) for one in rounds]
        for name in names
        if name != "1"
    }
    return {
        "cpu_ratio": {name: statistics.median(column) for name, column in ratios.items()},
        "cpu_ratios": ratios,
        "microseconds": each("microseconds", 1),
        "microseconds_control_and_workers": [
            round(statistics.median(column), 1) for column in zip(*(one["2"]["by_process"] for one in rounds))
        ],
        "requests_per_second": each("requests_per_second", 0),
        "requests_ratio": {
            name: round(
                statistics.median(one[name]["requests_per_second"] / one["1"]["requests_per_second"] for one in rounds),
                3,
            )
            for name in ratios
        },
        "cores": {
            name: {
                party: statistics.median(one[name]["cores"][party] for one in rounds)
                for party in rounds[0][name]["cores"]
            }
            for name in names
        },
        "connections_of_two": [one["2"]["connections"] for one in rounds],
        "hit_rate": each("hit_rate", 4),
        "mispredicted": each("mispredicted", 4),
    }


async def measure(args: argparse.Namespace, load: str) -> dict:
    with ExitStack() as stack:
        if load == "conversations":
            commands = [("-m", "replicas.simulated", "--port", "0", "--num-blocks", "3000")] * ENGINES
        else:
            commands = [("-c", STUB)] * 2
        others: dict[str, list[int]] = {"engines": []}
        engines = [
            f"http://127.0.0.1:{started(stack, *command, ports=1, pids=others['engines'])[0]}" for command in commands
        ]
        gateways: list[Gateway | Apart] = [Gateway(stack, workers, engines) for workers in (1, 2)]
        if load in ("plain", "paced"):
            gateways.append(Apart(Gateway(stack, 1, engines), Gateway(stack, 1, engines)))
        if load == "redis":
            server = stack.enter_context(
                redis_running(RedisServer(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
            )
            others["redis"] = [server.pid]
            # idle ones are counted with, as in a deployment
            gateways += [Gateway(stack, workers, engines, server.url) for workers in (1, 2)]
        for gateway in gateways:
            await gateway.ready(events=load == "conversations")
        rate, rounds = None, []
        for number in range(-1, args.rounds):  # the first one warms everything up
            order = gateways if number % 2 else gateways[::-1]
            seconds = args.seconds if number >= 0 else 2
            found = {
                one.name: await Load(one, 5 * number + gateways.index(one) + 10, load, others, rate).run(
                    args.clients, seconds
                )
                for one in order
            }
            if number >= 0:
                rounds.append(dict(sorted(found.items())))
            elif load == "paced":
                rate = PACE * found["1"]["requests_per_second"]
    return summary(rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="plain,paced,short,conversations,redis")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    found: dict = json.loads(Path(args.json).read_text()) if args.json and Path(args.json).exists() else {}
    for load in args.loads.split(","):
        found[load] = {
            "rounds": args.rounds,
            "seconds": args.seconds,
            "clients": args.clients,
            **asyncio.run(measure(args, load)),
        }
        print(load, json.dumps(found[load], indent=2), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

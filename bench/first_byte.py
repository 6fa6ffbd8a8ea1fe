"""How long the first byte takes at 200 requests a second, which none of them finds hard: ours, the Rust routers, plain
proxies.

    python -m bench.first_byte [--loads plain,chat] [--fronts nginx,hitherto,...] [--rate 200] [--seconds 8] [--rounds
    3] [--json FILE]

One gateway on one core, engines (`bench.native`, answering at once) and clients on the other. Open loop: requests are
due by a Poisson process whatever became of those before, and are timed from when they were due; a client sends on a
connection that is free, or on a new one. Each front runs once a round, in turn; quantiles are the medians of the
rounds. `direct`: no gateway between.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
from pathlib import Path

import numpy as np
import orjson
import uvloop

from bench.native import GENERATOR_CORE, Generator, generator
from bench.native.fronts import available, running
from loadgen.report.summary import machine

FRONTS = "nginx,hitherto,sglang-router,vllm-router,smg"
RUST = ("sglang-router", "vllm-router", "smg")
WORDS = ("the of and to in is you that it he was for on are as with his they at be this have from or had by hot word but what some we "
         "can out other were all there when up use your how said an each she which do their time if will way about many").split()  # fmt: skip


def prose(rng: random.Random, size: int) -> str:
    return " ".join(rng.choices(WORDS, k=size // 4))[:size]


def body(messages: list[dict]) -> bytes:
    return orjson.dumps({"model": "m", "stream": False, "max_tokens": 64, "messages": messages})


def bodies(load: str, count: int, seed: int) -> list[bytes]:
    """All begin with one system prompt; conversations take turns, so that a turn comes long after the one before."""
    rng = random.Random(seed)
    system = {"role": "system", "content": prose(random.Random(7), 4000)}
    if load != "chat":
        return [body([system, {"role": "user", "content": prose(rng, 4000)}]) for _ in range(count)]
    talks: list[list[dict]] = [[system] for _ in range(max(1, count // 14))]
    found = []
    for _ in range(14):
        for talk in talks:
            talk.append({"role": "user", "content": prose(rng, 1000)})
            found.append(body(talk))
            talk.append({"role": "assistant", "content": prose(rng, 1000)})
    return found


class Asker(asyncio.Protocol):
    """One connection; `told` gets the time of the first byte, and `free` the connection once the answer is whole."""

    def __init__(self, free: list[Asker]):
        self._free, self._loop = free, asyncio.get_running_loop()
        self._told: asyncio.Future[float] | None = None

    def connection_made(self, transport) -> None:
        self._transport = transport

    def ask(self, request: bytes) -> asyncio.Future[float]:
        self._told, self._first, self._have = self._loop.create_future(), 0.0, b""
        self._transport.write(request)
        return self._told

    def data_received(self, data: bytes) -> None:
        self._first = self._first or self._loop.time()
        self._have += data
        head, blank, body = self._have.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]) if blank else 1
        if blank and len(body) >= length:
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"answered {head!r}")
            self._free.append(self)
            self._told.set_result(self._first)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._free:
            self._free.remove(self)
        if self._told is not None and not self._told.done():
            self._told.set_exception(ConnectionError("cut while it answered"))


async def play(port: int, asked: list[bytes], rate: float, seed: int) -> list[float]:
    """Milliseconds from when each was due to its first byte."""
    loop, rng, free = asyncio.get_running_loop(), random.Random(seed), []

    async def one(due: float, content: bytes) -> float:
        asker = free.pop() if free else (await loop.create_connection(lambda: Asker(free), "127.0.0.1", port))[1]
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        return 1e3 * (await asker.ask(head % (port, len(content)) + content) - due)

    tasks, due = [], loop.time()
    for content in asked:
        due += rng.expovariate(rate)
        await asyncio.sleep(due - loop.time())
        tasks.append(asyncio.ensure_future(one(due, content)))
    return await asyncio.gather(*tasks)


def measure(
    made: Generator, names: list[str], loads: list[str], rate: float, seconds: float, rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    times: dict[tuple[str, str], list[np.ndarray]] = {}
    for number in range(rounds):
        for name in ["direct", *names]:
            for load, found in one_front(made, name, loads, rate, seconds, number).items():
                times.setdefault((load, name), []).append(np.percentile(found, (50, 90, 99, 99.9)))
    return {load: {name: dict(zip(("p50", "p90", "p99", "p99.9"), (round(float(statistics.median(q)), 3) for q in zip(*times[load, name]))))
                   for name in ["direct", *names]} for load in loads}  # fmt: skip


def one_front(
    made: Generator, name: str, loads: list[str], rate: float, seconds: float, seed: int
) -> dict[str, list[float]]:
    def played(port: int) -> dict[str, list[float]]:
        found = {}
        for load in loads:
            uvloop.run(play(port, bodies(load, int(rate), 100 + seed), rate, seed))  # a second that is not counted
            found[load] = uvloop.run(play(port, bodies(load, int(rate * seconds), seed), rate, seed))
        return found

    if name == "direct":
        return played(made.ports[0])
    with running(name, made.ports) as front:
        return played(front.port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", default="plain,chat")
    parser.add_argument("--fronts", default=FRONTS)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load, at each front, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    names, loads = available(options.fronts.split(",")), options.loads.split(",")
    os.sched_setaffinity(0, {GENERATOR_CORE})
    with generator() as made:
        found = measure(made, names, loads, options.rate, options.seconds, options.rounds)
    print(
        f"first byte at {options.rate:g} requests a second, ms from when it was due; x: p99 by the best Rust router's"
    )
    for load, by_front in found.items():
        best = min((by_front[one]["p99"] for one in RUST if one in by_front), default=None)
        print(f"\n{load:16}{'p50':>9}{'p90':>9}{'p99':>9}{'p99.9':>9}{'x':>7}")
        for name, q in by_front.items():
            print(
                f"{name:16}"
                + "".join(f"{value:9.2f}" for value in q.values())
                + (f"{q['p99'] / best:7.2f}" if best else "")
            )
    if options.json:
        said = {
            "machine": machine(),
            "rate": options.rate,
            "seconds": options.seconds,
            "rounds": options.rounds,
            "ms": found,
        }
        Path(options.json).write_bytes(orjson.dumps(said, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()

"""The limit: what sockets alone cost a gateway, what ours adds to that, and what a decision asked for by another proxy costs.

    python -m bench.limit [--loads plain,chat,stream] [--fronts "null proxy,nginx,..."] [--rounds 3] [--json FILE]

CPU per request of everything between clients and engines, one gateway on one core, engine and clients (`bench.native`) on the
other, 32 connections, median of the rounds; `user` and `system` are the kernel's split.

plain    8 kB chats, answered at once       chat    conversations that grow turn by turn to 32 kB
stream   8 kB chats, answered with 64 chunks 2 ms apart

null proxy    C, epoll, bytes passed on and nothing else: what the kernel asks for two sockets a request
nginx, haproxy  as plain proxies, unbuffered
passthrough   the same in Python: uvloop and httptools (`bench.passthrough`)
by load       hitherto where it reads no prompt: a path it does not know, which goes by load alone
hitherto      all of it: exact routing, prediction, metrics
decide        the decision as a service: `POST /decide` alone, and with the `done` that ends it, over 8 kept connections; the
              caller's own proxying is not in it
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from pathlib import Path

import orjson

from bench.native import Generator, generator
from bench.native.fronts import Front, Used, available, running
from loadgen.report import machine

FRONTS = "null proxy,nginx,haproxy,passthrough,hitherto"
CONNECTIONS, CHUNKS, SPACING_US = 32, 64, 2_000
COUNTS = {"plain": 4_000, "chat": 2_800, "stream": 600}
KNOWN, UNKNOWN = "/v1/chat/completions", "/v1/other/completions"
DECIDERS, DECISIONS = 8, 2_000
WORDS = ("the of and to in is you that it he was for on are as with his they at be this have from or had by hot word but what some we "
         "can out other were all there when up use your how said an each she which do their time if will way about many").split()  # fmt: skip


def prose(rng: random.Random, size: int) -> str:
    return " ".join(rng.choices(WORDS, k=size // 4))[:size]


def body(messages: list[dict], stream: bool) -> bytes:
    return orjson.dumps({"model": "m", "stream": stream, "max_tokens": 64, "messages": messages})


def bodies(load: str, count: int, seed: int) -> list[bytes]:
    """All begin with one system prompt; conversations take turns, so that a turn comes long after the one before."""
    rng = random.Random(seed)
    system = {"role": "system", "content": prose(random.Random(7), 4000)}
    if load != "chat":
        return [body([system, {"role": "user", "content": prose(rng, 4000)}], load == "stream") for _ in range(count)]
    talks: list[list[dict]] = [[system] for _ in range(max(1, count // 14))]
    found = []
    for _ in range(14):
        for talk in talks:
            talk.append({"role": "user", "content": prose(rng, 1000)})
            found.append(body(talk, False))
            talk.append({"role": "assistant", "content": prose(rng, 1000)})
    return found


def per_request(used: Used, count: int) -> dict[str, float]:
    ticks = max(1e-9, used.user + used.system)
    total = 1e6 * used.total / count
    return {"microseconds": round(total, 1), "user": round(total * used.user / ticks, 1), "system": round(total * used.system / ticks, 1)}


def one_round(made: Generator, front: Front, load: str, path: str, asked: list[bytes]) -> dict[str, float]:
    with tempfile.NamedTemporaryFile() as file:
        for one in asked:
            file.write(b"%d\n%b" % (len(one), one))
        file.flush()
        made.say("requests", front.port, CONNECTIONS, path, file.name, CHUNKS, SPACING_US)
        made.event()
        before = front.used()
        done = made.event()
    if done["bad"] or done["answered"] != len(asked):
        raise SystemExit(f"{front.name}, {load}: {done}")
    return per_request(front.used() - before, done["answered"]) | {"requests_per_second": round(done["answered"] / done["seconds"])}


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str, content: bytes) -> dict:
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (target.encode(), len(content), content))
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"/decide answered {head!r}")
    return orjson.loads(await reader.readexactly(length))


async def _decide(port: int, asked: list[bytes], end: bool) -> int:
    """Asks for all; returns how many calls that were."""
    calls = 0

    async def one() -> None:
        nonlocal calls
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while asked:
            decided = await _ask(reader, writer, f"/decide?path={KNOWN}" + ("" if end else "&lease_s=1"), asked.pop())
            calls += 1
            if end:
                await _ask(reader, writer, f"/decide/{decided['id']}/done", b"")
                calls += 1
        writer.close()

    await asyncio.gather(*(one() for _ in range(DECIDERS)))
    return calls


def decided(front: Front, load: str, seed: int) -> dict[str, dict[str, float]]:
    found = {}
    for name, end in (("decide", False), ("decide and done", True)):
        asked = bodies(load, DECISIONS, seed * 2 + end)
        count = len(asked)
        before = front.used()
        asyncio.run(_decide(front.aux, asked, end))
        found[name] = per_request(front.used() - before, count)
    return found


def rounds(made: Generator, name: str, loads: list[str], count: int) -> dict[str, dict[str, list]]:
    """By load and front, a figure a round."""
    found: dict[str, dict[str, list]] = {load: {} for load in loads}
    with running(name, made.ports) as front:
        for number in range(count + 1):  # the first warms up and is not counted
            for load in loads:
                asked = bodies(load, COUNTS[load] // (1 if number else 4), number)
                got = {name: one_round(made, front, load, KNOWN, asked)}
                if name == "hitherto":
                    got["by load"] = one_round(made, front, load, UNKNOWN, asked)
                    if load != "stream":
                        got |= decided(front, load, number)
                for what, figures in got.items():
                    if number:
                        found[load].setdefault(what, []).append(figures)
    return found


def median(several: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(one[key] for one in several), 1) for key in several[0]}


def show(results: dict) -> None:
    for load, fronts in results["loads"].items():
        floor = fronts.get("null proxy", {}).get("microseconds")
        print(f"\n{load:16} us a request    user  system   x null proxy   requests/s")
        for name, one in fronts.items():
            ratio = f"{one['microseconds'] / floor:6.2f}" if floor else "     -"
            print(f"  {name:18} {one['microseconds']:8.1f} {one['user']:8.1f} {one['system']:7.1f}   {ratio}       {one.get('requests_per_second', '-')}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="plain,chat,stream")
    parser.add_argument("--fronts", default=FRONTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    results = orjson.loads(args.json.read_bytes()) if args.json and args.json.exists() else {"loads": {}}
    results["machine"] = f"{machine()}; the gateway on one core, engine and clients on the other"
    with generator() as made:
        for name in available(args.fronts.split(",")):
            for load, fronts in rounds(made, name, args.loads.split(","), args.rounds).items():
                results["loads"].setdefault(load, {}).update({what: median(several) for what, several in fronts.items()})
    show(results)
    if args.json:
        args.json.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

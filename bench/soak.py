"""An hour of mixed load over engines and a Redis that fail: what was promised has to hold, and nothing may grow.

    python -m bench.soak [--minutes N] [--quick] [--seed N] [--continue-streams exact|never] [--json FILE]

Two gateways that go on with streams and one Redis before three simulated engines; clients of all four APIs, with
conversations that grow, streams and whole answers, of which some leave in the middle. One fault after the other:
engines killed, stopped for a moment and until they are given up, slowed, cut off, full, KV events lost, Redis killed
and empty. At the end all is well again and quiet, and the table is printed; the exit status is 1 if a promise was
broken. `--continue-streams never` shows that the soak sees it. However short it is, each fault comes once (`--quick`:
three minutes); in five, as CI has it, three or four times, and memory is compared over three minutes.

  lost        requests without a byte of an answer that were told of a failure (5xx, or no answer at all)
  broken      streams that had begun and ended before their end
  wrong       greedy answers that differ from what the engine says when nothing happens
  memory      MB by which a gateway's resident memory grew from the first third to the last, without what its map and
              its memory of prompts seen before take, each of which has a budget of its own
  files       open files of a gateway at the end, beyond those it had before
  ledger      requests and reservations that are counted when nothing runs, in both gateways and in Redis
  map         blocks that a gateway's map has of an engine, and the engine has not, or the other way round
  predicted   prompts of which another number of cached tokens was predicted than the engine found
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic

import aiohttp
import httpx

from loadgen.drive.stack import die_with_parent, free_ports
from replicas.simulated.model import sim_model_dir
from tests.gateway.running import Running, counted, running
from tests.gateway.test_gateways import joined, together
from tests.redis_server import RedisServer
from tests.redis_server import running as redis_running

ENGINES, GATEWAYS, CLIENTS = 3, 2, 12
PROFILE = "step: {prefill: 4, prefill_token: 0.004, decode: 12}\nnum_blocks: 3000\n"
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ENDS = ("data: [DONE]", '"type":"response.completed"', '"type":"response.incomplete"', '"type":"message_stop"')
LEAVES, WHOLE = 0.06, 0.3  # shares of requests whose client leaves, and that do not stream
PAUSE = 3.0  # seconds without a fault between two
GROWTH_MB, MORE_FILES = 12.0, 24
TEXTS = ("the tide tables", "a map without names", "seven kinds of rope", "the price of copper", "an empty notebook")


class Engine:
    """A simulated engine that is killed and started again at the same address."""

    def __init__(self, folder: Path, ports: list[int]):
        self.port, self._events, self._replay = ports
        self.url, self._folder = f"http://127.0.0.1:{self.port}", folder
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        with (self._folder / f"engine-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "replicas.simulated", "--port", str(self.port), "--events-port", str(self._events),
                 "--replay-port", str(self._replay), "--profile", str(self._folder / "profile.yaml")],
                stdout=log, stderr=log, preexec_fn=die_with_parent)  # fmt: skip

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait(20)


class Soak:
    def __init__(self, seed: int):
        self.dice = random.Random(seed)
        self.gateways: list[Running] = []
        self.engines: list[Engine] = []
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []
        self.stopping = False
        self.memory: list[list[float]] = [[] for _ in range(GATEWAYS)]  # MB, by gateway
        self.said: dict[str, str] = {}  # greedy answers by request
        self.redis: RedisServer | None = None

    # --- clients

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        dice = random.Random(self.dice.random())
        talk: list[str] = []
        while not self.stopping:
            if len(talk) > 8 or dice.random() < 0.2:
                talk = [f"{number} {dice.randrange(40)} " + dice.choice(TEXTS) * dice.randrange(1, 60)]
            else:
                talk.append(f"and {dice.choice(TEXTS)}?")
            await self.ask(session, dice, [*talk])
            await asyncio.sleep(dice.random() * 0.2)

    async def ask(self, session: aiohttp.ClientSession, dice: random.Random, talk: list[str]) -> None:
        path, streams, leaves = dice.choice(PATHS), dice.random() >= WHOLE, dice.random() < LEAVES
        body = request(path, talk, dice.choice((8, 40, 90)), streams)
        gateway = dice.choice(self.gateways)
        text = ""
        try:
            async with session.post(gateway.url + path, json=body) as response:
                if response.status >= 500:
                    self.lose(f"{path}: {response.status} {(await response.text())[:200]}")
                    return
                async for piece in response.content.iter_any():
                    text += piece.decode(errors="replace")
                    if leaves:
                        self.counts["left"] += 1
                        response.close()
                        return
        except (aiohttp.ClientError, TimeoutError) as error:
            if not text:
                self.lose(f"{path}: {type(error).__name__}: {error}")
                return
        if streams and not any(end in text[-20_000:] for end in ENDS):
            self.counts["broken"] += 1
            self.notes.append(f"broken: {path}: ...{text[-300:]!r}")
            return
        self.counts["answered"] += 1
        self.compare(path, body, said(text, streams))

    def lose(self, what: str) -> None:
        self.counts["lost"] += 1
        self.notes.append(f"lost: {what}")

    def compare(self, path: str, body: dict, text: str) -> None:
        """The same prompt has one answer, however it was had."""
        key = path + json.dumps({name: value for name, value in body.items() if name != "stream"}, sort_keys=True)
        if self.said.setdefault(key, text) != text:
            self.counts["wrong"] += 1
            self.notes.append(f"wrong: {path}: {self.said[key]!r} and {text!r}")

    # --- faults

    async def order(self, engine: Engine, **what: object) -> None:
        async with aiohttp.ClientSession() as session, session.post(f"{engine.url}/faults", json=what) as response:
            response.raise_for_status()

    async def killed(self, engine: Engine) -> None:
        engine.send(signal.SIGKILL)
        await asyncio.sleep(1.5)
        engine.start()

    async def stopped(self, engine: Engine, seconds: float) -> None:
        engine.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        engine.send(signal.SIGCONT)

    async def slowed(self, engine: Engine) -> None:
        await self.order(engine, slow=6)
        await asyncio.sleep(5)
        await self.order(engine, slow=1)

    async def emptied(self, engine: Engine) -> None:
        assert self.redis is not None
        self.redis.kill()
        await asyncio.sleep(2)
        await asyncio.to_thread(self.redis.restart, empty=True)

    async def fault(self, name: str) -> None:
        engine = self.dice.choice(self.engines)
        faults = {
            "engine killed": lambda: self.killed(engine),
            "engine stopped 3 s": lambda: self.stopped(engine, 3),
            "engine stopped 30 s": lambda: self.stopped(engine, 30),
            "engine slowed": lambda: self.slowed(engine),
            "streams cut off": lambda: self.order(engine, die_mid_stream=4),
            "engine full": lambda: self.order(engine, error_503=6),
            "errors in streams": lambda: self.order(engine, error_mid_stream=4),
            "events lost": lambda: self.order(engine, drop_events=15),
            "events out of order": lambda: self.order(engine, reorder_events=15),
            "Redis restarted empty": lambda: self.emptied(engine),
        }
        self.counts[f"fault: {name}"] += 1
        await faults[name]()
        await self.all_ready()
        await asyncio.sleep(PAUSE)

    NAMES = (
        "engine killed", "streams cut off", "events lost", "engine stopped 3 s", "Redis restarted empty", "engine full",
        "engine slowed", "errors in streams", "engine stopped 30 s", "events out of order",
    )  # fmt: skip

    async def all_ready(self) -> None:
        for gateway in self.gateways:
            await gateway.ready(ENGINES)

    # --- what is measured

    async def sample(self) -> None:
        while not self.stopping:
            for number, gateway in enumerate(self.gateways):
                try:
                    page = (await gateway.admin.get("/metrics")).text
                except httpx.HTTPError:  # it answers late, which others notice
                    continue
                budgeted = counted(page, "hitherto_map_bytes") + counted(page, "hitherto_prompt_memo_bytes")
                pages = int(Path(f"/proc/{gateway.process.pid}/statm").read_text().split()[1])
                self.memory[number].append((pages * os.sysconf("SC_PAGE_SIZE") - budgeted) / 2**20)
            await asyncio.sleep(1)

    def files(self) -> list[int]:
        return [len(os.listdir(f"/proc/{gateway.process.pid}/fd")) for gateway in self.gateways]

    def grown(self) -> float:
        thirds = [(one[: len(one) // 3], one[-(len(one) // 3) :]) for one in self.memory if len(one) > 5]
        return max((statistics.median(last) - statistics.median(first) for first, last in thirds), default=0.0)

    def by_minute(self) -> list[list[float]]:
        """The median of each minute, MB, by gateway."""
        return [
            [round(statistics.median(one[at : at + 60]), 1) for at in range(0, len(one), 60)] for one in self.memory
        ]

    async def load_left(self) -> float:
        """What is counted as running, though nothing runs; once that is zero or a while has passed."""
        assert self.redis is not None
        end, left = monotonic() + 20, 1.0
        while left and monotonic() < end:
            await asyncio.sleep(0.5)
            pages = [(await gateway.admin.get("/metrics")).text for gateway in self.gateways]
            left = sum(
                counted(page, name)
                for page in pages
                for name in ("hitherto_reservations", "hitherto_inflight_requests")
            )
            with self.redis.client() as client:
                left += sum(abs(one) for load in together(client).values() for one in load)
        return left

    async def map_differs(self) -> int:
        """Blocks, once both have had time to agree. The last that differ are noted."""
        end, off = monotonic() + 30, ["not compared yet"]
        while off and monotonic() < end:
            await asyncio.sleep(0.5)
            off = []
            async with aiohttp.ClientSession() as session:
                for engine in self.engines:
                    async with session.get(f"{engine.url}/held") as response:
                        held = await response.json()
                    for number, gateway in enumerate(self.gateways):
                        off += await self.differing(number, gateway, engine.url.removeprefix("http://"), held)
        self.notes += [f"map: {one}" for one in off[:20]]
        return len(off)

    async def differing(self, number: int, gateway: Running, replica: str, held: dict) -> list[str]:
        """What stands between a gateway's map of a replica and what that has, block by block."""
        answer = await gateway.admin.post(f"/replicas/{replica}/blocks", json=held)
        answer.raise_for_status()
        told, where = answer.json(), f"in gateway {number}'s map of {replica}"
        return [f"key {one} is not {where}" for one in told["missing"]] + [
            f"block {one} is {where} alone" for one in told["besides"]
        ]

    async def mispredicted(self) -> int:
        """Of prompts that were asked before, and go to whichever replica is best."""
        wrong = 0
        for key in self.dice.sample(sorted(self.said), min(60, len(self.said))):
            if not key.startswith(PATHS[0]):
                continue
            body = {**json.loads(key[len(PATHS[0]) :]), "stream": False}
            for gateway in self.gateways:
                answer = await gateway.client.post(PATHS[0], json=body)
                found = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                wrong += found != int(answer.headers["x-hitherto-cached-tokens"])
        return wrong


def request(path: str, talk: list[str], limit: int, streams: bool) -> dict:
    messages = [{"role": ("user", "assistant")[at % 2], "content": one} for at, one in enumerate(talk)]
    body = {"model": "sim", "temperature": 0, "stream": streams}
    if path == "/v1/completions":
        return {**body, "prompt": " ".join(talk), "max_tokens": limit}
    if path == "/v1/responses":
        return {**body, "input": messages, "max_output_tokens": limit}
    return {**body, "messages": messages, "max_tokens": limit}


def said(answer: str, streams: bool) -> str:
    """The text of an answer of any API."""
    if not streams:
        told = json.loads(answer)
        if "choices" in told:
            choice = told["choices"][0]
            return choice["text"] if "text" in choice else choice["message"]["content"]
        return (told["output"][0]["content"] if "output" in told else told["content"])[0]["text"]
    text = ""
    for line in answer.splitlines():
        if not line.startswith("data: {"):
            continue
        told = json.loads(line[6:])
        if told.get("choices"):
            choice = told["choices"][0]
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        elif told.get("type") == "content_block_delta":
            text += told["delta"]["text"]
        elif told.get("type") == "response.output_text.delta":
            text += told["delta"]
    return text


async def soak(
    seconds: float, seed: int, streams: str
) -> tuple[dict[str, float], list[str], Counter[str], list[list[float]]]:
    """Figures, notes, counts, and the gateways' memory."""
    one = Soak(seed)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hitherto-soak-")))
        (folder / "profile.yaml").write_text(PROFILE)
        one.redis = stack.enter_context(redis_running(RedisServer(folder / "redis")))
        ports = free_ports(3 * ENGINES)
        one.engines = [Engine(folder, ports[at : at + 3]) for at in range(0, len(ports), 3)]
        for engine in one.engines:
            engine.start()
            stack.callback(lambda engine=engine: engine.send(signal.SIGKILL))
        for _ in range(GATEWAYS):
            one.gateways.append(await stack.enter_async_context(running(
                "--redis-url", one.redis.url, "--replica-url", *(engine.url for engine in one.engines),
                "--model", str(sim_model_dir()), "--continue-streams", streams, "--idle-timeout-s", "40")))  # fmt: skip
        await one.all_ready()
        for gateway in one.gateways:
            await joined(gateway)
        files = one.files()
        await run(one, monotonic() + seconds)
        await one.all_ready()
        for gateway in one.gateways:
            await joined(gateway, 60)
        figures = {
            "lost": one.counts["lost"],
            "broken": one.counts["broken"],
            "wrong": one.counts["wrong"],
            "ledger": await one.load_left(),
            "map": await one.map_differs(),
            "predicted": await one.mispredicted(),
            "memory": round(one.grown(), 1),
        }
        await asyncio.sleep(6)  # until idle connections are closed
        figures["files"] = max(after - before for after, before in zip(one.files(), files))
        pages = [(await gateway.admin.get("/metrics")).text for gateway in one.gateways]
        one.counts["continued"] = int(sum(counted(page, "hitherto_continued_streams_total") for page in pages))
        one.counts["retried"] = int(sum(counted(page, "hitherto_retries_total") for page in pages))
        return figures, one.notes, one.counts, one.by_minute()


async def run(one: Soak, until: float) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        tasks = [asyncio.create_task(one.client(session, number)) for number in range(CLIENTS)]
        tasks.append(asyncio.create_task(one.sample()))
        try:
            await asyncio.sleep(PAUSE)
            turn = 0
            while monotonic() < until or turn < len(Soak.NAMES):  # a slow machine has each of them, too
                await one.fault(Soak.NAMES[turn % len(Soak.NAMES)])
                turn += 1
        finally:
            one.stopping = True
            await asyncio.gather(*tasks)


LIMITS = {
    "lost": 0,
    "broken": 0,
    "wrong": 0,
    "ledger": 0,
    "map": 0,
    "predicted": 0,
    "memory": GROWTH_MB,
    "files": MORE_FILES,
}


def table(figures: dict[str, float], counts: Counter[str]) -> list[str]:
    lines = ["| promise | found | at most | |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {figures[name]:g} | {most:g} | {'kept' if figures[name] <= most else 'BROKEN'} |"
        for name, most in LIMITS.items()
    ]
    kept = counts["continued"] > 0
    lines.append(f"| streams continued | {counts['continued']} | at least 1 | {'kept' if kept else 'BROKEN'} |")
    faults = ", ".join(f"{name.removeprefix('fault: ')} {count}" for name, count in counts.items() if "fault: " in name)
    lines += [
        "",
        f"{counts['answered']} answers, {counts['left']} clients left, {counts['retried']} retries; faults: {faults}",
    ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each fault once: three minutes")
    parser.add_argument("--minutes", type=float, default=60.0, help="each fault comes once at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--continue-streams", choices=("exact", "never"), default="exact")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures, notes, counts, minutes = asyncio.run(
        soak(120 if given.quick else 60 * given.minutes, given.seed, given.continue_streams)
    )
    print("\n".join(table(figures, counts)))
    for note in notes[:20]:
        print(note, file=sys.stderr)
    if given.json:
        more = {"continued": counts["continued"], "answered": counts["answered"], "memory_by_minute": minutes}
        given.json.write_text(json.dumps({**figures, **more}))
    return int(any(figures[name] > most for name, most in LIMITS.items()) or not counts["continued"])


if __name__ == "__main__":
    sys.exit(main())

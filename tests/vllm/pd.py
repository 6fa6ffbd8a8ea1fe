"""What is asked of engines that compute prompts for one another, and what their answers and metrics say."""

import asyncio
import os
import random
import re
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..gateway.running import Running, counted
from ..gateway.test_continue import as_a_whole, events
from .engines import Engine, folder, gateway, version
from .traffic import WORDS, caught_up
from .witness import Witness

WAYS = ("chat", "completions", "responses", "messages")
COMPUTED, HELD, FETCHED = "local_compute", "local_cache_hit", "external_kv_transfer"
PATIENCE = 300.0  # seconds for an answer, of machines that have much other work
# With 8 bits of mantissa a prompt whose beginning came from a cache has other sums than one that was computed in one
# piece: of 125 answers of 24 tokens that grew out of one another one had another token than the truth.
EXACTLY = ("--dtype", "float32")
# Shared by conversations: of one block and a half, and of some twenty.
SYSTEMS = ("Answer as a table of keys. " + " ".join(WORDS * 2), "Answer as a very small door. " + " ".join(WORDS * 24))
# Words of a conversation's turn: more than a block of them, so that each has something to be moved.
SHORT, LONG = (45, 80), (200, 400)


def needs_nixl() -> None:
    if version()[:2] != (0, 32) or not list(folder().glob("lib/python3*/site-packages/nixl")):
        pytest.skip("needs vLLM 0.32 with nixl in its environment: tests/vllm/install.sh")


def spread(pid: int) -> None:
    """Let it run on any CPU. vLLM binds the core of each engine to one CPU; a prefiller whose cache was not fetched yet
    polls without a pause, and requests to a decoder that is bound to the same CPU were seen to wait for 30 s, until the
    lease was over."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(process.name)) == pid:
                for thread in (process / "task").iterdir():
                    os.sched_setaffinity(int(thread.name), range(os.cpu_count() or 1))


def asked(way: str, text: str, stream: bool, most: int = 24) -> tuple[str, dict]:
    return body_of(way, [("user", text)], stream, most)


def body_of(way: str, said: list[tuple[str, str]], stream: bool, most: int = 24) -> tuple[str, dict]:
    """A conversation as a request of an API: a system prompt may stand at its start."""
    messages = [{"role": role, "content": text} for role, text in said]
    body: dict = {"model": "tiny", "temperature": 0, "stream": stream, "max_tokens": most}
    if way == "completions":
        return "/v1/completions", body | {"prompt": " ".join(text for _, text in said)}
    if way == "responses":
        del body["max_tokens"]
        return "/v1/responses", body | {"input": messages, "max_output_tokens": most}
    if way == "messages" and said[0][0] == "system":
        body["system"] = messages.pop(0)["content"]
    return "/v1/chat/completions" if way == "chat" else "/v1/messages", body | {"messages": messages}


class Talk:
    """A conversation in one of the APIs. It grows by the answers it gets, and shares its system prompt with others."""

    def __init__(self, dice: random.Random, way: str, system: str, turns: tuple[int, int], stream: bool):
        self.dice, self.way, self.turns, self.stream = dice, way, turns, stream
        self.said = [("system", system)]

    def ask(self) -> tuple[str, dict]:
        self.said.append(("user", " ".join(self.dice.choices(WORDS, k=self.dice.randint(*self.turns)))))
        return body_of(self.way, self.said, self.stream)

    def hear(self, answer: httpx.Response) -> None:
        self.said.append(("assistant", words(answer, self.stream) or "-"))


def talks(count: int, seed: int) -> list[Talk]:
    """Of all ways, each with both system prompts, with short turns and with long ones, whole and streamed."""
    dice = random.Random(seed)
    return [
        Talk(dice, WAYS[at % 4], SYSTEMS[at // 4 % 2], (SHORT, LONG)[at // 8 % 2], at % 3 == 1) for at in range(count)
    ]


def prompts(count: int, seed: int | str, least: int = 120, most: int = 700) -> list[str]:
    """Texts that have nothing in common."""
    dice = random.Random(seed)
    return [" ".join(dice.choices(WORDS, k=dice.randint(least, most))) for _ in range(count)]


# What no two answers have in common, and what tells where the cache came from.
OWN = re.compile(
    r'"(id|created|created_at|completed_at|item_id|\w*cach\w*|\w*created?_\w*tokens|'
    r'input_tokens|system_fingerprint|kv_transfer_params)":\s*("[^"]*"|[\d.]+|null)'
)
ENDED = re.compile(r'"(?:finish|stop)_reason":\s*"(\w+)"')


def said(answer: httpx.Response, stream: bool) -> str:
    """Return what an answer says, of a stream its text and why it ended, else all but ids and times."""
    assert answer.status_code == 200, answer.text
    return told(answer.text, stream)


def told(text: str, stream: bool) -> str:
    if stream:  # how many tokens an event has depends on the moment
        return as_a_whole(events(text))[0] + " ".join(ENDED.findall(text))
    return OWN.sub(r'"\1":_', text)


def words(answer: httpx.Response, stream: bool) -> str:
    """The text of an answer."""
    if stream:
        return as_a_whole(events(answer.text))[0]
    told = answer.json()
    if "choices" in told:
        return "".join(one.get("text") or one["message"]["content"] or "" for one in told["choices"])
    parts = told["content"] if "content" in told else [part for one in told["output"] for part in one["content"]]
    return "".join(part["text"] for part in parts)


async def alone(engine: Engine, path: str, body: dict) -> httpx.Response:
    """The answer of an engine that is asked directly."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=PATIENCE) as client:
        return await client.post(path, json=body)


@asynccontextmanager
async def apart(prefiller: Engine, *decoders: Engine):
    """A gateway of them. By turns there is no cost to compare: whatever has a block to compute goes in two legs."""
    urls = with_role(prefiller, "prefill"), *(with_role(one, "decode") for one in decoders)
    async with gateway(*urls, model=prefiller.model, policy="round_robin") as process:
        process.client.timeout = process.admin.timeout = httpx.Timeout(PATIENCE)
        yield process


def with_role(engine: Engine, role: str) -> str:
    return f"{engine.replica_url},role={role}"


async def turn(process: Running, talk: Talk, seen: dict[Engine, Witness], single: Engine) -> tuple[float, float]:
    """Ask a conversation's next question in two legs and hold answer and caches to `single`'s and to what is predicted.

    `seen`: the prefiller and the decoder, with what each publishes. Returns the prompt tokens that the prefiller found
    in its cache, and those that the decoder fetched from it.
    """
    path, body = talk.ask()
    for witness in seen.values():
        await caught_up(process, witness, 60)
    legs = await legs_now(process, path, body)
    before = [await sources(engine.url) for engine in seen]
    answer, truth = await asyncio.gather(process.client.post(path, json=body), alone(single, path, body))
    assert said(answer, talk.stream) == said(truth, talk.stream), body
    assert answer.headers["x-hitherto-replica"] == [*seen][1].id, process.log
    after = [await sources(engine.url) for engine in seen]
    at_p, at_d = ({one: b[one] - a[one] for one in b} for a, b in zip(before, after, strict=True))
    assert at_p[HELD] == legs["held_tokens"] and at_p[FETCHED] == 0
    assert at_d[FETCHED] == legs["moved_tokens"] and at_d[HELD] == sum(at_d.values()) - legs["moved_tokens"]
    talk.hear(answer)
    return at_p[HELD], at_d[FETCHED]


async def until(true: Callable[[], Awaitable[Any]], seconds: float = PATIENCE) -> Any:
    """Wait until what `true()` returns is true, and return that. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not (found := await true()):
            await asyncio.sleep(0.02)
        return found


async def legs_now(process: Running, path: str, body: dict) -> dict | None:
    """The legs that this request would have now."""
    return (await process.admin.post("/explain", params={"path": path}, json=body)).json()["legs"]


async def page_of(url: str) -> str:
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        return (await client.get(url + "/metrics")).text


async def sources(url: str) -> dict[str, float]:
    """Prompt tokens of an engine, by where it had their cache from."""
    page = await page_of(url)
    return {one: counted(page, "vllm:prompt_tokens_by_source_total", source=one) for one in (COMPUTED, HELD, FETCHED)}

"""Asks an OpenAI-compatible engine for completions and notes when each piece came.

Prompts are random token ids, so no tokenizer is needed and nothing of them is cached unless this client sent it.
Prompts of text, for what tokenizing costs, are random English words.
"""

from __future__ import annotations

import builtins
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import orjson

from loadgen.drive import client, sse
from loadgen.drive.records import Record
from loadgen.drive.run import CHAT, COMPLETIONS
from loadgen.options import KEY_NEEDED, Failed
from replicas.engines import DEFAULT, EngineDialect

TIMEOUT = 120.0  # s for one request: a prompt of a quarter of a million tokens on a slow engine
# Ordinary text in every vocabulary: below are special tokens (some models' image tokens among them), above a small one
# ends.
IDS = range(300, 1000)
WORDS = sorted({word for one in vars(builtins).values() for word in re.findall("[a-z]{2,12}", str(one.__doc__))})


class CalibrationError(Failed):
    """Measuring can't go on; the message says why and what to do."""


class Refused(CalibrationError):
    """The engine answered a question with something else than 200."""


@dataclass(slots=True)
class Reply:
    """One streamed completion. `times`: when a chunk with a choice came, also where its text is empty, as it is of half
    a letter; `tokens`: how many it must have had."""

    sent: float
    tokens: int
    times: list[float] = field(default_factory=list)
    prompt: int | None = None  # tokens, as the engine counts them
    cached: int | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent


class _Stream(sse.Reply):
    def __init__(self, reply: Reply, seen: Callable[[Reply], None] | None):
        super().__init__(Record("", 0, reply.sent))
        self.reply, self.seen = reply, seen

    def _choice(self, choice: dict, now: float) -> None:
        super()._choice(choice, now)
        self.reply.times.append(now)
        if self.seen is not None:
            self.seen(self.reply)


class Client(client.Client):
    """`async with Client(url) as asked`; `model` and `dialect` are to be set. Counts what it asked for. Raises
    BadURL."""

    def __init__(self, url: str, api_key: str | None = None, seed: int | None = None):
        self.own_headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        super().__init__(url.rstrip("/").removesuffix("/v1"), self.own_headers, TIMEOUT)
        self.dialect: EngineDialect = DEFAULT
        self.model, self.rng = "", random.Random(seed)
        self.requests = self.prompt_tokens = self.output_tokens = 0

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def ids(self, count: int) -> list[int]:
        return self.rng.choices(IDS, k=count)

    def text(self, words: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=words))

    async def complete(
        self, prompt: list[int] | str, tokens: int = 1, seen: Callable[[Reply], None] | None = None
    ) -> Reply:
        """Exactly `tokens` of output, to ids or, as one chat message, to text. `seen` is called at each chunk. Raises
        CalibrationError."""
        path = CHAT if isinstance(prompt, str) else COMPLETIONS
        asked = {"messages": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else {"prompt": prompt}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.model, "max_tokens": tokens, "ignore_eos": True, **stream, **asked}
        self.requests, self.prompt_tokens = self.requests + 1, self.prompt_tokens + len(prompt)
        self.output_tokens += tokens
        reply = Reply(perf_counter(), tokens)
        streamed = _Stream(reply, seen)
        await self._exchange(self._request("POST", path, orjson.dumps(body)), streamed)
        record = streamed.record
        reply.sent, reply.prompt, reply.cached = record.sent, record.prompt_tokens, record.cached_tokens
        if record.status not in (0, 200):
            wanted = f": {KEY_NEEDED}" if record.status in (401, 403) else ""
            words = " ".join(record.detail.split())
            raise Refused(f"{path} answers {record.status}{wanted or f': {words}'}")
        if record.error == "stream_error":
            raise CalibrationError(f"the engine broke a stream off: {record.detail}")
        if record.error == "timeout":
            raise CalibrationError(f"a request with {len(prompt)} prompt tokens had {record.detail}")
        if record.error:
            raise CalibrationError(
                f"the connection to {self.base_url} broke in the middle of measuring: {record.detail}"
            )
        if not reply.times:
            raise CalibrationError(
                "the engine ended a stream without any output: is this an engine that generates text?"
            )
        return reply

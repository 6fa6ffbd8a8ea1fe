"""A client that sends completions to an OpenAI-compatible engine and records when each chunk arrived.

Prompts are random token ids, so they need no tokenizer, and none is cached unless this client sent it before. Text
prompts, for the cost of tokenizing, are random English words.
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
# Ordinary text tokens in every vocabulary: lower ids include special tokens (image tokens in some models), and small
# vocabularies end above.
IDS = range(300, 1000)
WORDS = sorted({word for one in vars(builtins).values() for word in re.findall("[a-z]{2,12}", str(one.__doc__))})


class CalibrationError(Failed):
    """The measurement cannot continue; the message says why and what to do."""


class Refused(CalibrationError):
    """The engine answered a request with a status other than 200."""


@dataclass(slots=True)
class Reply:
    """A streamed completion.

    `times`: arrival of each chunk with a choice, even if its text is empty (as for part of a character); `tokens`: the
    number of output tokens requested.
    """

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
    """A client of the engine to measure, used as `async with Client(url) as client`.

    `model` and `dialect` must be set before `complete`. It counts the requests and tokens it asked for. Raises BadURL.
    """

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
        """Return `count` random token ids."""
        return self.rng.choices(IDS, k=count)

    def text(self, words: int) -> str:
        """Return `words` random English words."""
        return " ".join(self.rng.choices(WORDS, k=words))

    async def complete(
        self, prompt: list[int] | str, tokens: int = 1, seen: Callable[[Reply], None] | None = None
    ) -> Reply:
        """Return a completion of exactly `tokens` tokens. Raises CalibrationError.

        Token ids go to the completions API, text as one chat message. `seen` is called at each chunk.
        """
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

"""Asks an OpenAI-compatible engine for completions and notes when each piece came.

Prompts are random token ids, so no tokenizer is needed and nothing of them is cached unless this client sent it.
Prompts of text, for what tokenizing costs, are random English words. A failure is a `CalibrationError` that says what
to do.
"""

import asyncio
import builtins
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import aiohttp

from replicas.engines import DEFAULT, EngineDialect

TIMEOUT = 120.0  # s for one request: a prompt of a quarter of a million tokens on a slow engine
# Ordinary text in every vocabulary: below are special tokens (some models' image tokens among them), above a small one
# ends.
IDS = range(300, 1000)


WORDS = sorted({word for one in vars(builtins).values() for word in re.findall("[a-z]{2,12}", str(one.__doc__))})
JSON = {"content-type": "application/json"}


class CalibrationError(Exception):
    """Measuring can't go on; the message says why and what to do."""


class Refused(CalibrationError):
    """The engine answered a question with something else than 200."""

    def __init__(self, path: str, status: int, text: str):
        self.status = status
        super().__init__(_refusal(path, status, text))


@dataclass(slots=True)
class Reply:
    """One streamed completion. `times`: when a chunk with output came; `tokens`: how many it must have had."""

    sent: float
    tokens: int
    times: list[float] = field(default_factory=list)
    prompt: int | None = None  # tokens, as the engine counts them
    cached: int | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent


class Client:
    """`async with Client(url) as client`; `model` and `dialect` are to be set. Counts what it asked for."""

    def __init__(self, url: str, api_key: str | None = None, seed: int | None = None):
        self.dialect: EngineDialect = DEFAULT
        self.url, self.model = url.rstrip("/").removesuffix("/v1"), ""
        self.rng = random.Random(seed)
        self.requests = self.prompt_tokens = self.output_tokens = 0
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.session = aiohttp.ClientSession(
            headers=headers, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    def ids(self, count: int) -> list[int]:
        return self.rng.choices(IDS, k=count)

    def text(self, words: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=words))

    async def complete(
        self, prompt: list[int] | str, tokens: int = 1, seen: Callable[[Reply], None] | None = None
    ) -> Reply:
        """Exactly `tokens` of output, to ids or, as one chat message, to text. `seen` is called at each chunk."""
        body = {
            "model": self.model,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if isinstance(prompt, str):
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt}]
        else:
            path, body["prompt"] = "/v1/completions", prompt
        data = json.dumps(body).encode()
        self.requests, self.prompt_tokens = self.requests + 1, self.prompt_tokens + len(prompt)
        self.output_tokens += tokens
        reply = Reply(perf_counter(), tokens)
        try:
            async with asyncio.timeout(TIMEOUT):
                async with self.session.post(self.url + path, data=data, headers=JSON) as response:
                    if response.status != 200:
                        raise Refused(path, response.status, await response.text())
                    await self._read(response, reply, seen)
        except TimeoutError:
            raise CalibrationError(
                f"a request with {len(prompt)} prompt tokens had no end after {TIMEOUT:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            what = str(error) or type(error).__name__
            raise CalibrationError(f"the connection to {self.url} broke in the middle of measuring: {what}") from None
        if not reply.times:
            raise CalibrationError(
                "the engine ended a stream without any output: is this an engine that generates text?"
            )
        return reply

    async def _read(self, response: aiohttp.ClientResponse, reply: Reply, seen) -> None:
        pending = b""
        async for data in response.content.iter_any():
            now = perf_counter()
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if event.get("error"):
                        raise CalibrationError(f"the engine broke a stream off: {event['error']}")
                    if event.get("choices"):
                        reply.times.append(now)
                        if seen is not None:
                            seen(reply)
                    _count(reply, event.get("usage"))


def _count(reply: Reply, usage: object) -> None:
    if isinstance(usage, dict):
        reply.prompt = usage.get("prompt_tokens")
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            reply.cached = details.get("cached_tokens")


def _refusal(path: str, status: int, text: str) -> str:
    try:
        said = json.loads(text)
        said = said.get("error", said)
        said = said.get("message", said) if isinstance(said, dict) else said
    except (ValueError, AttributeError):
        said = " ".join(text.split())[:200]
    if status in (401, 403):
        return f"{path} answers {status}: the engine wants an API key, or another one: set OPENAI_API_KEY"
    if status == 404:
        return f"{path} answers 404: {said}. It must be there, and know the model's name"
    return f"{path} answers {status}: {said}"

"""A client of the engine to measure: what the engine reports of itself, and when each chunk of a completion arrived.

Prompts are random token ids, so they need no tokenizer, and no prompt is cached unless this client sent it before. Text
prompts, which measure the cost of tokenizing, are random English words.

The size of the KV cache is in /metrics; the scheduler's limits are available where the operator exposes them. Limits
that are not reported are measured later, or a common default is assumed and marked as such.
"""

from __future__ import annotations

import builtins
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from urllib.parse import urlsplit

import orjson

from loadgen.drive import client, sse
from loadgen.drive.records import Record
from loadgen.drive.run import CHAT, COMPLETIONS
from loadgen.options import KEY_NEEDED, Failed
from loadgen.report.summary import machine
from replicas.access import Access
from replicas.engines import DEFAULT, EngineDialect
from replicas.metrics import Scrape, parse
from replicas.served import base_names

TIMEOUT = 120.0  # s for one request: a prompt of a quarter of a million tokens on a slow engine
PATIENCE = 5.0  # s for a response for which nothing is generated
# Ordinary text tokens in every vocabulary: lower ids include special tokens (image tokens in some models), and small
# vocabularies end above.
IDS = range(300, 1000)
WORDS = sorted({word for one in vars(builtins).values() for word in re.findall("[a-z]{2,12}", str(one.__doc__))})
LIMITS = ("max_model_len", "block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens")


class CalibrationError(Failed):
    """The measurement cannot continue; the message says why and what to do."""


class Refused(CalibrationError):
    """The engine answered a request with a status other than 200."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's limits; a default is assumed where neither the engine's report nor a measurement gives a value."""

    max_model_len: int = 8192
    block_size: int = 16
    num_blocks: int = 4096
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    told: dict[str, str] = field(default_factory=dict)  # by limit: where its value comes from, in words

    @property
    def longest(self) -> int:
        """The longest prompt, in tokens, that leaves room for its output and takes at most a quarter of the cache."""
        return min(self.max_model_len * 7 // 8, self.num_blocks * self.block_size // 4)


@dataclass(frozen=True, slots=True)
class Known:
    """What a profile states about its engine: model, software and version, machine, and limits."""

    model: str
    engine: str
    version: str
    machine: str
    limits: Limits


class Reply(sse.Reply):
    """A parser of one streamed completion that also notes when each chunk arrived.

    `tokens`: the number of output tokens that were requested; `record` has the counts that the engine reported.
    `times`: arrival times (`perf_counter`) of all chunks with a choice, including chunks without text, such as part of
    a character. `seen`: called with this reply at each of these chunks.
    """

    def __init__(self, tokens: int, seen: Callable[[Reply], None] | None = None, times: list[float] | None = None):
        super().__init__(Record("", 0, perf_counter()))
        self.tokens, self.seen, self.times = tokens, seen, times or []

    @property
    def ttft(self) -> float:
        return self.times[0] - self.record.sent

    def _choice(self, choice: dict, now: float) -> None:
        super()._choice(choice, now)
        self.times.append(now)
        if self.seen is not None:
            self.seen(self)


class Client(client.Client):
    """A client of the engine to measure, used as `async with Client(url) as client`. Raises BadURL.

    Call `learn` before `complete`. `requests` and `prompt_tokens` count what was sent so far; `output_tokens` counts
    what was requested. The tokens of a text prompt are counted only if the engine reports their number.
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
        """Request a completion of exactly `tokens` tokens and return it. Raises CalibrationError.

        `prompt`: token ids, for the completions API, or the text of a chat message; `seen`: called at each chunk with
        the reply so far.
        """
        path, asked = COMPLETIONS, {"prompt": prompt}
        if isinstance(prompt, str):
            path, asked = CHAT, {"messages": [{"role": "user", "content": prompt}]}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.model, "max_tokens": tokens, "ignore_eos": True, **stream, **asked}
        reply = Reply(tokens, seen)
        await self._exchange(self._request("POST", path, orjson.dumps(body)), reply)
        record = reply.record
        self.requests, self.output_tokens = self.requests + 1, self.output_tokens + tokens
        self.prompt_tokens += record.prompt_tokens or (0 if isinstance(prompt, str) else len(prompt))
        if record.status not in (0, 200):
            why = KEY_NEEDED if record.status in (401, 403) else " ".join(record.detail.split())
            raise Refused(f"{path} answers {record.status}: {why}")
        if record.error:
            raise CalibrationError(
                f"a request with {len(prompt)} prompt tokens to {self.base_url} failed: {record.detail}"
            )
        if not reply.times:
            raise CalibrationError("the engine ended a stream without any output: does it generate text?")
        return reply

    async def learn(self, model: str | None) -> Known:
        """Find out the engine's model, software, machine and limits, and return them.

        Later requests are for this model and use the engine's dialect (metric names, paths). `model`: name of the
        model, or None for the first that the engine lists. Raises CalibrationError if no engine answers, if it is not
        ready, if it does not have the model, or if `model` is None and it lists none.
        """
        way = Access(self.base_url, urlsplit(self.base_url).hostname or "", headers=self.own_headers)
        try:
            facts = await way.find(PATIENCE)
        finally:
            await way.close()
        if not facts.alive:
            raise CalibrationError(f"no engine answers at {self.base_url}: {facts.error}")
        if not facts.serving:
            raise CalibrationError(f"{self.base_url} is not ready: {facts.error}")
        served = base_names(facts.models)
        if model is None and not served:
            raise CalibrationError(
                "the engine does not list its models (an API key? set OPENAI_API_KEY): give --model NAME"
            )
        if model is not None and facts.models and model not in facts.models:
            raise CalibrationError(f"the engine has no model {model!r}; it serves {', '.join(facts.models)}")
        self.model, self.dialect = model or served[0], facts.dialect
        _, body, _ = await self.get(self.dialect.limits_path)
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError:
            found = None
        info = found if isinstance(found, dict) else {}  # engine settings and machine, if the operator exposes them
        told = {name: getattr(facts, name) for name in LIMITS[:3]}
        scheduler = self.dialect.scheduler_limits(info)
        told |= {name: scheduler.get(name) for name in LIMITS[3:]}
        told = {name: value for name, value in told.items() if type(value) is int and value > 0}
        sources = {name: "reported by the engine" if name in told else "assumed" for name in LIMITS}
        limits = Limits(**told, told=sources)
        return Known(self.model, facts.dialect.name, facts.version or "version unknown", self._machine(info), limits)

    def _machine(self, info: dict[str, object]) -> str:
        """Return the names of the engine's GPUs, or of its CPU, as the engine reports them.

        If it reports neither, the result describes this machine for a local engine, and says "unknown" for a remote
        one. `info`: the JSON object with which the engine describes itself; {} if it exposes none.
        """
        env = info.get("system_env")
        env = env if isinstance(env, dict) else {}
        gpus = env.get("nvidia_gpu_models")
        if isinstance(gpus, str) and gpus.strip():
            return " | ".join(line.strip() for line in gpus.strip().splitlines())
        if cpu := re.search(r"^\s*Model name:\s*(.*\S)", str(env.get("cpu_info", "")), re.M):
            return cpu[1]
        local = urlsplit(self.base_url).hostname in ("127.0.0.1", "localhost", "::1")
        return machine() if local else "machine unknown: the engine is remote"

    async def counters(self) -> Scrape | None:
        """Return the engine's counters from /metrics, or None if it has no such page."""
        status, page, _ = await self.get("/metrics")
        return parse(page, 0.0, self.dialect.metrics) if status == 200 else None

    async def at_work(self) -> int | None:
        """Return the number of requests running or waiting in the engine; None if it does not report this."""
        found = await self.counters()
        return None if found is None or found.running is None else found.running + (found.waiting or 0)

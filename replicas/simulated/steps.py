"""An engine's requests, and the results of its steps."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from .blocks import Key


@dataclass(slots=True)
class EngineRequest:
    """A request to the engine.

    `blocks`: chained keys of the prompt's full blocks (any hashable; equal keys mean equal prefixes).
    `output_blocks(i)` returns the key of block `i` of the whole sequence, prompt included, once output has filled it;
    without it, blocks filled by output are never hits and raise no events. `stop_tokens`: after how many tokens the
    model ends by itself (None: never); the output is cut at `max_tokens` and at the engine's context length.
    `reads_cache`: False computes the whole prompt, and stores it. `received`: prompt tokens whose key/value another
    engine has computed; they are available at once, and are no hits. `keeps`: after the request its blocks stay in use
    until `Engine.let_go`, for another engine to fetch them. `priority`: under priority scheduling the lower goes first.
    """

    id: Hashable
    blocks: list[Key]
    prompt_tokens: int
    max_tokens: int
    output_blocks: Callable[[int], Key] | None = None
    stop_tokens: int | None = None
    reads_cache: bool = True
    received: int = 0
    keeps: bool = False
    priority: int = 0
    owner: object = None  # for the caller; the engine does not read it


class Output(NamedTuple):
    """Tokens that a request got in a step. `tokens`: new since this request's last Output."""

    id: Hashable
    tokens: int
    first: bool
    finished: str | None  # "stop", "length", or None while it runs
    cached_tokens: int


class Stored(NamedTuple):
    """Blocks of a request's sequence, from `start` on, that were filled or copied to host memory.

    `parent` is the key before them.
    """

    request: EngineRequest
    start: int
    keys: list[Key]
    parent: Key | None
    tier: str = "gpu"


class GroupKey(NamedTuple):
    """The pool's key of a block in a further cache group."""

    group: int
    key: Key


class GroupStored(NamedTuple):
    """The filled blocks of a request, of `start` to `end`, that a further cache group keeps, by their keys.

    `parent` is the key before all of the filled blocks.
    """

    request: EngineRequest
    start: int
    end: int
    group: int
    keys: list[Key]
    parent: Key | None


class Removed(NamedTuple):
    keys: list[Key]  # those of further groups as GroupKey
    tier: str = "gpu"


class Cleared(NamedTuple):
    """The whole prefix cache was reset (before this step)."""


@dataclass(slots=True)
class Step:
    """One step of `seconds`. `events` are in the order in which the cache changed."""

    seconds: float
    outputs: list[Output] = field(default_factory=list)
    events: list[Stored | GroupStored | Removed | Cleared] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preempted: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the start, as vLLM's metrics of these names count them (in tokens unless stated)."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0

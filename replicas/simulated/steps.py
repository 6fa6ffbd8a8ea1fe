"""The records that go into an engine and come out of it: requests, and the results of steps."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from .blocks import Key


@dataclass(slots=True)
class EngineRequest:
    """A request to the engine.

    `blocks`: chained keys of the prompt's full blocks (any hashable; equal keys mean equal prefixes).
    `output_blocks(i)`: returns the key of block `i` of the whole sequence, prompt included, once output has filled the
    block; None: blocks that output fills are never cached, and cause no events.
    `stop_tokens`: how many output tokens the model generates until it ends by itself (None: it never does). The output
    also ends at `max_tokens` and at the engine's context length.
    `reads_cache`: False: the prompt is computed completely, without prefix cache hits, and then cached.
    `received`: how many of the first prompt tokens another engine has computed; these are not computed again, and do
    not count as cache hits.
    `keeps`: after the request's end its blocks stay in use until `Engine.let_go`, for another engine to fetch them.
    `priority`: under priority scheduling the lowest number goes first.
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
    """The report about one request that a step returns: its new output tokens, and whether it has ended."""

    id: Hashable  # of the request
    tokens: int  # output tokens since this request's last Output
    first: bool  # they include the request's first output token
    finished: str | None  # "stop", "length", or None while the request runs
    cached_tokens: int  # prompt tokens found cached


class Stored(NamedTuple):
    """The event that consecutive blocks of a request were filled (`tier` "gpu"), or copied to host memory ("cpu")."""

    request: EngineRequest
    start: int  # the number of the first block in the sequence
    keys: list[Key]
    parent: Key | None  # the key of the block before them
    tier: str = "gpu"


class GroupKey(NamedTuple):
    """The key of a block in the block pool if the block belongs to a cache group other than full attention.

    `key`: the block's key in events.
    """

    group: int
    key: Key


class GroupStored(NamedTuple):
    """The event that a cache group other than full attention keeps some of the blocks that a request has filled."""

    request: EngineRequest
    start: int  # blocks `start` to `end` of the sequence were filled
    end: int
    group: int  # the number of the cache group
    keys: list[Key]  # of the blocks that the group keeps
    parent: Key | None  # the key of the block before `start`


class Removed(NamedTuple):
    """The event that blocks are no longer cached in a tier: "gpu", or "cpu" for host memory."""

    keys: list[Key]  # keys of blocks in further cache groups are GroupKeys
    tier: str = "gpu"


class Cleared(NamedTuple):
    """The event that the whole prefix cache was reset, before this step."""


@dataclass(slots=True)
class Step:
    """The results of one engine step, which takes `seconds`; `events` are in the order in which the cache changed."""

    seconds: float
    outputs: list[Output] = field(default_factory=list)
    events: list[Stored | GroupStored | Removed | Cleared] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preempted: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the engine's start, with the meanings of vLLM's metrics of the same names.

    They count tokens, except for `preemptions` and `steps`.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0

"""EngineDialect: all that differs between kinds of inference engines, in one object.

The rest of the project names no engine: it uses the dialect that a replica carries. What all engines have in common is
not here: OpenAI's endpoints, /health, Prometheus' text format, msgpack over ZMQ.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from replicas.answer import Answer
from replicas.engines.transfer import Transfer
from replicas.event_source import EventSource
from replicas.launch.command import LaunchProfile
from replicas.launch.exits import LogGrammar
from replicas.metrics import MetricNames
from replicas.problems import Problem, Remedies


class EventRecords(Protocol):
    """The types of decoded KV events: those of `cachemap.events.records`, which this package may not import."""

    Batch: Callable[..., Any]
    Stored: Callable[..., Any]
    Removed: Callable[..., Any]
    Cleared: Callable[..., Any]
    EventError: type[Exception]
    MOST_AHEAD: int  # tokens after a block that its key may also cover, at most


ANY_PATH, ERROR = "", "error"


class Sources(NamedTuple):
    """The KV event sources of an engine, by its own report."""

    by_rank: dict[int, EventSource | None] | None  # None: the report could not be read
    problems: dict[str, Problem]  # "events", "replay", "role"


class Told(NamedTuple):
    """The facts that an engine reports besides /v1/models and /metrics; None where it does not.

    They take precedence over the same figures in /metrics.
    """

    version: str | None = None
    root: str | None = None  # where it loaded its model from: a folder, or a name on the hub
    block_size: int | None = None  # tokens of a block of the map: a multiple of its page
    num_blocks: int | None = None  # capacity of its cache in blocks of that size
    # Tokens of the parts that its cache can match, if these may be smaller than blocks.
    page_size: int | None = None
    prefix_caching: bool | None = None
    unable: frozenset[str] = frozenset()  # ids of transfers for which it was started without a connector
    drops_block: bool = False  # it most likely recomputes the last block of a cache hit (EAGLE, MTP)
    # Where it drops a block and has several cache groups: it looks up the block that ends with the prompt's last token
    # too.
    looks_to_end: bool = True
    finds_parts: bool = True  # hits may end within a block of full attention, where Mamba's blocks are smaller
    takes_priority: bool = False  # requests may carry a priority, which it schedules by or ignores


class PeerPull(Protocol):
    """The edit of a request that makes its engine fetch the prompt's beginning from another's memory. Stateless."""

    def body(self, body: bytes, peer: str, id: str) -> bytes | None:
        """Return the client's body with the address of that engine, or None if it has transfer parameters of its own.

        `peer`: HOST:PORT; `id`: an id that is unique to this fetch.
        """


class EngineDialect(Protocol):
    """One kind of engine. It is stateless: one object serves all replicas of the kind."""

    id: str  # in profiles (`engine: ...`) and between processes
    name: str  # for people
    paths: tuple[str, ...]  # read by a full probe besides /health, /v1/models, /version and /metrics
    health_seconds: float  # extra time for /health, if a healthy engine may answer it late
    metrics: MetricNames
    remedies: Remedies
    log: LogGrammar
    rank_header: str  # selects the data-parallel rank that computes a request ...
    rank_paths: tuple[str, ...]  # ... posted to these paths; elsewhere the engine chooses the rank
    # the text before and after the prompt's token ids in a chat's JSON object
    chat_token_ids: tuple[bytes, bytes] | None
    # With `Told.takes_priority` a request posted to these paths may have a `priority` in its body; lower goes first.
    # The header (in lower case) would take precedence: it is sent to the paths whose bodies have no such field.
    priority_paths: tuple[str, ...]
    priority_header: bytes | None
    priority_header_paths: tuple[str, ...]
    limits_path: str  # reports the scheduler's limits, if the operator allows it
    transfer: Transfer | None  # None: its engines pass no cache on
    peer_pull: PeerPull | None  # None: its engines fetch nothing from one another's memory
    # Tests whether the engine cut an answer short because it was asked to stop, by the request's path, ANY_PATH for all
    # others. They apply to answers of status 200; that for ERROR applies to those of 500 or more. Each gets the
    # answer's first or last bytes, including the last event of a stream.
    aborted: Mapping[str, Callable[[bytes], object]]

    def speaks(self, answers: Mapping[str, Answer]) -> bool:
        """Return whether an engine with these answers to a full probe, by path, is of this kind."""

    def told(self, answers: Mapping[str, Answer]) -> Told:
        """Return what the engine reports about itself."""

    def event_sources(self, answers: Mapping[str, Answer], host: str) -> Sources:
        """Return where it publishes KV events; `host` is the engine's host as clients reach it."""

    def event_decoder(self, records: EventRecords) -> Callable[[bytes], Any]:
        """Return a function that decodes one message's payload into a `records.Batch`.

        The function raises `records.EventError` if the payload is no batch.
        """

    def version_quirks(self, version: str | None) -> dict[str, Any]:
        """Return how this version prepares prompts differently from the newest.

        The keys are fields of `gateway.prompt.quirks.VersionQuirks`.
        """

    def has_random_hash_seed(self, version: str | None) -> bool:
        """Return whether processes of this version hash the same block differently, unless they are given a seed."""

    def launch_profile(self) -> type[LaunchProfile] | None:
        """Return the class of launch profiles, or None if the engine cannot be launched.

        The class is imported on call: adopting engines does not need it.
        """

    def scheduler_limits(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `max_num_seqs` and `max_num_batched_tokens` from the answer of `limits_path`; {} if it lacks them."""

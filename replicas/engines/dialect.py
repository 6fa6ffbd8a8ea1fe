"""EngineDialect: all that differs from one kind of inference engine to another, in one object.

The rest of the house names no engine: it asks the dialect that a replica carries. What every engine has in common is
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
    """The types that decoded KV events are made of. They are `cachemap.events.records`', which this room may not
    import."""

    Batch: Callable[..., Any]
    Stored: Callable[..., Any]
    Removed: Callable[..., Any]
    Cleared: Callable[..., Any]
    EventError: type[Exception]


ANY_PATH, ERROR = "", "error"


class Sources(NamedTuple):
    """Where an engine publishes KV events, by its own account."""

    by_rank: dict[int, EventSource | None] | None  # None: it could not be asked
    problems: dict[str, Problem]  # "events", "replay", "role"


class Told(NamedTuple):
    """What an engine tells of itself beside /v1/models and /metrics, None where it does not. It counts before what
    /metrics says of the same."""

    version: str | None = None
    root: str | None = None  # where it has its model from: a folder, or a name on the hub
    block_size: int | None = None  # tokens of a block of the map: a multiple of its page
    num_blocks: int | None = None  # of that size that its cache has room for
    # Tokens of the parts in which it caches and finds prompts, where they may be smaller than blocks.
    page_size: int | None = None
    prefix_caching: bool | None = None
    unable: frozenset[str] = frozenset()  # ids of ways of moving caches for which it was started without a connector
    drops_block: bool = False  # it most likely computes the last block of what it finds again (EAGLE, MTP)
    # Where it does and has several cache groups: it looks for the block that ends with the prompt's last token too.
    looks_to_end: bool = True
    finds_parts: bool = True  # of full attention's blocks, where Mamba's are smaller
    takes_priority: bool = False  # requests may carry a priority: it schedules by it, or ignores it


class PeerPull(Protocol):
    """How a request is told to take the beginning of its prompt from another engine's memory. Without state."""

    def body(self, body: bytes, peer: str, id: str) -> bytes | None:
        """The client's body with where that is, HOST:PORT; `id`: of this pull, nobody else's. None: it says something
        of transfers itself."""


class EngineDialect(Protocol):
    """One kind of engine. It has no state: there is one object for all replicas of the kind."""

    id: str  # in profiles (`engine: ...`) and between processes
    name: str  # for people
    paths: tuple[str, ...]  # what a full probe asks besides /health, /v1/models, /version and /metrics
    health_seconds: float  # that /health takes, where it is answered late though all is well
    metrics: MetricNames
    remedies: Remedies
    log: LogGrammar
    rank_header: str  # chooses the data-parallel rank that computes a request ...
    rank_paths: tuple[str, ...]  # ... posted to these paths; elsewhere the engine takes the rank it likes
    # what stands before and after the prompt's token ids in a chat's JSON object
    chat_token_ids: tuple[bytes, bytes] | None
    # With `Told.takes_priority` a request posted to these paths may have a `priority` in its body, the lower first. The
    # header, in lower case, would count before it: it is sent to the paths whose bodies have no such field.
    priority_paths: tuple[str, ...]
    priority_header: bytes | None
    priority_header_paths: tuple[str, ...]
    limits_path: str  # tells the scheduler's limits, where the operator allows it
    transfer: Transfer | None  # None: its engines pass no cache on
    peer_pull: PeerPull | None  # None: its engines take nothing from one another's memory
    # By the path of a request, and for ANY_PATH else: what is true of an answer of status 200 that says that the engine
    # cut it short because it was asked to stop; for ERROR, of one of 500 or more that says the same. It gets the
    # answer's first or last bytes, with the last event of a stream among them.
    aborted: Mapping[str, Callable[[bytes], object]]

    def speaks(self, answers: Mapping[str, Answer]) -> bool:
        """Whether an engine that answers so is of this kind. `answers`: of a full probe, by path."""

    def told(self, answers: Mapping[str, Answer]) -> Told:
        """What it says of itself in `answers`."""

    def event_sources(self, answers: Mapping[str, Answer], host: str) -> Sources:
        """Where it publishes KV events, as seen from `host`'s clients."""

    def event_decoder(self, records: EventRecords) -> Callable[[bytes], Any]:
        """Return a function that makes `records.Batch` of one message's payload, and raises `records.EventError` if it
        is none."""

    def version_quirks(self, version: str | None) -> dict[str, Any]:
        """In what this version makes a prompt otherwise than the newest: fields of
        `gateway.prompt.quirks.VersionQuirks`."""

    def has_random_hash_seed(self, version: str | None) -> bool:
        """Whether this version's processes call the same block by different hashes, unless they are told a seed."""

    def launch_profile(self) -> type[LaunchProfile] | None:
        """The class of the profiles that start it, None if none do. Imported when it is asked for: those who only adopt
        need not pay for it."""

    def scheduler_limits(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """`max_num_seqs` and `max_num_batched_tokens` out of what `limits_path` tells; {} if it does not."""

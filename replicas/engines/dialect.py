"""EngineDialect: everything that differs between kinds of inference engines (vLLM, SGLang ...), in one object.

The rest of the project names no engine: it uses the dialect of a `Replica`. What all engines have in common is not
here: OpenAI's endpoints, /health, Prometheus' text format, msgpack over ZMQ.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from replicas.answer import Answer
from replicas.engines.transfer import Transfer
from replicas.event_source import EventSource
from replicas.launch.command import LaunchProfile
from replicas.launch.exits import PLAIN, LogGrammar
from replicas.metrics import MetricNames
from replicas.problems import Problem, Remedies

ANY_PATH, ERROR = "", "error"


class Sources(NamedTuple):
    """The addresses at which an engine says that it publishes KV events, and problems with them."""

    by_rank: dict[int, EventSource | None] | None  # by data-parallel rank; None: the report could not be read
    problems: dict[str, Problem]  # by subject: "events", "replay", "role"


class Told(NamedTuple):
    """The facts that a dialect finds in an engine's answers to a full probe; None for a fact that is not reported.

    These facts take precedence over those that `replicas.metrics` finds in the engine's /metrics.
    """

    version: str | None = None
    root: str | None = None  # where it loaded its model from: a folder, or a name on the hub
    block_size: int | None = None  # tokens of a KV cache block as the gateway counts them
    num_blocks: int | None = None  # capacity of its cache in blocks of that size
    # Tokens of the parts (pages) that its cache can match, if these may be smaller than blocks; a block is a multiple.
    page_size: int | None = None
    prefix_caching: bool | None = None
    unable: frozenset[str] = frozenset()  # ids of transfers for which it was started without a connector
    drops_block: bool = False  # it most likely recomputes the last block of a cache hit (EAGLE, MTP)
    # For an engine that drops a block and has several cache groups (kinds of layers): its cache lookup includes the
    # block that ends with the prompt's last token.
    looks_to_end: bool = True
    finds_parts: bool = True  # hits may end within a block of full attention, if Mamba's blocks are smaller
    takes_priority: bool = False  # requests may have a priority; the engine schedules by it or ignores it


class EngineDialect(ABC):
    """The description of one kind of engine. It has no state, so one object serves all replicas of the kind."""

    id: str  # its name in profiles (`engine: ...`) and between processes
    name: str  # its name in messages
    paths: tuple[str, ...]  # read by a full probe besides /health, /v1/models, /version and /metrics
    health_seconds: float = 0.0  # extra time for /health, if a healthy engine may answer it late
    metrics: MetricNames
    remedies: Remedies
    log: LogGrammar = PLAIN
    rank_header: str  # the header that selects the data-parallel rank that computes a request ...
    rank_paths: tuple[str, ...]  # ... posted to these paths; at other paths the engine chooses the rank
    # the text before and after the prompt's token ids in a chat's JSON object; None: a chat takes no token ids
    chat_token_ids: tuple[bytes, bytes] | None
    # With `Told.takes_priority` a request posted to `priority_paths` may have a `priority` in its body; lower goes
    # first. The header (in lower case) would take precedence, so it is sent only to `priority_header_paths`, whose
    # bodies have no such field.
    priority_paths: tuple[str, ...] = ()
    priority_header: bytes | None = None
    priority_header_paths: tuple[str, ...] = ()
    limits_path: str  # the path that reports the scheduler's limits, if the operator of the engine allows it
    transfer: Transfer | None = None  # how its engines pass KV caches on by default; None: they do not
    # Makes an engine fetch the KV cache of a prompt's beginning from another engine's host memory. Arguments: the
    # client's body, the other engine (HOST:PORT), and an id that is unique to this fetch. Returns the body with the
    # fetch's parameters, or None if it has transfer parameters already. None: its engines cannot fetch in this way.
    peer_pull: Callable[[bytes, str, str], bytes | None] | None = None
    # Tests whether the engine cut an answer short because it was asked to stop. Keys are the request's path, ANY_PATH
    # for all other paths (both for answers of status 200), and ERROR for answers of status 500 or more. A test gets the
    # answer's first or last bytes, including the last event of a stream.
    aborted: Mapping[str, Callable[[bytes], object]]

    @abstractmethod
    def speaks(self, answers: Mapping[str, Answer]) -> bool:
        """Return whether an engine is of this kind; `answers`: its answers to a full probe, by path."""

    @abstractmethod
    def told(self, answers: Mapping[str, Answer]) -> Told:
        """Return the facts that the engine reports in its answers to a full probe."""

    @abstractmethod
    def event_sources(self, answers: Mapping[str, Answer], host: str) -> Sources:
        """Return where the engine publishes KV events; `host`: the engine's host as clients reach it."""

    @abstractmethod
    def event_decoder(self, records: Any) -> Callable[[bytes], Any]:
        """Return a function that decodes the payload of one KV event message into a `records.Batch`.

        `records`: the module `cachemap.events.records`, which this package may not import. The function raises
        `records.EventError` if the payload is no batch.
        """

    @abstractmethod
    def version_quirks(self, version: str | None) -> dict[str, Any]:
        """Return how this version of the engine prepares prompts differently from the newest version.

        The keys are fields of `gateway.prompt.quirks.VersionQuirks`.
        """

    def has_random_hash_seed(self, version: str | None) -> bool:
        """Return whether processes of this version give equal blocks different keys, unless they are given a seed."""
        return False

    def launch_profile(self) -> type[LaunchProfile] | None:
        """Return the class of launch profiles, or None if the gateway cannot launch this kind of engine.

        The class is imported when this is called, as a gateway that only adopts engines does not need it.
        """
        return None

    @abstractmethod
    def scheduler_limits(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `max_num_seqs` and `max_num_batched_tokens` from the answer at `limits_path`; {} if it lacks them."""

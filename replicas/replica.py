"""One replica (an engine, or one data-parallel rank of an engine): its URL, the models it serves, and its state."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from replicas.addresses import check_endpoint, check_host, one_spelling
from replicas.engines import DEFAULT, TRANSFERS
from replicas.engines.dialect import EngineDialect
from replicas.engines.transfer import Meeting, MeetingTransfer, Transfer
from replicas.event_source import EventSource
from replicas.lifecycle import Event, State, follows
from replicas.metrics import Scrape
from replicas.names import bracketed
from replicas.pairing import Traits
from replicas.problems import Problem, unfit
from replicas.roles import BOTH, PREFILLERS, ROLES


class Address(NamedTuple):
    """The parts of a replica's URL; the fields after `port` are in the URL's fragment (the text after #)."""

    id: str  # host:port
    url: str  # without the fragment
    host: str
    port: int
    source: EventSource | None = None  # where the engine publishes KV events
    model: str | None = None  # the name that the engine has to serve
    role: str = BOTH
    spill: bool = False  # the replica is in the overflow pool
    transfer: str = ""  # how it passes KV caches to other engines: a key of `TRANSFERS`; "": not given
    bootstrap: int = 0  # the port where other engines ask it for the KV cache of a prompt; 0: not given
    peer: str = ""  # HOST:PORT of its first rank's P2P side channel, where other engines read its host memory


DEFAULT_PORTS = {"http": 80, "https": 443}
# The fields of `Replica` that are equal for all data-parallel ranks of one engine.
SHARED = """
    dialect address proof models adapter_roots root block_size page_size num_blocks max_model_len version pid restarts problems engine_ids
    declared cache_dtype unable fault foreign context_parallel drops_block looks_to_end finds_parts takes_priority
    """.split()


# Events after which the engine's process has ended, or may be another one, so that its facts are forgotten.
ENDINGS = (Event.GONE, Event.RESTARTED, Event.DOUBTED, Event.STOPPED, Event.LAUNCHED)


@dataclass(slots=True, eq=False)
class Replica:
    """One replica: an engine, or one data-parallel rank of an engine.

    Fields may be read at any time. Facts about the engine are None or empty until the engine has reported them. Times
    are monotonic seconds.
    """

    id: str  # "host:port", followed by "-dp0", "-dp1" ... if the engine has data-parallel ranks; never changes
    url: str
    host: str
    port: int
    managed: bool = False  # this gateway launched the engine
    rank: int | None = None  # number of its data-parallel rank; None: the engine has one rank
    dialect: EngineDialect = DEFAULT  # the kind of engine; the default kind until it is known
    role: str = BOTH  # the part of a request that it computes: prefill, decode or both
    spill: bool = False  # in the overflow pool, used when no other replica can answer in time
    moves_by: str = ""  # how it passes KV caches to other engines: a key of `TRANSFERS`; "": its dialect's default
    bootstrap: int = 0  # the port where other engines ask it for a prompt's KV cache, from the operator; 0: not given
    engine_ids: dict[int, str] = field(default_factory=dict)  # engine id by rank, from `ids_url` if there is one
    declared: Traits = field(default_factory=Traits)  # settings for exchanging KV caches, from its launch profile
    context_parallel: int = 1  # GPUs that share each block of its cache, from its launch profile
    launched_to_drop: bool | None = None  # the value of `drops_block` in its launch profile; None: not given there
    drops_block: bool = False  # it recomputes the last block of each cache hit, by its report or its launch profile
    looks_to_end: bool = True  # if it drops a block: its cache lookup includes the block at the prompt's very end
    finds_parts: bool = True  # a cache hit may end within a full-attention block, if Mamba's blocks are smaller
    takes_priority: bool = False  # its requests may carry a priority
    cache_dtype: str | None = None
    unable: frozenset[str] = frozenset()  # ids of `TRANSFERS` for which it has no connector
    unlike: tuple[str, ...] = ()  # messages that name replicas with which it cannot exchange KV caches, and why
    peer: str = ""  # HOST:PORT where other engines fetch KV cache from its host memory; "": they cannot
    state: State = State.STARTING
    reason: str = "not heard yet"  # why it is in this state
    fault: str = ""  # how the last probe failed (connect, timeout ... as in `Answer`); "": not at all
    foreign: bool = False  # the last answer came from something else than an engine, so it serves no model now
    since: float = 0.0  # when the state began
    left: bool = False  # it was LEAVING (shutting down) when it became FAILED
    incarnation: str = ""  # id of the engine's present process; another one after a restart, or at another `address`
    # the IP address of `host` that everything connects to for this incarnation; "" until it is known
    address: str = ""
    tls: ssl.SSLContext | None = None  # for connections, if its URL is https
    key: str | None = field(default=None, repr=False)  # the API key that its engine requires
    # A connection to the process that was probed last: while it is open, this process still exists. None: the process
    # cannot be identified in this way.
    proof: asyncio.BaseTransport | None = None
    models: dict[str, str | None] = field(default_factory=dict)  # name -> base model, None for a base model itself
    required_model: str | None = None  # the name that it has to list, from the operator or its launch
    # adapter name -> the folder that it was loaded from
    adapter_roots: dict[str, str] = field(default_factory=dict)
    root: str | None = None  # the folder or hub name that the engine was started with, whatever the model is served as
    block_size: int | None = None
    # As its KV events show, which take precedence over `block_size`: the tokens in a block (None until an event
    # arrived), and how many tokens after a block are hashed with it.
    stored_size: int | None = None
    looks_ahead: int = 0
    page_size: int | None = None  # tokens of the parts of a block that a hit may end at; None: whole blocks
    num_blocks: int | None = None
    max_model_len: int | None = None
    version: str | None = None
    events: EventSource | None = None
    cached_tokens: bool | None = None  # usage reports cached tokens; learned from traffic
    tokenizer: str = "not compared yet"  # whether its tokenizer equals the gateway's
    takes_ids: str = "not tried yet"  # whether it accepts token ids in place of text, and why not; learned from traffic
    pid: int | None = None
    restarts: int = 0
    scrape: Scrape | None = None  # the figures of the last /metrics page, read at `scrape.at`
    moved_at: float = float("-inf")  # when a /metrics page last differed in its counters from the page before
    problems: tuple[str, ...] = ()  # what could not be learned, each with its remedy

    def unfit(self, block_size: int | None) -> Problem | None:
        """Return why the `block_size` (tokens) that the operator set does not fit this engine, or None if it fits."""
        whole = self.stored_size or (self.scrape.attention_block_size if self.scrape else None)
        return unfit(block_size, self.block_size, whole, self.page_size, self.events is not None)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that make the engine compute a request on this data-parallel rank."""
        return {} if self.rank is None else {self.dialect.rank_header: str(self.rank)}

    @property
    def credentials(self) -> dict[str, str]:
        """The header with the engine's API key."""
        return bearer(self.key)

    @property
    def transfer(self) -> Transfer | None:
        """The transfer by which this replica passes KV caches on; None: it passes none on."""
        return TRANSFERS[self.moves_by] if self.moves_by else self.dialect.transfer

    @property
    def traits(self) -> Traits:
        """The settings that decide with which other replicas this one can exchange KV caches; unknown ones are None."""
        size = self.block_size
        if self.scrape and self.scrape.attention_block_size:
            size = self.scrape.block_size  # one GPU's share of a block: engines compare these
        told = Traits(self.version, self.root, kv_cache_dtype=self.cache_dtype, block_size=size, unable=self.unable)
        return told.known(self.declared)

    @property
    def meeting(self) -> Meeting | None:
        """Where another engine finds this one to fetch a KV cache that is still being computed.

        None unless this replica's transfer sends both legs at once (`MeetingTransfer`) and the engine's id is known.
        """
        transfer = self.transfer
        if not isinstance(transfer, MeetingTransfer):
            return None
        engine, port = self.engine_ids.get(self.rank or 0), self.bootstrap or transfer.meets_at
        return Meeting(self.address or self.host, port, engine) if engine else None

    @property
    def ids_url(self) -> str:
        """The URL that reports the ids by which other engines fetch KV caches from this engine.

        "" if the replica does not compute prompts for others, or if its transfer needs no ids.
        """
        transfer = self.transfer
        if not isinstance(transfer, MeetingTransfer) or self.role not in PREFILLERS:
            return ""
        return f"http://{bracketed(self.host)}:{self.bootstrap or transfer.meets_at}{transfer.ids_path}"

    @property
    def is_proven(self) -> bool:
        """Whether the engine's process that was probed last may still exist.

        It is False if the connection to that process that was kept open (`proof`) is closed, and True if none was kept.
        """
        return self.proof is None or not self.proof.is_closing()

    def serves(self, model: str | None) -> bool:
        """Return whether this replica serves a model or adapter; also True if the replica lists no names at all."""
        return not model or not self.models or model in self.models

    @property
    def ends(self) -> bool:
        """Whether the engine is shutting down, or has shut down: requests that break then are not at fault."""
        return self.state is State.LEAVING or self.left

    @property
    def rank_paths(self) -> tuple[str, ...] | None:
        """The paths at which a request can be sent to this data-parallel rank.

        None if the engine has one rank, which takes requests at all paths.
        """
        return None if self.rank is None else self.dialect.rank_paths

    def takes_rank(self, path: str) -> bool:
        """Return whether a request posted to `path` can be sent to this data-parallel rank.

        At other paths the engine chooses the rank. The result is True if the engine has one rank.
        """
        return self.rank is None or path in self.dialect.rank_paths

    @property
    def version_quirks(self) -> dict[str, Any]:
        """How this version of the engine prepares prompts differently from the newest version.

        The keys are fields of `gateway.prompt.quirks.VersionQuirks`.
        """
        return self.dialect.version_quirks(self.version)

    @property
    def engine(self) -> str:
        """The engine's id, "host:port": this replica's id without the number of its data-parallel rank."""
        return self.id if self.rank is None else self.id.removesuffix(f"-dp{self.rank}")

    @classmethod
    def at(cls, address: Address, **more: Any) -> Replica:
        """Return a new replica for the engine at `address`; `more`: values of further fields."""
        same = ("id", "url", "host", "port", "role", "spill", "bootstrap", "peer")
        own = {name: getattr(address, name) for name in same}
        return cls(**own, moves_by=address.transfer, required_model=address.model, **more)

    def at_rank(self, rank: int, now: float) -> Replica:
        """Return a new replica for one data-parallel rank of this engine."""
        new = Replica(f"{self.id}-dp{rank}", self.url, self.host, self.port, self.managed, rank, since=now)
        for name in ("dialect", "address", "tls", "key", "role", "spill", "moves_by", "bootstrap", "required_model"):
            setattr(new, name, getattr(self, name))
        host, _, port = self.peer.rpartition(":")
        new.peer = f"{host}:{int(port) + rank}" if self.peer else ""  # rank r listens on the first rank's port + r
        return new

    def become(self, incarnation: str) -> None:
        """Set the incarnation, the id of the engine's process.

        If it differs from the former one, forget what traffic and KV events showed about the former process.
        """
        if self.incarnation and incarnation != self.incarnation:
            self.cached_tokens, self.takes_ids = None, "not tried yet"
            self.stored_size, self.looks_ahead = None, 0
        self.incarnation = incarnation

    def store_as(self, size: int, ahead: int, parts: int) -> bool:
        """Set the size of blocks, as the engine's KV events show it; return whether the block format has changed.

        `size`: tokens in a block. If it is the engine's page size (of parts of blocks), the former size is kept.
        `ahead`: how many tokens after a block are hashed with it.
        `parts`: tokens in a Mamba block, if Mamba blocks are smaller than full-attention blocks, else 0. This is the
        block size then, if the engine finds hits that end within a full-attention block.
        """
        before = self.stored_size, self.looks_ahead
        size = parts if parts and self.finds_parts else size
        self.stored_size = (self.stored_size if size == self.page_size else size) or None
        self.looks_ahead = ahead
        return before != (self.stored_size, self.looks_ahead)

    def forget(self) -> None:
        """Forget the facts that the engine's process reported."""
        self.models, self.root, self.version, self.max_model_len = {}, None, None, None
        self.block_size = self.num_blocks = self.scrape = None
        self.engine_ids, self.cache_dtype, self.unable, self.takes_priority = {}, None, frozenset(), False
        self.problems = ()

    def scraped(self, scrape: Scrape) -> None:
        """Store the figures of the engine's /metrics, and note when they last changed."""
        if self.scrape is None or self.scrape.counters != scrape.counters or scrape.generated is None:
            self.moved_at = scrape.at
        self.scrape = scrape

    def follow(self, engine: Replica, events: EventSource | None) -> None:
        """Copy the facts of the whole engine to this replica, which is one of its data-parallel ranks.

        From the engine's metrics it gets the figures of its own rank. `engine`: the replica that stands for the whole
        engine. `events`: where this rank publishes KV events.
        """
        self.become(engine.incarnation)
        for name in SHARED:
            setattr(self, name, getattr(engine, name))
        if self.state is engine.state:
            self.reason = engine.reason
        self.events = events
        if engine.scrape and self.rank is not None and self.rank < len(engine.scrape.ranks):
            own = engine.scrape.ranks[self.rank]
            self.scraped(own)
            self.num_blocks = own.num_blocks or engine.num_blocks

    def apply(self, event: Event, reason: str, now: float) -> State | None:
        """Apply an event of the life cycle; return the former state if the state changed, else None.

        An event that leaves the state as it is may still change `reason`.
        """
        after = follows(self.state, event)
        if after is None:
            return None
        before, self.reason = self.state, reason
        if event in ENDINGS:
            self.forget()
        if event in (Event.LAUNCHED, Event.DOUBTED):
            self.fault = ""  # no probe was made since
        if after is before:
            return None
        self.left = after is State.FAILED and before is State.LEAVING
        self.state, self.since = after, now
        return before


MAX_URL = 2048


def bearer(key: str | None) -> dict[str, str]:
    """Return the header that carries an engine's API key; {} without one."""
    return {"authorization": f"Bearer {key}"} if key else {}


def parse_url(text: str) -> Address:
    """Return the parts of a replica's URL. Raises ValueError, whose message says what to write instead.

    `http[s]://host:port[#events=tcp://h:p,replay=tcp://h:p,topic=t,model=m,role=r,spill=yes,transfer=w,bootstrap=p]`;
    the fragment may also have `peer=h:p`. A bare `host:port` is accepted too, and so is a path `/v1`, which OpenAI base
    URLs have.
    """
    text = text.strip()
    hint = f"replica URL {text[:200]!r}: "
    if len(text) > MAX_URL:
        raise ValueError(hint + f"it has {len(text)} characters of {MAX_URL} at most; write http://HOST:PORT")
    if not text.isprintable() or " " in text:  # urlsplit would drop some of these and read another URL
        raise ValueError(hint + "there is a space or a control character in it, write http://HOST:PORT")
    bare, _, fragment = text.partition("#")
    try:
        (scheme, host, port), settings = _place(bare), _fragment(fragment)
    except ValueError as error:
        raise ValueError(hint + str(error)) from None
    name = f"{bracketed(host)}:{port}"
    return Address(name, f"{scheme}://{name}", host, port, **settings)


def url_of(address: Address) -> str:
    """Return the replica URL, with its fragment, that `parse_url` reads as this address."""
    source, model = address.source, address.model or ""
    said = {
        "events": source and source.endpoint,
        "replay": source and source.replay,
        "topic": source and source.topic,
        "model": "" if "," in model else model,
        "role": "" if address.role == BOTH else address.role,
        "spill": "yes" if address.spill else "",
        "transfer": address.transfer,
        "bootstrap": address.bootstrap,
        "peer": address.peer,
    }
    fragment = ",".join(f"{name}={value}" for name, value in said.items() if value)
    return f"{address.url}#{fragment}" if fragment else address.url


def _place(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port of a URL without its fragment. Raises ValueError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, DEFAULT_PORTS.get(parts.scheme) if parts.port is None else parts.port
    except ValueError as error:
        raise ValueError(f"{error}; write http://HOST:PORT") from None
    wrong = ""
    if parts.scheme not in DEFAULT_PORTS:
        wrong = f"scheme {parts.scheme!r} is not supported, write http://HOST:PORT or https://HOST:PORT"
    elif not host:
        wrong = "no host in it, write http://HOST:PORT"
    elif "@" in parts.netloc:
        wrong = "a user or password in it is sent to nobody, write http://HOST:PORT"
    elif parts.path.rstrip("/") not in ("", "/v1") or parts.query:
        wrong = "engines are expected at the root, write http://HOST:PORT alone"
    elif port == 0:
        wrong = "nothing listens on port 0, write http://HOST:PORT"
    elif "://" not in url and parts.port is None:  # more likely a misplaced word than a server on port 80
        wrong = f"there is no port in it, write http://{parts.netloc}:PORT, or http://{parts.netloc} for port 80"
    if wrong or not host or port is None:
        raise ValueError(wrong)
    check_host(host)
    return parts.scheme, one_spelling(host), port


KEYS = ("events", "replay", "topic", "model", "role", "spill", "transfer", "bootstrap", "peer")


def _check_peer(peer: str) -> None:
    host, _, port = peer.rpartition(":")
    if not host or not _is_port(port):
        raise ValueError(f"peer={peer[:100]} is not HOST:PORT of the engine's P2P side channel")
    check_host(host.strip("[]"))


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65_536


def _fragment(text: str) -> dict[str, Any]:
    """Return the fields of `Address` in the fragment of a replica's URL. Raises ValueError."""
    given: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in KEYS or not value:
            raise ValueError(f"{item[:100]!r} after # is none of {', '.join(f'{one}=' for one in KEYS)}")
        if key in given:
            raise ValueError(f"{key}= is given twice after #")
        given[key] = value
    for key, known in (("role", ROLES), ("spill", ("yes",)), ("transfer", TRANSFERS)):
        if key in given and given[key] not in known:
            raise ValueError(f"{key}={given[key][:100]} is none of {', '.join(known)}")
    for key in ("events", "replay"):
        try:
            check_endpoint(given.get(key, "tcp://h:1"))
        except ValueError as error:
            raise ValueError(f"{key}={error}") from None
    role, port = given.get("role", BOTH), given.get("bootstrap", "0")
    if "bootstrap" in given and not _is_port(port):
        raise ValueError(f"bootstrap={port[:100]} is no port")
    if "peer" in given:
        _check_peer(given["peer"])
    if "spill" in given and role != BOTH:
        raise ValueError(f"spill=yes and role={role} exclude each other: a slow pool takes whole requests")
    if "events" not in given and ("replay" in given or "topic" in given):
        raise ValueError("replay= and topic= need events=tcp://HOST:PORT beside them")
    source = EventSource(given["events"], given.get("replay"), given.get("topic", "")) if "events" in given else None
    texts: dict[str, Any] = {name: given[name] for name in ("model", "role", "transfer", "peer") if name in given}
    return {"source": source, "spill": "spill" in given, "bootstrap": int(port), **texts}

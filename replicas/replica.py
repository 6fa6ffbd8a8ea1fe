"""One replica as the rest of the house sees it: where it is, what it serves, how it is."""

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from replicas.addresses import check_endpoint, check_host, one_spelling
from replicas.engines import DEFAULT, TRANSFERS, EngineDialect, Transfer
from replicas.engines.transfer import Meeting, MeetingTransfer
from replicas.event_source import EventSource
from replicas.lifecycle import Event, State, follows
from replicas.metrics import Scrape
from replicas.names import bracketed
from replicas.pairing import Traits
from replicas.problems import Problem, unfit
from replicas.roles import BOTH, DECODE, PREFILL, PREFILLERS, ROLES


class Address(NamedTuple):
    """A replica's URL taken apart; what follows `port` comes from its fragment, if any."""

    id: str
    url: str
    host: str
    port: int
    source: EventSource | None
    model: str | None
    role: str = BOTH
    spill: bool = False
    transfer: str = ""  # one of `TRANSFERS`, or nothing
    bootstrap: int = 0  # the port at which engines that fetch a prompt's cache find it; 0: not given
    peer: str = ""  # HOST:PORT where its first rank passes its memory on


DEFAULT_PORTS = {"http": 80, "https": 443}
# What the ranks of one engine have in common.
SHARED = tuple(
    """
    dialect address proof models adapter_roots root block_size page_size num_blocks max_model_len version pid restarts problems engine_ids
    declared cache_dtype unable fault foreign context_parallel drops_block looks_to_end finds_parts takes_priority
    """.split()
)


# After these there is no process, or another one.
ENDINGS = (Event.GONE, Event.RESTARTED, Event.DOUBTED, Event.STOPPED, Event.LAUNCHED)


@dataclass(slots=True, eq=False)
class Replica:
    """Fields other than `state`, `reason` and `since` may be read at any time and are None (or
    empty) until the engine told them. Times are monotonic seconds."""

    id: str  # "host:port", and "-dp0", "-dp1" ... behind it if the engine has data-parallel ranks; the same for life
    url: str
    host: str
    port: int
    managed: bool = False  # launched by us
    rank: int | None = None  # which of the data-parallel ranks behind its URL; None: there is one
    dialect: EngineDialect = DEFAULT  # what kind of engine it is, as far as it has told
    role: str = BOTH  # which part of a request it is for (`replicas.roles`)
    spill: bool = False  # of a slow pool, which gets what nobody else can answer in time
    moves_by: str = ""  # how it passes caches on, one of `TRANSFERS`; "": as engines of its kind do
    bootstrap: int = 0  # the port at which engines that fetch a prompt's cache find it, as the operator wrote it
    engine_ids: dict[int, str] = field(default_factory=dict)  # by rank, as told there, where they are needed
    declared: Traits = field(default_factory=Traits)  # what it was launched with
    context_parallel: int = 1  # of how many GPUs' shares each block of its cache consists, by its launch profile
    launched_to_drop: bool | None = None  # `drops_block` by its launch profile; None: that does not say
    drops_block: bool = False  # it computes the last block of what it finds again, as `Told` says or its profile
    looks_to_end: bool = True  # as `Told` says
    finds_parts: bool = True  # as `Told` says
    takes_priority: bool = False  # as `Told` says
    cache_dtype: str | None = None
    unable: frozenset[str] = frozenset()  # ids of `TRANSFERS` for which it has no connector
    unlike: tuple[str, ...] = ()  # which counterparts it exchanges no caches with, and why, in words
    peer: str = ""  # HOST:PORT where others fetch from its memory, as it does from theirs; "": it takes no part
    state: State = State.STARTING
    reason: str = "not heard yet"
    fault: str = ""  # of the last look at its process, as an `Answer` calls it; empty if it answered, or none was taken
    foreign: bool = False  # what answered there last was no engine, so it serves no model until another one answers
    since: float = 0.0  # when the state began
    left: bool = False  # it was leaving when it went
    incarnation: str = ""  # changes when the process behind the port does, and with `address`
    # the one that `host` leads to for this incarnation: everybody connects there; "" until it is known
    address: str = ""
    tls: ssl.SSLContext | None = None  # for connections to it, where its URL is https
    key: str | None = field(default=None, repr=False)  # the API key that its engine asks for
    # A connection to the process that was looked at last: while it stands, that process is there. None: whether it is
    # cannot be told in this way.
    proof: asyncio.BaseTransport | None = None
    models: dict[str, str | None] = field(default_factory=dict)  # name -> base model of an adapter
    required_model: str | None = None  # the name that it has to list: the operator's word, or what it was launched with
    # name of an adapter -> the folder that it was loaded from
    adapter_roots: dict[str, str] = field(default_factory=dict)
    root: str | None = None  # the folder or hub name that the engine was started with, whatever it calls the model
    block_size: int | None = None
    # As its KV events tell, which count before all else: tokens of a block, and how many of those behind it are part of
    # its name. None until an event has told.
    stored_size: int | None = None
    looks_ahead: int = 0
    page_size: int | None = None  # tokens of the parts of a block that it finds; None: whole blocks
    num_blocks: int | None = None
    max_model_len: int | None = None
    version: str | None = None
    events: EventSource | None = None
    cached_tokens: bool | None = None  # usage reports cached tokens; learned from traffic
    tokenizer: str = "not compared yet"  # whether it is the gateway's
    takes_ids: str = "not tried yet"  # token ids in place of text, and why not; learned from traffic
    pid: int | None = None
    restarts: int = 0
    scrape: Scrape | None = None  # the last /metrics, see `scrape.at`
    moved_at: float = float("-inf")  # when a /metrics was read that had other counters than the one before
    problems: tuple[str, ...] = ()  # what could not be learned, each with its remedy

    def unfit(self, block_size: int | None) -> Problem | None:
        """What is wrong with the block size that the operator gave."""
        whole = self.stored_size or (self.scrape.attention_block_size if self.scrape else None)
        return unfit(block_size, self.block_size, whole, self.page_size, self.events is not None)

    @property
    def headers(self) -> dict[str, str]:
        """What a request needs for being computed here."""
        return {} if self.rank is None else {self.dialect.rank_header: str(self.rank)}

    @property
    def credentials(self) -> dict[str, str]:
        """What its engine asks for, as a header."""
        return bearer(self.key)

    @property
    def transfer(self) -> Transfer | None:
        """How it passes caches on; None: not at all."""
        return TRANSFERS[self.moves_by] if self.moves_by else self.dialect.transfer

    @property
    def traits(self) -> Traits:
        """What decides with which others it can exchange caches, as far as it is known."""
        told = Traits(
            version=self.version,
            model=self.root,
            kv_cache_dtype=self.cache_dtype,
            # transfers go by what one GPU has of a block
            block_size=self.scrape.block_size if self.scrape and self.scrape.attention_block_size else self.block_size,
            unable=self.unable,
        )
        return told.known(self.declared)

    @property
    def meeting(self) -> Meeting | None:
        """Where an engine finds it that fetches the cache of a prompt while that is computed; None: nobody knows, or
        caches are passed on in another way."""
        transfer = self.transfer
        if not isinstance(transfer, MeetingTransfer):
            return None
        engine, port = self.engine_ids.get(self.rank or 0), self.bootstrap or transfer.meets_at
        return Meeting(self.address or self.host, port, engine) if engine else None

    @property
    def ids_url(self) -> str:
        """What tells its engines' ids; "" where none are needed."""
        transfer = self.transfer
        if not isinstance(transfer, MeetingTransfer) or self.role not in PREFILLERS:
            return ""
        return f"http://{bracketed(self.host)}:{self.bootstrap or transfer.meets_at}{transfer.ids_path}"

    @property
    def is_proven(self) -> bool:
        """Whether nothing speaks against its being the process that was looked at."""
        return self.proof is None or not self.proof.is_closing()

    def serves(self, model: str | None) -> bool:
        """Whether it can answer for that model or adapter. One that has told no names is taken at its word."""
        return not model or not self.models or model in self.models

    @property
    def ends(self) -> bool:
        """Whether its engine was asked to stop: what breaks there is no sign of what it was sent."""
        return self.state is State.LEAVING or self.left

    @property
    def rank_paths(self) -> tuple[str, ...] | None:
        """Where it takes requests that are to be computed by this rank; None: everywhere."""
        return None if self.rank is None else self.dialect.rank_paths

    def takes_rank(self, path: str) -> bool:
        """Whether a request posted to `path` is computed here, if it is sent here."""
        return self.rank is None or path in self.dialect.rank_paths

    @property
    def version_quirks(self) -> dict[str, Any]:
        """In what its engine's version makes a prompt otherwise than the newest."""
        return self.dialect.version_quirks(self.version)

    @property
    def engine(self) -> str:
        """The id of the engine whose rank this is; its own if it is alone."""
        return self.id if self.rank is None else self.id.removesuffix(f"-dp{self.rank}")

    def at_rank(self, rank: int, now: float) -> "Replica":
        """A new replica for one rank of this engine."""
        return Replica(
            f"{self.id}-dp{rank}",
            self.url,
            self.host,
            self.port,
            self.managed,
            rank,
            self.dialect,
            since=now,
            address=self.address,
            tls=self.tls,
            key=self.key,
            role=self.role,
            spill=self.spill,
            moves_by=self.moves_by,
            bootstrap=self.bootstrap,
            peer=_of_rank(self.peer, rank),
            required_model=self.required_model,
        )

    def become(self, incarnation: str) -> None:
        """Be this incarnation from now on; of another one, what traffic showed of the last does not count."""
        if self.incarnation and incarnation != self.incarnation:
            self.cached_tokens, self.takes_ids = None, "not tried yet"
            self.stored_size, self.looks_ahead = None, 0
        self.incarnation = incarnation

    def store_as(self, size: int, ahead: int, parts: int) -> bool:
        """Take the block format from the engine's events, and return whether it has changed.

        `ahead`: tokens behind a block that its name covers; `parts`: tokens of the smaller blocks that hits may end at.
        A `size` that is only the engine's page size counts as unknown.
        """
        before = self.stored_size, self.looks_ahead
        size = parts if parts and self.finds_parts else size
        self.stored_size = (self.stored_size if size == self.page_size else size) or None
        self.looks_ahead = ahead
        return before != (self.stored_size, self.looks_ahead)

    def forget(self) -> None:
        """What the engine's process told of itself is of the past."""
        self.models, self.root, self.version, self.max_model_len = {}, None, None, None
        self.block_size = self.num_blocks = self.scrape = None
        self.engine_ids, self.cache_dtype, self.unable, self.takes_priority = {}, None, frozenset(), False
        self.problems = ()

    def scraped(self, scrape: Scrape) -> None:
        """Take what the engine's /metrics say now."""
        if self.scrape is None or self.scrape.counters != scrape.counters or scrape.generated is None:
            self.moved_at = scrape.at
        self.scrape = scrape

    def follow(self, engine: "Replica", events: EventSource | None) -> None:
        """Take over what is the whole engine's, and this rank's part of what is not."""
        self.become(engine.incarnation)
        for name in SHARED:
            setattr(self, name, getattr(engine, name))
        if self.state is engine.state:
            self.reason = engine.reason
        self.events = events
        ranks = engine.scrape.ranks if engine.scrape else ()
        if self.rank < len(ranks):
            self.scraped(ranks[self.rank])
            self.num_blocks = self.scrape.num_blocks or engine.num_blocks

    def apply(self, event: Event, reason: str, now: float) -> State | None:
        """Take `event`; returns the state before if the state changed, else None. The reason is
        kept up to date also where only it changes."""
        after = follows(self.state, event)
        if after is None:
            return None
        before, self.reason = self.state, reason
        if event in ENDINGS:
            self.forget()
        if event in (Event.LAUNCHED, Event.DOUBTED):
            self.fault = ""  # no look has been taken since
        if after is before:
            return None
        self.left = after is State.FAILED and before is State.LEAVING
        self.state, self.since = after, now
        return before


MAX_URL = 2048


def bearer(key: str | None) -> dict[str, str]:
    """The header that carries an engine's API key; none without one."""
    return {"authorization": f"Bearer {key}"} if key else {}


def parse_url(text: str) -> Address:
    """`http[s]://host:port[#events=tcp://h:p,replay=tcp://h:p,topic=t,model=m,role=r,spill=yes,transfer=w,bootstrap=p]`,
    or `peer=h:p`; `host:port` too, and with the `/v1` of an OpenAI base URL. Raises ValueError with what to write."""
    text = text.strip()
    hint = f"replica URL {text[:200]!r}: "
    if len(text) > MAX_URL:
        raise ValueError(hint + f"it has {len(text)} characters of {MAX_URL} at most; write http://HOST:PORT")
    if not text.isprintable() or " " in text:  # of which urlsplit leaves some out, and reads another URL
        raise ValueError(hint + "there is a space or a control character in it, write http://HOST:PORT")
    bare, _, fragment = text.partition("#")
    try:
        (scheme, host, port), told = _place(bare), _fragment(fragment)
    except ValueError as error:
        raise ValueError(hint + str(error)) from None
    name = f"{bracketed(host)}:{port}"
    return Address(name, f"{scheme}://{name}", host, port, *told)


def url_of(
    url: str,
    source: EventSource | None,
    model: str | None,
    role: str = BOTH,
    spill: bool = False,
    transfer: str = "",
    bootstrap: int = 0,
    peer: str = "",
) -> str:
    """The URL that `parse_url` reads these from."""
    said = []
    if source is not None:
        said = [
            f"events={source.endpoint}",
            *([f"replay={source.replay}"] if source.replay else []),
            *([f"topic={source.topic}"] if source.topic else []),
        ]
    if model and "," not in model:
        said.append(f"model={model}")
    if role != BOTH:
        said.append(f"role={role}")
    if spill:
        said.append("spill=yes")
    if transfer:
        said.append(f"transfer={transfer}")
    if bootstrap:
        said.append(f"bootstrap={bootstrap}")
    if peer:
        said.append(f"peer={peer}")
    return f"{url}#{','.join(said)}" if said else url


def _place(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of a URL without its fragment. Raises ValueError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, DEFAULT_PORTS.get(parts.scheme) if parts.port is None else parts.port
    except ValueError as error:
        raise ValueError(f"{error}; write http://HOST:PORT") from None
    if (word := url.partition("//")[0]) in DEFAULT_PORTS:
        raise ValueError(f"there is no colon behind {word!r}, write {word}://HOST:PORT")
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError(f"scheme {parts.scheme!r} is not supported, write http://HOST:PORT or https://HOST:PORT")
    if not host:
        raise ValueError("no host in it, write http://HOST:PORT")
    if "@" in parts.netloc:
        raise ValueError("a user or password in it is sent to nobody, write http://HOST:PORT")
    if parts.path.rstrip("/") not in ("", "/v1") or parts.query:
        raise ValueError("engines are expected at the root, write http://HOST:PORT alone")
    if port == 0:
        raise ValueError("nothing listens on port 0, write http://HOST:PORT")
    if "://" not in url and parts.port is None:  # a word out of place, more likely than a server on port 80
        raise ValueError(
            f"there is no port in it, write http://{parts.netloc}:PORT, or http://{parts.netloc} for port 80"
        )
    check_host(host)
    return parts.scheme, one_spelling(host), port


KEYS = ("events", "replay", "topic", "model", "role", "spill", "transfer", "bootstrap", "peer")


def _of_rank(peer: str, rank: int) -> str:
    """Each rank listens on a port of its own, in their order."""
    host, _, port = peer.rpartition(":")
    return f"{host}:{int(port) + rank}" if peer else ""


def _check_peer(peer: str) -> None:
    host, _, port = peer.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError(f"peer={peer[:100]} is not HOST:PORT of the engine's P2P side channel")
    check_host(host.strip("[]"))


def _fragment(text: str) -> tuple[EventSource | None, str | None, str, bool, str, int, str]:
    """What follows the # of a replica's URL. Raises ValueError."""
    given: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in KEYS or not value:
            raise ValueError(f"{item[:100]!r} after # is none of {', '.join(f'{one}=' for one in KEYS)}")
        if key in given:
            raise ValueError(f"{key}= is given twice after #")
        if key in ("events", "replay"):
            try:
                check_endpoint(value)
            except ValueError as error:
                raise ValueError(f"{key}={error}") from None
        if key == "role" and value not in ROLES:
            raise ValueError(f"role={value[:100]} is none of {PREFILL}, {DECODE}, {BOTH}")
        if key == "spill" and value != "yes":
            raise ValueError(f"spill={value[:100]} is not spill=yes; leave it out of replicas that are not slow")
        if key == "transfer" and value not in TRANSFERS:
            raise ValueError(f"transfer={value[:100]} is none of {', '.join(TRANSFERS)}")
        if key == "bootstrap" and not (value.isdecimal() and 0 < int(value[:6]) < 65_536):
            raise ValueError(f"bootstrap={value[:100]} is no port")
        if key == "peer":
            _check_peer(value)
        given[key] = value
    model, role, spill, transfer, bootstrap, peer = (
        given.get("model"),
        given.get("role", BOTH),
        "spill" in given,
        given.get("transfer", ""),
        int(given.get("bootstrap", 0)),
        given.get("peer", ""),
    )
    if spill and role != BOTH:
        raise ValueError(f"spill=yes and role={role} exclude each other: a slow pool takes whole requests")
    if "events" not in given:
        if "replay" in given or "topic" in given:
            raise ValueError("replay= and topic= need events=tcp://HOST:PORT beside them")
        return None, model, role, spill, transfer, bootstrap, peer
    source = EventSource(given["events"], given.get("replay"), given.get("topic", ""))
    return source, model, role, spill, transfer, bootstrap, peer

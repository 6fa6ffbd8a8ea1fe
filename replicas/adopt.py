"""Facts that a running engine reports about itself over HTTP.

Only a healthy /health and a model in /v1/models are required. The gateway works without any other fact;
`Facts.problems` says which are missing, and which engine flag would provide them.
"""

import asyncio
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeGuard
from urllib.parse import urlsplit

import aiohttp

from replicas.answer import Answer
from replicas.ask import get, read
from replicas.engines import DEFAULT, DIALECTS, recognize
from replicas.engines.dialect import EngineDialect, Told
from replicas.engines.transfer import MeetingTransfer
from replicas.event_source import EventSource
from replicas.metrics import MOST_RANKS, Scrape, missing, parse
from replicas.problems import NO_REPLAY, TIERS_UNKNOWN, Problem, unfit
from replicas.replica import Address, Replica

PATHS = ("/v1/models", "/version", "/metrics")  # read from every engine
NOTHING = Told()
# Limits on the number of models and adapters that one engine lists, and on the characters of their names together: the
# gateway goes through all names whenever replicas change.
MOST_NAMES, MOST_LETTERS = 10_000, 1 << 19
MOST_NAME = 1024  # characters of one name, and of the folder that it was loaded from
MOST_LENGTH = 1 << 31  # tokens of context
IS_GATEWAY = "a gateway of this kind answers there, which is no engine: name its engines instead"


@dataclass(slots=True)
class Facts:
    """The result of probing an engine.

    `alive`: /health answers 200.
    `serving`: /v1/models lists a model, too.
    `fault`: why a probe failed, "" if it did not: connect, timeout, closed (the connection broke), 5xx, own (an error
    of the gateway itself) or refused (what answers is not an engine). `error` describes the failure.
    """

    dialect: EngineDialect = DEFAULT
    alive: bool = False
    serving: bool = False
    fault: str = ""
    error: str = ""
    models: dict[str, str | None] = field(default_factory=dict)
    # adapter name -> the folder that it was loaded from
    adapter_roots: dict[str, str] = field(default_factory=dict)
    root: str | None = None  # where the engine loaded its model from: a folder, or a name on the hub
    max_model_len: int | None = None
    told: Told = NOTHING
    # where each data-parallel rank publishes KV events; None: the engine's report about this could not be read
    sources: dict[int, EventSource | None] | None = None
    scrape: Scrape | None = None
    locked: bool = False  # /v1/models requires an API key
    silent: set[str] = field(default_factory=set)  # the pages that could not be read: "version", "metrics"
    closes: bool = False  # the engine closes the connection after each answer
    large: bool = False  # one of its answers was so large that the engine should be probed less often
    turns_away: bool = False  # with a fault: the connection is refused, or /health answers 503
    # the connection of the /health request; None if it does not prove that the engine's process still exists
    over: asyncio.BaseTransport | None = None
    problems: dict[str, Problem] = field(default_factory=dict)  # by subject: models, metrics, events ...

    @property
    def engines(self) -> tuple[int, ...]:
        """The numbers by which the engine calls the data-parallel ranks behind the URL; () if it reports none."""
        told = self.scrape.engines if self.scrape else ()
        return max(told, tuple(sorted(self.sources or ())), key=len)

    def events(self, given: EventSource | None = None, ranks: int = 1) -> list[EventSource | None]:
        """Return where each data-parallel rank publishes KV events, None for a rank if this is unknown.

        `given`: the first rank's source, if the operator gave one. `ranks`: the number of ranks to assume if the engine
        reports none.
        """
        numbers = self.engines or range(ranks)
        if given:
            return [given.at_rank(rank) for rank in range(len(numbers))]
        sources = self.sources or {}
        if len(numbers) == 1:  # one rank of several that have URLs of their own keeps its number
            return [next(iter(sources.values()), None)]
        return [sources.get(number) for number in numbers]

    @property
    def version(self) -> str | None:
        return self.told.version

    @property
    def block_size(self) -> int | None:
        return self.block_of(1)

    def block_of(self, context_parallel: int) -> int | None:
        """Return how many tokens a KV cache block has, or None if unknown.

        `context_parallel`: how many GPUs share a block; used if the engine reports only one GPU's share of a block
        (vLLM before 0.32).
        """
        if self.told.block_size or self.scrape is None:
            return self.told.block_size
        whole, share = self.scrape.attention_block_size, self.scrape.block_size
        return whole or (share * context_parallel if share else None)

    def unfit(self, block_size: int | None, given: EventSource | None = None) -> Problem | None:
        """Return why the `block_size` (tokens) that the operator set does not fit this engine, or None if it fits.

        `given`: the KV event source that the operator gave, if any.
        """
        whole = self.told.block_size or (self.scrape.attention_block_size if self.scrape else None)
        return unfit(block_size, self.block_size, whole, self.told.page_size, any(self.events(given)))

    @property
    def num_blocks(self) -> int | None:
        return self.told.num_blocks or (self.scrape.num_blocks if self.scrape else None)

    def describe(self, replica: Replica) -> None:
        """Copy what the engine reports about itself into the fields of `replica`.

        Fields whose page (/version or /metrics) could not be read in this probe keep their former values.
        """
        replica.models, replica.adapter_roots = self.models, self.adapter_roots
        replica.root, replica.max_model_len = self.root, self.max_model_len
        knows_version = "version" not in self.silent
        if knows_version:
            replica.dialect, replica.version, replica.page_size = self.dialect, self.version, self.told.page_size
        if self.scrape:
            replica.cache_dtype = self.scrape.cache_dtype
            if knows_version:  # else a series that is missing proves nothing
                told, given = self.told, replica.launched_to_drop
                replica.unable, replica.looks_to_end = told.unable, told.looks_to_end
                replica.finds_parts, replica.takes_priority = told.finds_parts, told.takes_priority
                replica.drops_block = told.drops_block if given is None else given
        replica.block_size = self.block_of(replica.context_parallel) or replica.block_size
        replica.num_blocks = self.num_blocks or replica.num_blocks


async def health(session: aiohttp.ClientSession, url: str, deadline: float) -> Facts:
    """Read /health, and return facts that have a `fault` unless an engine answered with status 200.

    The answer of another gateway of this project is a fault, too. If the engine has no /health (404, 405), /v1/models
    is read in its place.
    """
    answer, needs_key = await get(session, f"{url}/health", deadline), False
    if answer.status in (404, 405) and not answer.gateway:
        answer = await get(session, f"{url}/v1/models", deadline)
        needs_key = answer.status in (401, 403)
    facts = Facts(fault=answer.fault, error=answer.error, turns_away=answer.turns_away)
    facts.closes, facts.over = answer.closes, answer.over
    if answer.gateway:
        facts.fault, facts.error = "refused", IS_GATEWAY
    elif answer.status >= 500:
        facts.fault, facts.turns_away = "5xx", answer.status == 503
        facts.error = f"/health answers {answer.status}: the engine is loading or dead; see its log"
    elif answer.status and answer.status != 200 and not needs_key:
        facts.fault = "refused"
        facts.error = f"/health answers {answer.status}: is this an OpenAI-compatible engine?"
    facts.alive = not facts.fault
    return facts


async def probe(
    url: str, session: aiohttp.ClientSession, deadline: float = 2.0, address: str = "", patience: float = 0.0
) -> Facts:
    """Read everything that the engine at `url` (without a trailing slash) reports. Never raises.

    `deadline`: seconds for each answer; `patience`: further seconds for /health. `address`: the IP address that
    `session` connects to, at which the engine's KV events are expected too; by default the URL's host.
    """
    facts = await health(session, url, deadline + patience)
    if facts.fault:
        return facts
    paths = list(dict.fromkeys((*PATHS, *(path for one in DIALECTS for path in one.paths))))
    answers = dict(zip(paths, await asyncio.gather(*(get(session, url + path, deadline) for path in paths))))
    facts.dialect = recognize(answers)
    facts.large = any(answer.large for answer in answers.values())
    facts.told = facts.dialect.told(answers)
    if any(not answers[path].status or answers[path].status >= 500 for path in ("/version", *facts.dialect.paths)):
        facts.silent.add("version")
    if any(answer.fault == "timeout" for answer in answers.values()):
        facts.over = None  # after a timeout the gateway closes a connection, maybe that of /health
    read_models(facts, answers["/v1/models"])
    facts.root = facts.told.root or facts.root
    page = answers["/metrics"]
    await read(page.body, _metrics, facts, page)
    sources, problems = facts.dialect.event_sources(answers, address or urlsplit(url).hostname or "")
    facts.problems |= problems
    too_many = max(len(sources or ()), facts.scrape.too_many if facts.scrape else 0)
    if too_many > MOST_RANKS:
        what = f"it tells of {too_many:,} data-parallel ranks, where an engine has {MOST_RANKS} at most"
        facts.problems["ranks"] = Problem(f"{what}: none of them is believed", "is this one engine?")
    facts.sources = {} if sources and len(sources) > MOST_RANKS else sources
    return facts


async def engine_ids(session: aiohttp.ClientSession, replica: Replica, deadline: float) -> Problem | None:
    """Read the ids by which other engines fetch KV caches from this engine, if its `Transfer` uses such ids.

    The ids are stored in `replica.engine_ids`. If they cannot be read, the known ones are kept and a problem is
    returned.
    """
    transfer, url = replica.transfer, replica.ids_url
    if not isinstance(transfer, MeetingTransfer) or not url:
        return None
    answer = await get(session, url, deadline)
    found = transfer.engine_ids(answer.json()) if answer.status == 200 else {}
    if found:
        replica.engine_ids = found
        return None
    why = answer.error or (f"answers {answer.status}" if answer.status != 200 else "names no engine")
    what = f"{url} cannot be read ({why}), so no prompt is computed there for another replica"
    return Problem(what, "give its port as #bootstrap=PORT behind the URL, and let the gateway reach it")


def read_models(facts: Facts, answer: Answer) -> None:
    """Set in `facts` the models and adapters that an answer of /v1/models lists.

    If the request failed, `facts` get a fault. If the answer is no list of models, they get a problem, and the engine
    counts as serving.
    """
    listed = answer.json().get("data")
    if answer.status == 0 or answer.status >= 500:
        facts.fault = answer.fault or "5xx"
        facts.error = answer.error or f"/health is fine but /v1/models answers {answer.status}"
    elif answer.status != 200 or not isinstance(listed, list):
        # Mocks and engines behind an API key: allow requests and judge the engine by their results.
        facts.serving, facts.locked = True, answer.status in (401, 403)
        what = "wants an API key: models and adapters are unknown" if facts.locked else "tells no model names"
        remedy = facts.dialect.remedies.models if facts.locked else "is this an OpenAI-compatible engine?"
        facts.problems["models"] = Problem(f"/v1/models {what}, any model name is sent there", remedy)
    else:
        _names(facts, listed)
        facts.serving = bool(facts.models)
        if not facts.serving:
            ids = f"only ids that are no text of at most {MOST_NAME:,} characters"
            facts.error = f"/health is fine but /v1/models lists {ids if listed else 'no model yet: still loading'}"


def _names(facts: Facts, listed: list[Any]) -> None:
    """Set in `facts` the names of models and adapters, their folders and the context length.

    `listed`: the entries of /v1/models.
    """
    letters = 0
    for entry in listed:
        if len(facts.models) >= MOST_NAMES or letters >= MOST_LETTERS:
            what = f"/v1/models lists more than {len(facts.models):,} names, or too long ones: the others are not known"
            facts.problems["models"] = Problem(what, "is this one engine, and not a catalogue of many?")
            return
        if not isinstance(entry, dict) or not _is_name(name := entry.get("id")):
            continue
        parent, root = entry.get("parent"), entry.get("root")
        parent = None if parent == "" else parent
        if parent is not None and not _is_name(parent):
            continue  # an adapter without a valid base model; counted as one, it would give the engine a wrong root
        root = root if _is_name(root) else None
        facts.models[name] = parent
        letters += len(name) + len(root or "")
        if parent is None:
            facts.root = facts.root or root or None
        elif root is not None:
            facts.adapter_roots[name] = root
        length = entry.get("max_model_len")
        if type(length) is int and 0 < length < MOST_LENGTH and facts.max_model_len is None:
            facts.max_model_len = length


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= MOST_NAME


def _metrics(facts: Facts, answer: Answer) -> None:
    names, remedies, what = facts.dialect.metrics, facts.dialect.remedies, ""
    remedy, unknown = remedies.figures, "block size, queue, data-parallel ranks and size"
    if facts.told.block_size:
        unknown = "queue and use"
    if answer.status != 200:
        if answer.status == 0 or answer.status >= 500:
            facts.silent.add("metrics")
        what = f"/metrics cannot be read ({answer.error or f'answers {answer.status}'})"
    else:
        scrape = facts.scrape = parse(answer.body, monotonic(), names)
        lacking = missing(answer.body, names)
        if facts.block_size is None and len(lacking) == len(missing(b"", names)):
            what = f"/metrics has no {names.prefix} series"
        elif facts.block_size is None:
            what = f"/metrics has no {names.cache_config.decode()} with a block_size"
            remedy = "set block_size in the gateway's config as the engine was started with"
            unknown = "block size and size"
        elif lacking or facts.num_blocks is None:
            lacking += [names.num_blocks.decode()] * (facts.num_blocks is None)
            facts.problems["metrics"] = Problem(f"/metrics lacks {', '.join(lacking)}: done without", remedies.names)
        if False in (scrape.prefix_caching, facts.told.prefix_caching):
            off = "prefix caching is off: nothing is ever found again, and no KV events come"
            facts.problems["caching"] = Problem(off, remedies.caching)
    if what:
        facts.problems["metrics"] = Problem(f"{what}: {unknown} of the cache are unknown", remedy)


def problems_of(facts: Facts, given: EventSource | None, sources: list[EventSource | None]) -> dict[str, Problem]:
    """Return the problems of an engine by subject, including those of its KV event sources.

    `given`: the source that the operator gave, if any. `sources`: for each data-parallel rank its source, None where
    unknown.
    """
    found = dict(facts.problems)
    if given:
        found.pop("events", None)
        found.pop("replay", None)
        if given.replay is None:
            found["replay"] = Problem(NO_REPLAY, facts.dialect.remedies.replay)
    if facts.scrape and facts.scrape.external_queries and not any(sources):
        found["tiers"] = Problem(TIERS_UNKNOWN, facts.dialect.remedies.events)
    silent = [str(rank) for rank, source in enumerate(sources) if source is None]
    if silent and len(silent) < len(sources):
        what = f"no KV events are known of data-parallel rank {', '.join(silent)}, its cache is guessed from traffic"
        found["ranks"] = Problem(what, facts.dialect.remedies.ranks)
    return found


def described(address: Address, facts: Facts) -> list[Replica]:
    """Return the replicas behind an address, one for each data-parallel rank, as described by one probe's `facts`."""
    sources = facts.events(address.source)
    lead = Replica.at(address, dialect=facts.dialect, scrape=facts.scrape, events=sources[0])
    facts.describe(lead)
    lead.problems = tuple(map(str, problems_of(facts, address.source, sources).values()))
    if len(sources) == 1:
        return [lead]
    ranks = [lead.at_rank(rank, 0.0) for rank in range(len(sources))]
    for replica, source in zip(ranks, sources):
        replica.follow(lead, source)
    return ranks

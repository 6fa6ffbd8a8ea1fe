"""What a running engine tells about itself over HTTP.

Nothing but a healthy /health and a model in /v1/models is required. Whatever else is missing is
named in `Facts.problems`, with the flag that would fix it, and the gateway goes on without it.
"""

import asyncio
import errno
import json
from dataclasses import dataclass, field
from time import monotonic
from types import SimpleNamespace
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

from replicas.addresses import check_endpoint
from replicas.deadline import within
from replicas.metrics import SERIES, Scrape, missing, parse
from replicas.names import bracketed
from replicas.replica import Address, EventSource, Replica


class Problem(NamedTuple):
    """Something that an engine does not tell or do, and what the operator can change about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


EVENTS_OFF = Problem(
    "KV events are off, the cache is guessed from traffic",
    'start vLLM with --kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq",'
    '"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}\'',
)
NO_CACHED_TOKENS = Problem(
    "answers do not say how many prompt tokens were cached, so predictions cannot be checked one by one",
    "start vLLM with --enable-prompt-tokens-details",
)
NO_REPLAY = Problem(
    "KV events cannot be replayed: the gateway starts cold, and forgets this replica's cache when an event is lost",
    'add "replay_endpoint":"tcp://*:PORT" to --kv-events-config, and replay=tcp://HOST:PORT if events= is given in the URL',
)


# Of these the engine is innocent.
OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL)


@dataclass(slots=True)
class Facts:
    """`alive`: /health is 200. `serving`: a model is listed as well. If not both, `fault` is the
    kind of failure (connect, timeout, closed, 5xx, refused; own: the gateway's own) and `error` says it in words."""

    alive: bool = False
    serving: bool = False
    fault: str = ""
    error: str = ""
    models: dict[str, str | None] = field(default_factory=dict)
    adapter_roots: dict[str, str] = field(default_factory=dict)  # name of an adapter -> the folder that it was loaded from
    root: str | None = None  # where the engine has its model from: a folder, or a name on the hub
    max_model_len: int | None = None
    version: str | None = None
    sources: dict[int, EventSource | None] | None = None  # by data-parallel rank; None: /kv_event_sources did not answer
    scrape: Scrape | None = None
    locked: bool = False  # its models are for those who have an API key
    silent: set[str] = field(default_factory=set)  # what could not be asked for: version, metrics
    closes: bool = False  # it closes the connection after each answer
    problems: dict[str, Problem] = field(default_factory=dict)  # by what is amiss: models, metrics, events ...

    @property
    def engines(self) -> tuple[int, ...]:
        """The data-parallel ranks behind the URL by the engine's own numbers; () where it tells none."""
        told = self.scrape.engines if self.scrape else ()
        return max(told, tuple(sorted(self.sources or ())), key=len)

    def events(self, given: EventSource | None = None, ranks: int = 1) -> list[EventSource | None]:
        """Where each rank publishes. `given`: where the first one does, as the operator knows; `ranks`: how many there
        are, for an engine that tells none."""
        numbers = self.engines or range(ranks)
        if given:
            return [given.at_rank(rank) for rank in range(len(numbers))]
        sources = self.sources or {}
        if len(numbers) == 1:  # one of several, each with a URL of its own, keeps its number
            return [next(iter(sources.values()), None)]
        return [sources.get(number) for number in numbers]

    @property
    def block_size(self) -> int | None:
        return self.scrape.block_size if self.scrape else None

    @property
    def num_blocks(self) -> int | None:
        return self.scrape.num_blocks if self.scrape else None


@dataclass(slots=True)
class Answer:
    """One GET. `status` 0 means no answer came; then `fault` and `error` say why. `fresh`: it took a new connection;
    `closes`: the server announced that it closes that connection after this answer."""

    status: int
    body: bytes = b""
    fault: str = ""
    error: str = ""
    fresh: bool = False
    closes: bool = False

    def json(self) -> dict:
        """The body as an object; {} when it is anything else."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


async def get(session: aiohttp.ClientSession, url: str, deadline: float) -> Answer:
    """GET with a deadline over connect, head and body, in seconds in which our own event loop ran. Never raises but on cancel."""
    where = urlsplit(url)
    try:
        return await within(deadline, _get(session, url))
    except TimeoutError:
        return Answer(0, fault="timeout", error=f"{where.path} did not answer within {deadline:g} s")
    except aiohttp.ClientConnectorDNSError:
        return Answer(0, fault="connect", error=unresolved(where.hostname or ""))
    except aiohttp.ClientConnectorCertificateError as error:
        what = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        return Answer(0, fault="connect", error=f"the certificate of {where.netloc} is not believed: {what}; "
                      "name the file of the authority that signed it with --replica-ca, or correct the host in the URL")  # fmt: skip
    except aiohttp.ClientSSLError as error:
        return Answer(0, fault="connect", error=f"no TLS with {where.netloc} ({error.os_error.strerror or error.os_error}): "
                      "if it speaks plain HTTP, write http:// in its URL")  # fmt: skip
    except aiohttp.ClientConnectorError as error:
        if error.os_error.errno in OWN_FAULTS:
            what = f"the gateway itself cannot open connections: {error.os_error.strerror}"
            return Answer(0, fault="own", error=f"{what}; raise its limits (`ulimit -n`)")
        refused = isinstance(error.os_error, ConnectionRefusedError)
        what = "nothing listens there" if refused else (error.os_error.strerror or str(error.os_error))
        return Answer(0, fault="connect", error=f"cannot connect to {where.netloc}: {what}")
    except (aiohttp.ClientError, OSError) as error:
        return Answer(0, fault="closed", error=f"{where.path}: the connection broke ({type(error).__name__})")


async def _get(session: aiohttp.ClientSession, url: str) -> Answer:
    opened: list[bool] = []
    async with session.get(url, timeout=aiohttp.ClientTimeout(), allow_redirects=False, trace_request_ctx=opened) as response:
        return Answer(response.status, await response.read(), fresh=bool(opened), closes=_closes(response))


def _closes(response: aiohttp.ClientResponse) -> bool:
    """By the rules of HTTP/1.1, and of HTTP/1.0, where a connection is kept only by agreement."""
    options = {one.strip().lower() for line in response.headers.getall("Connection", []) for one in line.split(",")}
    return "close" in options or (response.version == aiohttp.HttpVersion10 and "keep-alive" not in options)


def unresolved(host: str) -> str:
    return f"host name {host!r} does not resolve; check the replica's URL and DNS"


def connections_noted() -> aiohttp.TraceConfig:
    """For a session whose answers are to say whether they took a new connection. One that was kept has the same process at
    its other end; a new one may have another, unless the server closes each of them."""

    async def opened(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.append(True)

    config = aiohttp.TraceConfig()
    config.on_connection_create_end.append(opened)
    return config


async def health(session: aiohttp.ClientSession, url: str, deadline: float) -> Answer:
    """GET /health; an answer other than 200 gets a fault. Engines without /health (404, 405) are
    judged by /v1/models."""
    answer = await get(session, f"{url}/health", deadline)
    if answer.status in (404, 405):
        answer = await get(session, f"{url}/v1/models", deadline)
        if answer.status in (401, 403):
            return Answer(200, fresh=answer.fresh, closes=answer.closes)
    if answer.status >= 500:
        answer.fault = "5xx"
        answer.error = f"/health answers {answer.status}: the engine is loading or dead; see its log"
    elif answer.status and answer.status != 200:
        answer.fault = "refused"
        answer.error = f"/health answers {answer.status}: is this an OpenAI-compatible engine?"
    return answer


async def probe(url: str, session: aiohttp.ClientSession, deadline: float = 2.0, address: str = "") -> Facts:
    """Ask the engine at `url` (no trailing slash) for everything it tells. Never raises. `address`: where `session`
    reaches it, and so where its events are; by default the URL's host."""
    alive = await health(session, url, deadline)
    if alive.fault:
        return Facts(fault=alive.fault, error=alive.error)
    paths = ("/v1/models", "/version", "/metrics", "/kv_event_sources")
    models, version, metrics, events = await asyncio.gather(
        *(get(session, url + path, deadline) for path in paths)
    )
    facts = Facts(alive=True, closes=alive.closes)
    _models(facts, models)
    _version(facts, version)
    _metrics(facts, metrics)
    _events(facts, events, address or urlsplit(url).hostname or "")
    return facts


async def served_models(session: aiohttp.ClientSession, url: str, deadline: float) -> Facts:
    """What the engine tells of models and adapters, and nothing else."""
    facts = Facts()
    _models(facts, await get(session, f"{url}/v1/models", deadline))
    return facts


def _models(facts: Facts, answer: Answer) -> None:
    listed = answer.json().get("data")
    if answer.status == 200 and isinstance(listed, list):
        for entry in listed:
            if isinstance(entry, dict) and isinstance(entry.get("id"), str):
                parent = entry.get("parent")
                facts.models[entry["id"]] = parent if isinstance(parent, str) else None
                root = entry.get("root")
                if parent is None and facts.root is None and isinstance(root, str):
                    facts.root = root or None
                elif isinstance(parent, str) and isinstance(root, str):
                    facts.adapter_roots[entry["id"]] = root
                length = entry.get("max_model_len")
                if isinstance(length, int) and facts.max_model_len is None:
                    facts.max_model_len = length
        facts.serving = bool(facts.models)
        if not facts.serving:
            facts.error = "/health is fine but /v1/models lists no model yet: still loading"
    elif answer.status == 0 or answer.status >= 500:
        facts.fault = answer.fault or "5xx"
        facts.error = answer.error or f"/health is fine but /v1/models answers {answer.status}"
    else:
        # Mocks and engines behind an API key: let requests through and let traffic judge.
        facts.serving = True
        facts.locked = answer.status in (401, 403)
        if facts.locked:
            facts.problems["models"] = Problem(
                "/v1/models wants an API key: models and adapters are unknown, any model name is sent there",
                "start vLLM without --api-key (and VLLM_API_KEY) where only the gateway reaches it; clients' keys are passed on",
            )
        else:
            facts.problems["models"] = Problem(
                "/v1/models tells no model names, any model name is sent there", "is this an OpenAI-compatible engine?"
            )


def _version(facts: Facts, answer: Answer) -> None:
    if answer.status == 0 or answer.status >= 500:
        facts.silent.add("version")
    version = answer.json().get("version")
    facts.version = version if isinstance(version, str) else None


def _metrics(facts: Facts, answer: Answer) -> None:
    if answer.status != 200:
        if answer.status == 0 or answer.status >= 500:
            facts.silent.add("metrics")
        why = answer.error or f"answers {answer.status}"
        facts.problems["metrics"] = Problem(
            f"/metrics cannot be read ({why}): block size, cache size, queue and data-parallel ranks are unknown",
            "let the gateway reach /metrics, or set block_size in its config",
        )
        return
    scrape = facts.scrape = parse(answer.body, monotonic())
    gone = missing(answer.body)
    if scrape.block_size is None and len(gone) == len(SERIES):
        facts.problems["metrics"] = Problem(
            "/metrics has no vllm: series: block size, cache size, queue and data-parallel ranks are unknown",
            "start vLLM without --disable-log-stats, or set block_size in the gateway's config",
        )
    elif scrape.block_size is None:
        facts.problems["metrics"] = Problem(
            "/metrics has no vllm:cache_config_info with a block_size: block size and cache size are unknown",
            "set block_size in the gateway's config as the engine was started with",
        )
    elif gone or scrape.num_blocks is None:
        facts.problems["metrics"] = Problem(
            f"/metrics lacks {', '.join(gone + ['num_gpu_blocks'] * (scrape.num_blocks is None))}: done without",
            "a vLLM that names them differently needs a newer Hitherto",
        )
    if scrape.prefix_caching is False:
        facts.problems["caching"] = Problem(
            "prefix caching is off: nothing is ever found again, and no KV events come",
            "start vLLM without --no-enable-prefix-caching",
        )


def _events(facts: Facts, answer: Answer, host: str) -> None:
    if answer.status == 0 or answer.status >= 500:
        facts.problems["events"] = Problem(
            f"/kv_event_sources cannot be read ({answer.error or f'answers {answer.status}'})",
            "give the address as URL#events=tcp://HOST:PORT,replay=tcp://HOST:PORT",
        )
        return
    facts.sources = {}
    listed = answer.json() if answer.status == 200 else {}
    for rank, config in listed.items():
        if not (rank.isdigit() and isinstance(config, dict)):
            continue
        source, problem = _source(config, host)
        facts.sources[int(rank)] = source
        if problem:
            facts.problems["events"] = problem
        elif source.replay is None:
            facts.problems["replay"] = NO_REPLAY
    if facts.sources:
        return
    if answer.status != 200:
        facts.problems["events"] = Problem(
            f"/kv_event_sources answers {answer.status} (older vLLM has none), so no KV events are known and the cache is guessed",
            "if KV events are on, give their address as URL#events=tcp://HOST:PORT,replay=tcp://HOST:PORT; else start vLLM with --kv-events-config",
        )
    else:
        facts.problems["events"] = EVENTS_OFF


def problems_of(facts: Facts, given: EventSource | None, sources: list[EventSource | None]) -> dict[str, Problem]:
    """What is amiss, once it is known where events come from: `given` by the operator, in all `sources`, one a rank."""
    found = dict(facts.problems)
    if given:
        found.pop("events", None)
        found.pop("replay", None)
        if given.replay is None:
            found["replay"] = NO_REPLAY
    silent = [str(rank) for rank, source in enumerate(sources) if source is None]
    if silent and len(silent) < len(sources):
        found["ranks"] = Problem(
            f"no KV events are known of data-parallel rank {', '.join(silent)}, its cache is guessed from traffic",
            "publish over tcp://*:PORT, to which vLLM adds the rank, and let all ranks run one version",
        )
    return found


def described(address: Address, facts: Facts) -> list[Replica]:
    """The replicas that an engine counts as by its own account, for those who look once and do not watch it."""
    sources = facts.events(address.source)
    lead = Replica(
        address.id, address.url, address.host, address.port, models=facts.models, root=facts.root, version=facts.version, scrape=facts.scrape,
        block_size=facts.block_size, num_blocks=facts.num_blocks, max_model_len=facts.max_model_len, events=sources[0],
        problems=tuple(map(str, problems_of(facts, address.source, sources).values())),
    )  # fmt: skip
    if len(sources) == 1:
        return [lead]
    ranks = [lead.at_rank(rank, 0.0) for rank in range(len(sources))]
    for replica, source in zip(ranks, sources):
        replica.follow(lead, source)
    return ranks


def _source(config: dict, host: str) -> tuple[EventSource | None, Problem | None]:
    """One publisher's config -> where to connect to, or the problem with it."""
    endpoint = config.get("endpoint")
    if config.get("enable_kv_cache_events") is False or config.get("publisher") == "null":
        return None, EVENTS_OFF
    if not isinstance(endpoint, str):
        return None, Problem("/kv_event_sources names no endpoint", "give it as URL#events=tcp://HOST:PORT")
    if not _binds(endpoint):
        return None, Problem(
            f"KV events go to {endpoint}, which vLLM connects to rather than binds (no * in it), so nobody can subscribe",
            "write the endpoint in --kv-events-config as tcp://*:PORT",
        )
    replay, topic = config.get("replay_endpoint"), config.get("topic")
    source = EventSource(
        _reachable(endpoint, host),
        _reachable(replay, host) if isinstance(replay, str) else None,
        topic if isinstance(topic, str) else "",
    )
    try:
        check_endpoint(source.endpoint)
        if source.replay is not None:
            check_endpoint(source.replay)
    except ValueError as error:
        return None, Problem(f"/kv_event_sources names an endpoint that cannot be connected to: {error}", "give it as URL#events=tcp://HOST:PORT,replay=tcp://HOST:PORT")
    return source, None


def _binds(endpoint: str) -> bool:
    """vLLM's own rule for bind or connect, as observed with 0.32."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _reachable(endpoint: str, host: str) -> str:
    """`tcp://*:5557` as the engine binds it -> as we connect to it."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return endpoint
    bound, _, port = rest.rpartition(":")
    if bound not in ("*", "0.0.0.0", "::", "[::]"):
        return endpoint
    return f"tcp://{bracketed(host)}:{port}"

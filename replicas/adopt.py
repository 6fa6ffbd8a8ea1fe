"""What a running engine tells about itself over HTTP.

Nothing but a healthy /health and a model in /v1/models is required. Whatever else is missing is
named in `Facts.problems`, with the flag that would fix it, and the gateway goes on without it.
"""

import asyncio
import errno
import json
from dataclasses import dataclass, field
from time import monotonic
from urllib.parse import urlsplit

import aiohttp

from replicas.metrics import Scrape, parse
from replicas.replica import EventSource

EVENTS_OFF = (
    "KV events are off, the cache is guessed from traffic: start vLLM with "
    '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq",'
    '"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}\''
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
    max_model_len: int | None = None
    version: str | None = None
    sources: dict[int, EventSource] = field(default_factory=dict)  # by data-parallel rank
    scrape: Scrape | None = None
    problems: dict[str, str] = field(default_factory=dict)  # by what is missing: models, metrics, events

    @property
    def block_size(self) -> int | None:
        return self.scrape.block_size if self.scrape else None

    @property
    def num_blocks(self) -> int | None:
        return self.scrape.num_blocks if self.scrape else None


@dataclass(slots=True)
class Answer:
    """One GET. `status` 0 means no answer came; then `fault` and `error` say why."""

    status: int
    body: bytes = b""
    fault: str = ""
    error: str = ""

    def json(self) -> dict:
        """The body as an object; {} when it is anything else."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


async def get(session: aiohttp.ClientSession, url: str, deadline: float) -> Answer:
    """GET with a deadline in seconds over connect, head and body. Never raises but on cancel."""
    where = urlsplit(url)
    try:
        timeout = aiohttp.ClientTimeout(total=deadline)
        async with session.get(url, timeout=timeout, allow_redirects=False) as response:
            return Answer(response.status, await response.read())
    except TimeoutError:
        return Answer(0, fault="timeout", error=f"{where.path} did not answer within {deadline:g} s")
    except aiohttp.ClientConnectorDNSError:
        return Answer(0, fault="connect", error=f"host name {where.hostname!r} does not resolve; check the replica's URL and DNS")
    except aiohttp.ClientConnectorError as error:
        if error.os_error.errno in OWN_FAULTS:
            what = f"the gateway itself cannot open connections: {error.os_error.strerror}"
            return Answer(0, fault="own", error=f"{what}; raise its limits (`ulimit -n`)")
        refused = isinstance(error.os_error, ConnectionRefusedError)
        what = "nothing listens there" if refused else (error.os_error.strerror or str(error.os_error))
        return Answer(0, fault="connect", error=f"cannot connect to {where.netloc}: {what}")
    except (aiohttp.ClientError, OSError) as error:
        return Answer(0, fault="closed", error=f"{where.path}: the connection broke ({type(error).__name__})")


async def health(session: aiohttp.ClientSession, url: str, deadline: float) -> Answer:
    """GET /health; an answer other than 200 gets a fault. Engines without /health (404, 405) are
    judged by /v1/models."""
    answer = await get(session, f"{url}/health", deadline)
    if answer.status in (404, 405):
        answer = await get(session, f"{url}/v1/models", deadline)
        if answer.status in (401, 403):
            return Answer(200)
    if answer.status >= 500:
        answer.fault = "5xx"
        answer.error = f"/health answers {answer.status}: the engine is loading or dead; see its log"
    elif answer.status and answer.status != 200:
        answer.fault = "refused"
        answer.error = f"/health answers {answer.status}: is this an OpenAI-compatible engine?"
    return answer


async def probe(url: str, session: aiohttp.ClientSession, deadline: float = 2.0) -> Facts:
    """Ask the engine at `url` (no trailing slash) for everything it tells. Never raises."""
    alive = await health(session, url, deadline)
    if alive.fault:
        return Facts(fault=alive.fault, error=alive.error)
    paths = ("/v1/models", "/version", "/metrics", "/kv_event_sources")
    models, version, metrics, events = await asyncio.gather(
        *(get(session, url + path, deadline) for path in paths)
    )
    facts = Facts(alive=True)
    _models(facts, models)
    _version(facts, version)
    _metrics(facts, metrics)
    _events(facts, events, urlsplit(url).hostname or "")
    return facts


def _models(facts: Facts, answer: Answer) -> None:
    listed = answer.json().get("data")
    if answer.status == 200 and isinstance(listed, list):
        for entry in listed:
            if isinstance(entry, dict) and isinstance(entry.get("id"), str):
                parent = entry.get("parent")
                facts.models[entry["id"]] = parent if isinstance(parent, str) else None
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
        key = " (it wants an API key)" if answer.status in (401, 403) else ""
        facts.problems["models"] = f"/v1/models tells no model names{key}: any model name is sent there"


def _version(facts: Facts, answer: Answer) -> None:
    version = answer.json().get("version")
    facts.version = version if isinstance(version, str) else None


def _metrics(facts: Facts, answer: Answer) -> None:
    if answer.status == 200:
        facts.scrape = parse(answer.body, monotonic())
    if facts.scrape is None or facts.scrape.block_size is None:
        facts.problems["metrics"] = (
            "/metrics has no vllm:cache_config_info: block size and cache size are unknown, set "
            "block_size in the gateway's config (vLLM: do not start it with --disable-log-stats)"
        )


def _events(facts: Facts, answer: Answer, host: str) -> None:
    listed = answer.json() if answer.status == 200 else {}
    for rank, config in listed.items():
        if not (rank.isdigit() and isinstance(config, dict)):
            continue
        source, problem = _source(config, host)
        if source:
            facts.sources[int(rank)] = source
        else:
            facts.problems["events"] = problem
    if len(facts.sources) > 1:
        facts.problems["ranks"] = f"{len(facts.sources)} data-parallel ranks behind one URL: only rank 0's events are read"
    if facts.sources or "events" in facts.problems:
        return
    if answer.status == 404:
        facts.problems["events"] = (
            "/kv_event_sources is not there (older vLLM): if KV events are on, give their address "
            "as URL#events=tcp://HOST:PORT,replay=tcp://HOST:PORT"
        )
    else:
        facts.problems["events"] = EVENTS_OFF


def _source(config: dict, host: str) -> tuple[EventSource | None, str]:
    """One publisher's config -> where to connect to, or the problem with it."""
    endpoint = config.get("endpoint")
    if config.get("enable_kv_cache_events") is False or config.get("publisher") == "null":
        return None, EVENTS_OFF
    if not isinstance(endpoint, str):
        return None, "/kv_event_sources names no endpoint; give it as URL#events=tcp://HOST:PORT"
    if not _binds(endpoint):
        return None, (
            f"KV events go to {endpoint}, which vLLM connects to rather than binds (no * in it), so "
            "nobody can subscribe: write the endpoint as tcp://*:PORT"
        )
    replay = config.get("replay_endpoint")
    topic = config.get("topic")
    return EventSource(
        _reachable(endpoint, host),
        _reachable(replay, host) if isinstance(replay, str) else None,
        topic if isinstance(topic, str) else "",
    ), ""


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
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

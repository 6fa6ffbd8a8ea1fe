"""`hitherto explain`: what would happen to one request, in numbers.

A running gateway answers `POST /explain` with what `reasons.describe` says of the decision, from its real map, load and
learned costs. Without a gateway the command does the same by itself
from the configuration: it asks the replicas what they are, reads their KV events from the start
where they can be replayed, and chooses with costs that have not been learned yet. Nothing is sent to an
engine for an answer, and nothing is reserved.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import socket
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway import files
from gateway.errors import ApiError
from gateway.http.server import allow_many_connections
from gateway.model import model_dir
from gateway.prompt import Prompt
from gateway.settings import (
    ADMIN_SIDE,
    Config,
    ConfigError,
    Settings,
    admin_headers,
    admin_url,
    known_urls,
    read_engine_key,
)
from policies import Candidate, CostGroup, Ledger, Load, Pairing, Router, Targets, make, two_legs
from replicas.engines.transfer import PATHS
from replicas.pairing import complaints, groups, sides_of
from replicas.roles import BOTH, PREFILL
from replicas.served import base_names

from .explain_text import show
from .gateway_check import ADMIN_SECONDS, COMPARED, do_not_count, not_in_force
from .reasons import describe, explained, legs_told

if TYPE_CHECKING:
    from gateway.prompt.pipeline import Pipeline
    from replicas import Replica

HANGS = "Something listens there and does not answer: if it is the gateway, it hangs; `hitherto doctor` says what to do"
NO_URL = "it is no URL: write http://HOST:PORT"
AS_CLIENTS_SEND = 'Give a body as a client would send it: {"messages": [{"role": "user", "content": "..."}]}'
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a company's proxy
REPLAY_SECONDS = 3.0  # how long to read a replica's events before choosing without the rest


# --- the command


class Unanswered(Exception):
    """No gateway's admin side answers there. `hangs`: something takes connections there, and does not answer."""

    def __init__(self, reason: str, hangs: bool = False) -> None:
        super().__init__(reason)
        self.hangs = hangs

    def remedy(self, otherwise: str) -> str:
        return HANGS if self.hangs else otherwise


def run(args: argparse.Namespace, config: Config) -> int:
    body = _read_body(args.body)
    try:
        told = _somehow(args.admin, args.path, body, config)
    except ApiError as wrong:
        print(f"hitherto: this request would be answered with {wrong.status}: {wrong.message}", file=sys.stderr)
        if wrong.status == 400 and not _is_json(body):
            given = "standard input" if args.body == "-" else args.body
            print(f"{given} has no JSON. {AS_CLIENTS_SEND}", file=sys.stderr)
        return 1
    for why in config.unusable.values():
        print(f"not needed for this answer, but no gateway starts with it: {why}", file=sys.stderr)
    print(json.dumps(told, indent=2) if args.json else show(told))
    return 0


def _somehow(admin: str | None, path: str, body: bytes, config: Config) -> dict[str, Any]:
    """The running gateway's answer, or one that is worked out here. Raises ConfigError and ApiError."""
    settings = config.settings
    if admin and not is_url(admin):
        raise ConfigError(f"--admin {admin}: {NO_URL}")
    url = (admin or admin_url(settings)).rstrip("/")
    try:
        told = ask(url, path, body, admin_headers(settings))
        if given := _not_in_force(url, config):
            print(f"the running gateway answers, {do_not_count(given)}\n", file=sys.stderr)
        return told
    except ConfigError as refused:
        if (why := config.unusable.get("admin_token")) is None:
            raise
        raise ConfigError(f"{refused}\n{why}") from None
    except Unanswered as reason:
        if admin:
            remedy = reason.remedy("Give the admin side's URL of a running gateway")
            raise ConfigError(f"--admin {admin}: {reason}. {remedy}") from None
        if config.left_out:
            raise ConfigError("\n".join(config.left_out.values())) from None
        if not known_urls(settings):
            remedy = reason.remedy("Start one, name its admin side with --admin URL, or give --replica-url so that this "
                                   "can be worked out without a gateway")  # fmt: skip
            raise ConfigError(f"no gateway answers at {url} ({reason}). {remedy}") from None
        print(f"no gateway answers at {url} ({reason}): worked out from the configuration, with costs not learned yet\n",
              file=sys.stderr)  # fmt: skip
    allow_many_connections()  # all engines are asked at once
    return asyncio.run(alone(settings, path, body))


def _not_in_force(admin: str, config: Config) -> list[str]:
    """What was given here and the running gateway, which answers, has otherwise. Most settings its status does not
    tell, and they may well be the same: whoever follows the documentation gives all commands the same flags."""
    if any(config.sources[name] != "default" for name in COMPARED):
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            request = urllib.request.Request(f"{admin}/status", headers=admin_headers(config.settings))
            with _DIRECT.open(request, timeout=ADMIN_SECONDS) as response:
                return not_in_force(config, json.loads(response.read()))
    return []


def is_url(text: str) -> bool:
    """Whether it names a server as urllib reads it. What else is wrong with a host shows once it is asked."""
    try:
        parts = urllib.parse.urlsplit(text)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname and parts.port != 0) and "@" not in parts.netloc
        )
    except ValueError:
        return False


def _read_body(name: str) -> bytes:
    try:
        return files.read_to_end(sys.stdin.buffer) if name == "-" else files.read(Path(name))
    except OSError as error:
        raise ConfigError(
            f"{name}: cannot read the request's body: {error.strerror}. Give a JSON file as a client would send it, or - for standard input"
        ) from None


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def ask(admin: str, path: str, body: bytes, headers: Mapping[str, str] = {}, seconds: float = 30.0) -> dict[str, Any]:
    """The running gateway's answer. Raises Unanswered, and ApiError where it refuses the request."""
    url = f"{admin}/explain?{urllib.parse.urlencode({'path': path}, errors='surrogateescape')}"
    answer = call(admin, "POST", url, body, headers, seconds)
    try:
        told = json.loads(answer)
    except ValueError:
        told = None
    if not isinstance(told, dict) or "replicas" not in told:
        raise Unanswered("something else answers there")
    return told


def call(admin: str, method: str, url: str, body: bytes | None, headers: Mapping[str, str], seconds: float) -> bytes:
    """What an admin side answers. Raises Unanswered, ConfigError, and ApiError where it refuses."""
    try:
        typed = {} if body is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(url, data=body, headers={**typed, **headers}, method=method)
        with _DIRECT.open(request, timeout=seconds) as response:
            answer: bytes = response.read()
            if ADMIN_SIDE not in response.headers:
                raise Unanswered("something else answers there")
            return answer
    except urllib.error.HTTPError as refused:
        raise _refusal(refused, admin) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        hangs = isinstance(error, TimeoutError)  # of a connection that is not taken urllib makes an error of its own
        raise Unanswered(_in_words(getattr(error, "reason", error), admin, seconds), hangs) from None


def _in_words(reason: object, admin: str, seconds: float) -> str:
    """Why nobody answers, as far as it is known."""
    match reason:
        case socket.gaierror():
            return f"host name {urllib.parse.urlsplit(admin).hostname!r} does not resolve"
        case ConnectionRefusedError():
            return "nothing listens there"
        case TimeoutError():
            return f"it does not answer within {seconds:g} s"
        case http.client.IncompleteRead():
            return "its answer breaks off"
        case http.client.RemoteDisconnected():
            return "it closes the connection without an answer"
        case ValueError() | http.client.InvalidURL():
            return NO_URL
        case http.client.HTTPException():
            return "something else answers there"
    return getattr(reason, "strerror", None) or str(reason)


def _refusal(refused: urllib.error.HTTPError, admin: str) -> Exception:
    """An error is a verdict where a gateway's admin side gave it. Engines and the clients' side of a gateway answer in
    the same shape."""
    if ADMIN_SIDE not in refused.headers:
        return Unanswered(f"what answers there, with status {refused.code}, is no gateway's admin side")
    try:
        error = json.loads(refused.read())["error"]
        if refused.code in (401, 403):
            return ConfigError(f"the admin side at {admin} refuses: {error['message']}")
        return ApiError(refused.code, error["message"], error["type"], error["param"], error["code"])
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return Unanswered(f"its answer, with status {refused.code}, cannot be read")


async def alone(settings: Settings, path: str, body: bytes) -> dict[str, Any]:
    """Work out the decision without a gateway. Raises ConfigError and ApiError."""
    from gateway.proxy.placing import demand_of

    up, away = await _serving(settings)
    prompt, up, pipeline = _prepared(settings, path, body, up, away)
    router = await _router(settings, up, pipeline)
    targets = Targets([router.candidates[one.id] for one in _taking(up)])
    evaluation = router.evaluate(demand_of(prompt), targets, 0.0, explain=True)
    told = describe(router.policy, prompt, evaluation, router.outputs)
    if any(one.role != BOTH for one in up):
        pairings = _pairings(up, router.candidates, prompt.path)
        told["legs"] = legs_told(two_legs.choose_among(router, two_legs.ways(router, evaluation, pairings, 0.0)))
    return explained(told)


def _taking(up: list[Replica]) -> list[Replica]:
    """Who may get a request as a whole."""
    return [one for one in up if one.role != PREFILL] or up


def _pairings(up: list[Replica], candidates: Mapping[str, Candidate], path: str) -> list[Pairing]:
    """Who may compute its prompt and who may write its answer, of each way in which caches are passed on."""
    ways = dict.fromkeys(one.transfer for one in up if one.transfer is not None and path in PATHS)
    found = []
    for way in ways:
        computing, writing = sides_of(way, [one for one in up if one.transfer is way], lambda one: one)
        for complaint in complaints(computing, writing, way):
            print(f"not paired: {complaint.text}", file=sys.stderr)
        for group in groups(computing, writing, way):
            found.append(([candidates[one.id] for one in group[0]], [candidates[one.id] for one in group[1]]))
    return found


async def _serving(settings: Settings) -> tuple[list[Replica], list[str]]:
    """The replicas that answer, and in words those that do not. Raises ConfigError where none answers."""
    from replicas.access import PROBE_SECONDS, Access
    from replicas.adopt import described
    from replicas.replica import bearer, parse_url
    from replicas.tls import context_for

    addresses = [parse_url(url) for url in known_urls(settings)]
    key = bearer(read_engine_key(settings))
    ways = [Access(one.url, one.host, context_for(one.url, settings.replica_ca), one.source, key) for one in addresses]
    facts = await asyncio.gather(*(way.find(PROBE_SECONDS) for way in ways))
    await asyncio.gather(*(way.close() for way in ways))
    away = []
    for one, fact in zip(addresses, facts, strict=True):
        if not fact.serving:
            print(f"left out: {one.id}: {fact.error}", file=sys.stderr)
            if fact.fault != "refused":  # what is no engine serves nothing
                away.append(f"{one.id}: {fact.error}")
    found = zip(addresses, ways, facts, strict=True)
    up = [
        one
        for address, way, fact in found
        if fact.serving
        for one in described(address._replace(source=way.events), fact)
    ]
    if not up:
        raise ConfigError("no replica answers, so there is nothing to choose from. Start one, or correct --replica-url")
    return up, away


def _prepared(
    settings: Settings, path: str, body: bytes, up: list[Replica], away: Sequence[str] = ()
) -> tuple[Prompt, list[Replica], Pipeline]:
    """The request, the replicas that serve its model, and what made its tokens. `away`: replicas that do not answer, in
    words."""
    from gateway.prompt.api.named import named_model
    from gateway.prompt.pipeline import Pipeline
    from gateway.prompt.prompt import PROMPT_PATHS, unread
    from gateway.proxy.known_models import unknown_model_error
    from gateway.proxy.paths import AllowedPaths, refusal
    from gateway.tenants.handover import read_unprepared, refusal_of_object

    if path not in AllowedPaths(settings.allow_path):
        raise ApiError(404, refusal(path, False), code="path_not_allowed")
    from_tenant = settings.api_keys is not None
    # Of several models, only the one that is asked for.
    asked = named_model("application/json", body)
    models_differ = bool(away) or len({frozenset(one.models) for one in up}) > 1
    if any(asked in one.models for one in up):
        up = _that_serve(asked, up)
    served = settings.served_model_name or next((name for one in up for name in base_names(one.models)), None)
    size = settings.block_size or next((one.block_size for one in up if one.block_size), 16)
    adapters = {name for one in up for name, parent in one.models.items() if parent}
    known_as = (settings.model,) if settings.model else (*(one.root for one in up), served)
    pipeline = Pipeline(model_dir(*known_as), served or "model", size, chat_template=settings.chat_template)
    pipeline.max_model_len = max((one.max_model_len or 0 for one in up), default=0) or None
    pipeline.follow(next((one.version_quirks for one in up if one.version), {}))
    if path in PROMPT_PATHS:
        prompt = pipeline.prepare(path, body, {}, adapters, refusal_of_object if from_tenant else None)
    else:
        if from_tenant and (error := read_unprepared("application/json", body)[1]) is not None:
            raise error
        prompt = unread(path, asked if models_differ else None)
    serving = _that_serve(prompt.model, up)
    if not serving:
        raise unknown_model_error(prompt.model or "", {name for one in up for name in one.models}, away)
    return prompt, serving, pipeline


def _that_serve(model: str | None, up: list[Replica]) -> list[Replica]:
    for one in up:
        if not one.serves(model):
            print(f"left out: {one.id}: serves {', '.join(one.models)}, not {model}", file=sys.stderr)
    return [one for one in up if one.serves(model)]


async def _router(settings: Settings, up: list[Replica], pipeline: Pipeline) -> Router:
    """One that knows what the replicas hold, as far as their events can be had, and how busy they are."""
    from cachemap import CacheMap

    cachemap = CacheMap(settings.cache_budget)
    slots = [cachemap.attach(one.id, one.num_blocks, one.events is not None) for one in up]
    await asyncio.gather(*(
        _replay(cachemap, slot, one, pipeline.served_name, pipeline.block_size)
        for slot, one in zip(slots, up, strict=True)
        if one.events and one.events.replay
    ))  # fmt: skip
    router = Router(make(settings.policy), cachemap, Ledger(), CostGroup())
    for slot, one in zip(slots, up, strict=True):
        router.add(one.id, slot).load = _load(one)
    return router


def _load(replica: Any) -> Load:
    scrape = replica.scrape
    running, waiting = (scrape.running or 0, scrape.waiting or 0) if scrape else (0, 0)
    return Load(requests=running + waiting, decoding=running, waiting=scrape.waiting if scrape else None)


async def _replay(cachemap: Any, slot: int, replica: Any, served: str, size: int) -> None:
    """Fill the replica's part of the map from its event history, as far as it comes in time."""
    from cachemap import EventIntake
    from cachemap.events import records

    source, decode = replica.events, replica.dialect.event_decoder(records)
    live = asyncio.Event()
    intake = EventIntake(
        cachemap, slot, endpoint=source.endpoint, replay=source.replay, topic="", decode=decode, model=served, block_size=size,
        on_change=lambda state, reason: live.set() if state != "connecting" else None,
    )  # fmt: skip
    task = asyncio.create_task(intake.run())
    try:
        async with asyncio.timeout(REPLAY_SECONDS):
            await live.wait()
    except TimeoutError:
        print(f"the KV events at {source.replay} did not come within {REPLAY_SECONDS:g} s", file=sys.stderr)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""Functions that make, from the settings, the parts that requests pass through: proxy, limits, shared state, logs."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

from policies import CostGroup, Ledger, Router, make

from .errors import ApiError
from .http.messages import Limits
from .http.origins import Origins
from .ops import log as lines
from .ops.metrics import Metrics
from .prompt.pipeline import SWITCH_SECONDS, Pipeline
from .proxy.exchange import Exchange
from .proxy.failures.blame import PASSED_ON
from .proxy.failures.retries import SHUT_DOWN
from .proxy.proxy import Proxy
from .proxy.responses.usage import Usage
from .proxy.settling import OnEnd
from .settings import ConfigError, Settings
from .tenants.ending import Settled
from .tenants.keys import Keys
from .tenants.limits import TOLD
from .tenants.metering import Metering
from .tenants.usage_log import UsageLog
from .tls import Certificate, CertificateError

if TYPE_CHECKING:
    from cachemap import CacheMap
    from cachemap.background import Background
    from cachemap.cluster import SharedMap
    from replicas import Fleet
    from replicas.discovery import Discovery

    from .ops.spans import Spans
    from .proxy.placement.shared import SharedLedger

log = logging.getLogger("hitherto")

# The default limit of a body, in bytes, if the operator sets none. BYTES_PER_TOKEN is for models that take text alone:
# text has 4 to 5 bytes a token, and 12 with every character escaped. LEAST_BODY leaves room for lists of prompts, which
# together may exceed the model's context. MOST_BODY is for models that take images or sound, which have any size.
BYTES_PER_TOKEN, LEAST_BODY, MOST_BODY = 32, 16 * 2**20, 64 * 2**20


def proxy(
    settings: Settings, spans: Spans | None, *, cachemap: CacheMap, ledger: Ledger, costs: CostGroup, **rooms: Any
) -> Proxy:
    """Make the proxy, which handles clients' requests.

    `spans`: where traces are collected, or None without tracing. `rooms`: other parts of the proxy that the caller has
    made, by the name of `Proxy`'s parameter.
    """
    if spans is not None:
        from .proxy.observers.traces import Traces

        rooms["traces"] = Traces(spans, settings.policy)
    on_end: list[OnEnd] = [_access] if settings.access_log else []
    if (keys := rooms.get("keys")) is not None:
        on_end.append(Settled(rooms["metering"], rooms["metrics"], keys.names))
    return Proxy(
        router=Router(make(settings.policy), cachemap, ledger, costs),
        retries=settings.retries,
        request_timeout=settings.request_timeout_s,
        idle_timeout=settings.idle_timeout_s,
        response_headers=settings.response_headers,
        cached_tokens_header=settings.cached_tokens_header,
        allow_paths=settings.allow_path,
        on_end=on_end,
        tokenize_once=settings.tokenize_once == "auto",
        shadows=settings.shadow,
        slo_figures=settings.slo_figures,
        continue_streams=settings.continue_streams,
        continue_budget=settings.continue_budget,
        **rooms,
    )


def limits(settings: Settings, pipelines: Iterable[Pipeline]) -> Limits:
    """Return the limits of clients' requests, in bytes and seconds.

    The largest accepted body is --max-body-bytes or, without that setting, the bytes that the longest prompt of any
    model may take. `pipelines`: those of all models. The caller computes the limits again when the models change.
    """
    largest = settings.max_body_bytes
    if largest is None:
        needed = [
            MOST_BODY if one.takes_media or one.max_model_len is None else BYTES_PER_TOKEN * one.max_model_len
            for one in pipelines
        ]
        largest = min(MOST_BODY, max(LEAST_BODY, *needed))
    return Limits(
        body_bytes=largest,
        # One request of the largest size must fit, whatever the budget
        requests_bytes=max(settings.request_budget, 2 * largest + 2**20),
        head_seconds=settings.header_timeout_s,
        body_seconds=settings.upload_timeout_s,
        keep_alive_seconds=settings.idle_timeout_s,
    )


def origins(settings: Settings) -> Origins | None:
    """Make the CORS rules of --allow-origin, or return None without that setting.

    Without it, the engines' own CORS headers are passed on to clients.
    """
    exposed = (
        b"retry-after, x-request-id, x-should-retry, x-hitherto-replica, x-hitherto-cached-tokens, x-hitherto-degraded"
    )
    limits = [b"x-ratelimit-%b-%b" % (what, of) for of in TOLD.values() for what in (b"limit", b"remaining", b"reset")]
    return Origins(settings.allow_origin, b", ".join((exposed, *limits))) if settings.allow_origin else None


def shared_ledger(
    settings: Settings, metrics: Metrics, ledger: Ledger, background: Background | None = None
) -> SharedLedger | None:
    """Make the ledger that counts, in Redis, the load that all gateways put on replicas; None without Redis."""
    if settings.redis_url is None:
        return None
    from cachemap.cluster import RedisClients, parse

    from .proxy.placement.shared import SharedLedger

    def observe(outcome: str, seconds: float) -> None:
        metrics.shared_decisions.inc(outcome)
        if outcome == "shared":
            metrics.shared_decision_seconds.observe(outcome, seconds)

    clients, cost = RedisClients(parse(settings.redis_url)), getattr(make(settings.policy), "cost", None)
    return SharedLedger(clients, settings.deployment, ledger, cost, observe=observe, background=background)


def shared_map(settings: Settings, cachemap: CacheMap, background: Background) -> SharedMap | None:
    """Make the cache map that gateways share through Redis.

    Returns None without Redis, or if each gateway follows the engines' KV events itself (`event_intake: each`).
    """
    if settings.redis_url is None or settings.event_intake == "each":
        return None
    from cachemap.cluster import SharedMap, parse  # this import takes 0.2 s, so only where it is used

    return SharedMap(parse(settings.redis_url), settings.deployment, cachemap, background)


def metering(settings: Settings, keys: Keys | None, metrics: Metrics, background: Background) -> Metering | None:
    """Make the counters of tenants' limits, or return None without API keys.

    With Redis, all gateways count together.
    """
    if keys is None:
        return None
    made = Metering(refused=metrics.tenant_refusals.inc)

    def forget(name: str) -> None:
        metrics.forget(name, "tenant")
        made.forget(name)

    keys.on_gone.append(forget)
    if settings.redis_url is not None:
        from cachemap.cluster import RedisClients, parse

        from .tenants.shared import SharedCounts

        clients, observe = RedisClients(parse(settings.redis_url)), metrics.limit_decisions.inc
        made.shared = SharedCounts(clients, settings.deployment, made.accounts, background, observe=observe)
    return made


def discovery(settings: Settings, fleet: Fleet) -> Discovery | None:
    if settings.discover is None:
        return None
    from replicas.discovery import Discovery
    from replicas.pods import place

    return Discovery(fleet, settings.discover, place(settings.discover))


def certificate(settings: Settings) -> Certificate | None:
    """Load the gateway's TLS certificate; return None if clients use plain HTTP.

    Raises ConfigError if a file of the certificate cannot be used.
    """
    if settings.tls_cert is None:
        return None
    try:
        return Certificate(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    except CertificateError as error:
        raise ConfigError(str(error), error.setting) from None


def usage_log(settings: Settings, metrics: Metrics) -> UsageLog | None:
    if settings.usage_log is None:
        return None
    log = UsageLog(settings.usage_log, lambda lines: metrics.usage_lines_dropped.inc(by=lines))
    metrics.before_reading.append(log.tell_lost)
    return log


def started() -> None:
    """Tune garbage collection and thread switching; called once all long-lived objects have been made."""
    # Frozen objects are skipped by the collector, so a full collection looks at requests only.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # saves 5 of 130 us a request against (700, 10, 10); requests make few cycles
    sys.setswitchinterval(SWITCH_SECONDS)


async def explain(proxy: Proxy, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    """Return how this request would be routed now, without sending it or changing anything.

    If API keys are configured, the request is treated as that of a client with a valid key. If the gateway would refuse
    the request, the ApiError of that refusal is raised.
    """
    from .ops.reasons import describe, explained, legs_told

    if (refused := proxy.door.refusal(path, "POST")) is not None:
        raise refused
    prompt = await proxy.preparation.prompt(path, body, headers, from_tenant=proxy.door.keys is not None)
    now = monotonic()
    demand = proxy.placing.demand(prompt, now)
    targets = proxy.eligible.but_full(proxy.eligible.targets(prompt), now)
    peers = proxy.placing.pulls.peers_for(prompt)
    evaluation = proxy.router.evaluate(demand, targets, now, explain=True, peers=peers)
    told = describe(proxy.router.policy, prompt, evaluation, proxy.router.outputs)
    if proxy.eligible.roles.any:
        chosen, other = proxy.placing.legs.choose(prompt, evaluation, now)
        told |= {"legs": legs_told(chosen), "other_legs": legs_told(other)}
    return explained(told)


def _is_stopped(error: Exception | None) -> bool:
    """Return whether this error means that the gateway's shutdown ended a request before its answer was complete."""
    by = error.code if isinstance(error, ApiError) else getattr(error, "kind", None)
    return by == SHUT_DOWN or isinstance(error, ConnectionAbortedError)


def _access(exchange: Exchange, outcome: str, usage: Usage | None) -> None:
    """Write a line of the access log for a request that has ended."""
    prompt, request, attempt = exchange.prompt, exchange.request, exchange.attempt
    error = exchange.error
    refused = isinstance(error, ApiError) and attempt is None
    passed_on = PASSED_ON.get(exchange.result) if attempt else None
    lines.access(
        request.method, request.path, exchange.answered_with, monotonic() - exchange.begun,
        outcome=outcome,
        fault=exchange.fault or None,
        replica=attempt.backend.id if attempt else None,
        moved_from="; ".join(f"{one.backend.id}: {one.error}" for one in exchange.attempts[:-1] if one.error) or None,
        id=exchange.id.decode("latin-1"),
        trace_id=exchange.trace.id if exchange.trace is not None else None,
        tenant=exchange.tenant.name if exchange.tenant is not None else None,
        model=(prompt.model if prompt is not None else exchange.model) or None,
        tokens=prompt.tokens if prompt else None,
        predicted=attempt.placement.predicted if attempt else None,
        prefilled_by=exchange.legs.prefiller.id if exchange.legs is not None else None,
        cached=usage.cached if usage else None,
        reason=error.code if refused else SHUT_DOWN if _is_stopped(error) else passed_on,
        limit=error.limit if refused else None,
        # The messages of other 4xx may quote the prompt.
        error=str(error) if error and (attempt or exchange.status >= 500 or exchange.status == 429) else None,
    )  # fmt: skip

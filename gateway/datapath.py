"""The data path put together from the settings."""

from __future__ import annotations

import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

from policies import CostGroup, Ledger, Router, make

from .config import Settings
from .proxy.dispatcher import Dispatcher
from .proxy.life import Life
from .proxy.usage import Usage
from .prompt.pipeline import SWITCH_SECONDS, Pipeline
from .ops import log as lines
from .ops.metrics import Metrics
from .http.messages import Limits

if TYPE_CHECKING:
    from cachemap import CacheMap
    from cachemap.background import Background

    from .proxy.shared import SharedLedger
    from .proxy.traced import TracedLife
    from .ops.spans import Spans

log = logging.getLogger("hitherto")

# The largest body of a model that takes text alone, where the operator says nothing. Text has 4 to 5 bytes a token, with every
# character escaped 12. The least is for lists of prompts, whose sum no context bounds; images and sound have any size.
BYTES_PER_TOKEN, LEAST_BODY, MOST_BODY = 32, 16 * 2**20, 64 * 2**20


def dispatcher(settings: Settings, spans: Spans | None, *, cachemap: CacheMap, ledger: Ledger, costs: CostGroup, **rooms: Any) -> Dispatcher:
    access = _access if settings.access_log else None
    if spans is not None:
        from .proxy.traced import TracedLife

        rooms["life"] = functools.partial(TracedLife, spans)
    return Dispatcher(
        router=Router(make(settings.policy), cachemap, ledger, costs),
        retries=settings.retries,
        request_timeout=settings.request_timeout_s,
        idle_timeout=settings.idle_timeout_s,
        response_headers=settings.response_headers,
        cached_tokens_header=settings.cached_tokens_header,
        allow_paths=settings.allow_path,
        on_end=access if spans is None else functools.partial(_traced, access),
        tokenize_once=settings.tokenize_once == "auto",
        shadows=settings.shadow,
        **rooms,
    )


def largest_body(settings: Settings, pipelines: Iterable[Pipeline]) -> int:
    """Bytes of the largest body that is taken: as --max-body-bytes says, else as prompts of these models need."""
    if settings.max_body_bytes is not None:
        return settings.max_body_bytes
    needed = [MOST_BODY if one.takes_media or one.max_model_len is None else BYTES_PER_TOKEN * one.max_model_len for one in pipelines]
    return min(MOST_BODY, max(LEAST_BODY, *needed))


def limits(settings: Settings, pipelines: Iterable[Pipeline]) -> Limits:
    """What clients may send. Made again when more is known of the models."""
    largest = largest_body(settings, pipelines)
    return Limits(
        body_bytes=largest,
        requests_bytes=max(settings.request_budget, 2 * largest + 2**20),  # whatever the budget, one request of the largest size must fit
        head_seconds=settings.header_timeout_s,
        body_seconds=settings.upload_timeout_s,
        keep_alive_seconds=settings.idle_timeout_s,
    )


def shared_ledger(settings: Settings, metrics: Metrics, ledger: Ledger, background: Background | None = None) -> SharedLedger | None:
    """Where the load of all gateways is counted; none without Redis."""
    if settings.redis_url is None:
        return None
    from cachemap.cluster import Ways, parse

    from .proxy.shared import SharedLedger

    def observe(outcome: str, seconds: float) -> None:
        metrics.shared_decisions.inc(outcome)
        if outcome == "shared":
            metrics.shared_decision_seconds.observe(outcome, seconds)

    return SharedLedger(Ways(parse(settings.redis_url)), settings.deployment, ledger, getattr(make(settings.policy), "cost", None), observe=observe, background=background)


def started() -> None:
    """How the interpreter is to run from now on, when all is there that lives for ever."""
    # Out of the collector's sight, so that a full collection looks at requests only.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # requests make almost no cycles: 5 us of 130 a request, against (700, 10, 10)
    sys.setswitchinterval(SWITCH_SECONDS)


async def explain(settings: Settings, dispatcher: Dispatcher, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    """What would happen to this request now. Changes nothing."""
    from .ops.explain import describe

    prompt = await dispatcher.preparation.prompt(path, body, headers)
    now = monotonic()
    asked = dispatcher.router.ask(dispatcher.demand(prompt, now), dispatcher.targets(prompt), now, explain=True)
    return describe(settings.policy, prompt, asked)


def _traced(then: Callable[[Life, str, Usage | None], None] | None, life: TracedLife, outcome: str, usage: Usage | None) -> None:
    life.export(outcome, usage)
    if then is not None:
        then(life, outcome, usage)


def _access(life: Life, outcome: str, usage: Usage | None) -> None:
    prompt, request = life.prompt, life.request
    lines.access(
        request.method, request.path, life.status, monotonic() - life.begun,
        outcome=outcome,
        fault=life.fault or None,
        replica=life.backend.id if life.backend else None,
        id=life.id.decode("latin-1"),
        trace_id=life.trace_id,
        tokens=prompt.tokens if prompt else None,
        predicted=life.placement.overlap if life.placement else None,
        cached=usage.cached if usage else None,
    )  # fmt: skip

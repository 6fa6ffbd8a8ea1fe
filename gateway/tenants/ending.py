"""The cost in tokens of a request that has ended, however it ended, and its booking on the tenant's limits."""

from __future__ import annotations

from collections.abc import Container
from operator import sub
from typing import TYPE_CHECKING

from policies import two_legs
from replicas import State

from ..errors import ApiError
from ..prompt.prompt import NO_PREFILL
from ..proxy.admission.queue import SLO_HEADER
from ..proxy.exchange import output_tokens
from ..proxy.paths import WRITES_NOTHING
from ..proxy.placement.known_models import MODEL_NOT_KNOWN
from ..proxy.responses.usage import believed, read_usage
from ..proxy.settling import most_tokens
from ..proxy.states import BROKEN_OFF, Leg
from .limits import Cost
from .metering import Metering

if TYPE_CHECKING:
    from ..ops.metrics import Metrics
    from ..prompt import Prompt
    from ..proxy.exchange import Attempt, Exchange
    from ..proxy.responses.usage import Usage


TOKENS = ("input", "cached", "output")  # as in `Cost`
NOTHING = Cost(0, 0, 0)


def cost(exchange: Exchange, usage: Usage | None) -> Cost:
    """Return the cost of a request in tokens that an engine processed; further calls return the first call's result.

    `usage`: the token counts that the engine reported, or None. Several requests may concern one stored response, and
    for each the engine reports the usage of the whole response. A request then costs only the tokens that no earlier
    request was charged for.
    """
    if exchange.cost is None:
        found, stored = _cost(exchange, usage), exchange.stored
        if stored is not None:
            before, stored.counted = stored.counted, Cost(*map(max, found, stored.counted))
            found = Cost(*map(sub, stored.counted, before))
        exchange.costs(found)
        return found
    return exchange.cost


def _cost(exchange: Exchange, usage: Usage | None) -> Cost:
    """Return a request's cost by the engine's token counts or, without them, by its prompt's tokens and an estimate.

    The estimate is of the answer's tokens. A request that was answered with an error costs nothing. If the client
    disconnected or the stream broke, the request costs the tokens that were computed by then.
    """
    prompt = exchange.prompt
    if exchange.status:
        return NOTHING
    for attempt in reversed(exchange.attempts):
        # The last attempt that computed something: the client has bytes of its answer, or it was sent and did not fail.
        # A second leg that was dropped because its first leg failed is passed over.
        counts = attempt is exchange.attempts[-1] or attempt.leg is Leg.PREFILL
        if attempt.pieces or (counts and attempt.sent_at and attempt.error is None):
            break
    else:
        return NOTHING
    if attempt.status >= 400 or (attempt.fault and not attempt.computed):
        return NOTHING
    if usage is None and attempt.streams:  # cut short; some engines report usage in each event
        usage = believed(read_usage(b"".join(attempt.tail)), *most_tokens(attempt.backend, prompt))
        usage = usage._replace(completion=max(usage.completion or 0, output_tokens(attempt, None)))
    told_input, told_output, cached = usage if usage is not None else (None, None, None)
    known = prompt.tokens if prompt is not None else 0
    if prompt is not None and prompt.path in NO_PREFILL:
        known = 0
    elif not known and exchange.charge is not None:
        known = exchange.charge.unread
    output = output_tokens(attempt, usage)
    if prompt is not None and prompt.path not in WRITES_NOTHING:
        if told_output is None and not attempt.streams and (usage is None or not prompt.background):
            output = _written_meanwhile(attempt, prompt)
        output = min(output, most_tokens(attempt.backend, prompt)[1])
    return Cost(known if told_input is None else told_input, cached or 0, output)


def _written_meanwhile(attempt: Attempt, prompt: Prompt) -> int:
    """Estimate the tokens that were generated for a non-streamed answer before its client disconnected.

    The estimate is the elapsed time divided by the replica's recent time per output token (`pace`), or by the predicted
    one if none is known.
    """
    backend, placement, seconds = attempt.backend, attempt.placement, attempt.ended_at - attempt.sent_at
    if attempt.leg is Leg.PREFILL or backend.replica.state is not State.READY:
        return 0
    written = seconds / backend.pace if backend.pace else 0.0
    if not written:
        written = max(0.0, seconds - placement.punctual_ttft) / two_legs.writing_seconds(placement, 2)
    return int(written) * prompt.sequences


def _is_unserved(exchange: Exchange) -> bool:
    """Return whether the gateway refused a request because of its load, or because no replica was ready.

    Such a request does not count against the tenant's limit of requests. A refusal that the request itself may have
    caused does count: latency limits of its own that cannot be kept, or a model that no replica is known to serve.
    Otherwise a tenant could send any number of these.
    """
    if exchange.attempts:
        return False
    if exchange.status == 503:
        return not (isinstance(exchange.error, ApiError) and exchange.error.code == MODEL_NOT_KNOWN)
    return exchange.status == 429 and exchange.request.header(SLO_HEADER) is None


class Settled:
    """A callable for the end of each request, which books the request on its tenant's limits.

    It replaces the tokens that the request claimed in advance by those that it cost. It also counts the request and its
    tokens in the tenant's metrics.
    """

    def __init__(self, metering: Metering, metrics: Metrics, names: Container[str]):
        """Create the callable.

        `names`: the names of the tenants in the key file. Metrics count no other tenants, which bounds the number of
        labels.
        """
        self._metering, self._metrics, self._names = metering, metrics, names

    def __call__(self, exchange: Exchange, outcome: str, usage: Usage | None) -> None:
        tenant = exchange.tenant
        if tenant is None:
            return
        found = cost(exchange, usage)
        if exchange.charge is not None:
            self._metering.settle(exchange.charge, found.input, found.output, _is_unserved(exchange))
        if tenant.name in self._names:
            answered = exchange.result
            status = outcome if outcome in BROKEN_OFF else f"{answered // 100}xx"
            self._metrics.tenant_requests.inc(tenant.name, status)
            for kind, tokens in zip(TOKENS, found):
                self._metrics.tenant_tokens.inc(tenant.name, kind, by=tokens)

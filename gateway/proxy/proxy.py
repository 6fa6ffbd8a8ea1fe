"""The proxy of one process: the parts that serve requests (preparation, choice of a replica, handling, accounting).

`Proxy` creates these parts and connects them, adds and removes replicas, and has the methods that the HTTP layer calls.
The steps of a request are in `Handler` (`handle.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from policies import Router
from replicas.pulse import Pulse

from ..errors import JSON, error_body
from ..http.messages import Headers
from ..tenants.keys import CHALLENGE
from .admission.control import OverloadControl, control_of
from .admission.overload import Overload
from .admission.priorities import Priorities, differ
from .admission.queue import Queue
from .backend import Backend
from .door import Door, shutting_down
from .exactness.forwarding import TokenIdForwarding
from .failures.deadlines import Deadlines
from .handle import Handler
from .observers.figures import Figures
from .observers.shadow import Shadows
from .placement.eligibility import Eligibility
from .placement.model_refresh import ModelRefresh
from .placement.placing import Placing
from .preparation import Preparation
from .responses.stored import Responses
from .resume.resumer import Resumer
from .settling import OnEnd, OnTraffic, Settling
from .states import AttemptState

if TYPE_CHECKING:
    from replicas import Replica

    from ..models import Models
    from ..ops.metrics import Metrics
    from ..tenants.keys import Keys
    from ..tenants.metering import Metering
    from .observers.traces import Traces

log = logging.getLogger("hitherto.proxy")

# Headers of the HTTP layer's own answers, by status.
HEADERS_OF = {503: [(b"retry-after", b"1")], 401: CHALLENGE}


class Proxy:
    """The proxy of one process, whose `handle` the HTTP layer calls for each request."""

    def __init__(
        self,
        *,
        models: Models,
        router: Router,
        metrics: Metrics,
        retries: int,
        request_timeout: float,
        idle_timeout: float,
        response_headers: bool,
        replicas: Mapping[str, Replica],
        on_traffic: OnTraffic,
        ask_models: Callable[[], Awaitable[None]],
        on_end: Sequence[OnEnd] = (),
        usage_log: OnEnd | None = None,
        tokenize_once: bool = True,
        shadows: Sequence[str] = (),
        cached_tokens_header: bool = False,
        allow_paths: Sequence[str] = (),
        traces: Traces | None = None,
        keys: Keys | None = None,
        metering: Metering | None = None,
        overload: Overload | None = None,
        slo_figures: bool = False,
        continue_streams: str = "never",
        continue_budget: int = 2**26,
        pulse: Pulse | None = None,
    ):
        """Create the parts and connect them.

        `retries`: retries per request.
        `request_timeout`: seconds until the first byte of an answer; `idle_timeout`: seconds between two reads of one.
        `response_headers`: add a response header with the replica's id.
        `cached_tokens_header`: add one with the number of prompt tokens predicted to be in the replica's cache.
        `replicas`: all known replicas, by id.
        `on_traffic`: reports failures and answers of replicas to their health checks (see `Settling`).
        `on_end`: callbacks for each request that ends; `usage_log`: one more, which needs the tokens of all answers.
        `ask_models`: reads the model lists of all engines.
        `tokenize_once`: send token ids in place of the prompt's text to replicas that were shown to make the same ids.
        `shadows`: names of policies to compare with the acting one.
        `allow_paths`: values of `--allow-path`.
        `keys`, `metering`, `overload`, `traces`: API keys, tenants' limits, admission by service class or limit, and
            tracing; None where that feature is off.
        `slo_figures`: measure latencies by class and model even without `overload`.
        `continue_streams`: "never" or "exact": other replicas resume streams whose replica failed.
        `continue_budget`: bytes that the records of such streams may take together.
        `pulse`: detects stalls of the event loop; None: a new one.
        """
        self.models, self.router, self.metrics = models, router, metrics
        self.pulse = pulse or Pulse()
        # After a stall of the event loop, answers may wait to be read: until they are, no replica counts as late.
        self.pulse.on_held_up.append(lambda now, _: router.ledger.held_up(now))
        self.eligible = Eligibility(models, router, replicas)
        self.backends = self.eligible.backends
        self.figures = figures = Figures(metrics) if slo_figures or overload is not None else None
        responses = Responses()
        self.placing = Placing(
            self.eligible,
            router,
            responses,
            metrics,
            self.pulse,
            Shadows(shadows, metrics, getattr(router.policy, "source", router.policy.name)) if shadows else None,
        )
        self.preparation = Preparation(self.eligible, self.placing, ModelRefresh(ask_models), metrics, metering)
        self.forwarding = TokenIdForwarding(
            metrics, tokenize_once, self.backends, models.made_by, models.made_otherwise, models.made_alike
        )
        self.settling = settling = Settling(
            self.backends, router, metrics, self.forwarding, on_traffic, self.pulse, self.eligible.when_full
        )
        self.door = Door(self.eligible, settling, allow_paths, keys, metering)
        resumer: Resumer | None = None
        if continue_streams != "never":
            resumer = Resumer(
                self.placing, settling, self.eligible, metrics, continue_budget, discreet=keys is not None
            )
        self.handler = handler = Handler(
            self.door, self.preparation, self.placing, settling, responses, metrics, resumer, retries=retries, traces=traces,
            metered=usage_log is not None, names_replica=response_headers, tells_cached=cached_tokens_header,
        )  # fmt: skip
        self.handle = handler.handle
        self.exchanges = handler.under_way
        queue: Queue | None = None
        priorities: Priorities | None = None
        self.control: OverloadControl | None = None
        if overload is not None and figures is not None:
            self.placing.queue = queue = Queue(overload, self.placing, metrics, figures.model_of)
            figures.class_of, handler.note = queue.class_of, queue.note
            self.control = queue.control = control_of(
                overload, metrics, queue.look, lambda now: figures.unanswered(self.exchanges, now)
            )
            if differ(queue.classes):
                priorities = Priorities(queue.qos_of, queue.classes)
        handler.writes_priorities = priorities is not None
        # The hooks of each phase, in their order. What resumes a stream replaces the body with token ids. At the end,
        # figures ask the queue for the request's class before the queue forgets it.
        handler.before_send = [one.before_send for one in (self.forwarding, resumer, priorities, traces) if one]
        settling.on_first = [one.first_token for one in (figures, queue) if one]
        settling.on_end = [one.ended for one in (resumer, traces, figures, queue) if one]
        settling.on_end += on_end if usage_log is None else (*on_end, usage_log)
        self.deadlines = Deadlines(handler, figures, request_timeout=request_timeout, idle_timeout=idle_timeout)

    @property
    def draining(self) -> bool:
        return self.door.draining

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.door.draining = True

    def refuse_unanswered(self) -> int:
        """Answer 503 to every request whose client has no byte of an answer yet; return how many these are."""
        return self.handler.failures.refuse_unanswered(shutting_down)

    def end_streams(self) -> int:
        """Write an error event to all streams under way and end them, at shutdown; return their number."""
        return self.handler.failures.end_streams()

    # --- replicas come and go

    def add(self, backend: Backend) -> None:
        """Add a replica that is ready for the first time."""
        self.backends[backend.id] = backend
        self.changed()

    def remove(self, replica: str) -> Backend | None:
        """Remove a replica and return it; None if it is not known.

        Its part (slot) of the map of cached blocks is freed once nothing writes to it any more.
        """
        backend = self.backends.pop(replica, None)
        if backend is not None:
            slot = backend.slot
            backend.stop(then=lambda: self.router.map.detach(slot))
            self.router.remove(replica)
            self.changed()
        return backend

    def changed(self) -> None:
        """Update all that depends on the replicas, after their states, models or prompt formats have changed."""
        self.eligible.changed()
        self.forwarding.look()
        if self.figures is not None:
            self.figures.serve(self.eligible.names)
        if self.placing.queue is not None and self.figures is not None:
            spaces = {space.number: space.name for space in self.models.spaces}
            self.placing.queue.keep(spaces, self.figures.models.keys())
            self.placing.queue.look()

    def waited(self, replica: str, now: float) -> float:
        """Return for how many seconds a replica's oldest unanswered prompt has waited; 0.0 without one.

        Seconds in which the event loop was stalled are left out. `now`: in monotonic seconds.
        """
        return self.pulse.ran(self.oldest_unanswered().get(replica, now), now)

    def requests_at(self, replicas: Collection[str]) -> list[str]:
        """Return the ids of the requests that are under way on any of these replicas, even removed ones."""
        return [
            exchange.id.decode("latin-1")
            for exchange in self.exchanges
            if any(one.backend.id in replicas and one.state is not AttemptState.ENDED for one in exchange.attempts)
        ]

    def oldest_unanswered(self) -> dict[str, float]:
        """Return for each replica with unanswered prompts when the oldest of them was sent, in monotonic seconds."""
        oldest: dict[str, float] = {}
        for exchange in self.exchanges:
            if exchange.prompt is not None and (attempt := exchange.unanswered) is not None:
                id = attempt.backend.id
                oldest[id] = min(attempt.sent_at, oldest.get(id, attempt.sent_at))
        return oldest

    # --- called by the HTTP layer, besides `handle`

    def refuse(self, status: int, message: str, target: bytes) -> tuple[Headers, bytes]:
        """Return the headers and the body of an error with which the HTTP layer itself answers, and count it.

        `target`: the request's target, by whose path the format of the error is chosen.
        """
        path, headers = target.decode("latin-1"), [*JSON, *(HEADERS_OF.get(status, ()))]
        if status == 503 and self.draining:
            error = shutting_down()
            self.settling.turned_away(error)
            return headers, error.body(path)
        self.metrics.rejections.inc(str(status))
        return headers, error_body(path, status, message, code="gateway_full" if status == 503 else None)

    def sweep(self, now: float) -> None:
        """Do the regular work, a few times a second: check all deadlines, close idle connections, report answers.

        `now`: in monotonic seconds.
        """
        for exchange in list(self.exchanges):
            try:
                self.deadlines.check(exchange, now)
            except Exception:
                log.exception("the sweep failed on a request")
        for backend in self.backends.values():
            backend.pool.sweep(now)
        if self.control is not None:
            self.control.look(now)
        self.settling.tell_answers()
        self.metrics.count_waiting()
        self.router.decay_idle_costs(now)

"""The proxy, put together from the preparation of prompts, the choice of replicas, forwarding and accounting.

It answers the gateway's own paths (`/v1/models`, `/v1/models/NAME`, `/health`) itself. Every other request becomes an
`Exchange`, which is forwarded to a replica.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

import orjson

from policies import Router
from replicas.ask import GATEWAY
from replicas.pulse import Pulse

from .. import __version__
from ..errors import JSON, ApiError, compressed, error_body
from ..http.downstream import Downstream
from ..http.messages import Headers, Request
from ..prompt import Prompt
from ..prompt.api.named import is_form, named_model
from ..prompt.api.openai import SESSION_HEADERS, refuse_invocation
from ..prompt.long import LongPrompts
from ..prompt.offload import LOOP_SECONDS, TakesLong, event_loop
from ..prompt.pipeline import OFFLOAD_BYTES
from ..prompt.prompt import PROMPT_PATHS, unread
from ..tenants.handover import read_unprepared, refusal_of_head, refusal_of_object
from ..tenants.keys import CHALLENGE
from ..tenants.salting import salt_request
from .admission.control import OverloadControl, control_of
from .admission.overload import Overload
from .admission.priorities import Priorities, differ, encoding_refusal
from .admission.queue import Queue
from .backend import Backend
from .conductor import Conductor
from .deadlines import Deadlines
from .exactness.forwarding import TokenIdForwarding
from .exchange import Batcher, Exchange
from .observers.figures import Figures
from .observers.shadow import Shadows
from .paths import INVOCATIONS, MODELS, AllowedPaths, model_in, refusal
from .placement.eligibility import Eligibility
from .placement.model_refresh import ModelRefresh
from .placement.placing import Placing
from .responses.stored import PATH as RESPONSES
from .responses.stored import Responses, referred_to
from .resume.resumer import Resumer
from .settling import OnEnd, OnTraffic, Settling
from .states import AttemptState, ExchangeState

if TYPE_CHECKING:
    from replicas import Replica

    from ..models import Models
    from ..ops.metrics import Metrics
    from ..tenants.keys import Keys
    from ..tenants.metering import Metering
    from ..tenants.tenant import Tenant
    from .observers.traces import Traces

log = logging.getLogger("hitherto.proxy")

TAKES_LONG = TakesLong()  # in place of a prompt that takes too long for the event loop: a thread prepares it
# The prompt, or why there is none (None: a bug in the gateway), and the seconds of its preparation.
Prepared = tuple[Prompt | ApiError | TakesLong | None, float]
# Headers of the HTTP layer's own answers, by status.
HEADERS_OF = {503: [(b"retry-after", b"1")], 401: CHALLENGE}
GATEWAY_SIGN = GATEWAY.encode(), __version__.encode()  # shows other gateways that this is not an engine
SAID_EVERY = 60.0  # seconds between two warnings that prompts of a path are not known exactly
SESSION_WORDS = frozenset(name.encode() for name in SESSION_HEADERS)
BYTES_PER_TOKEN = 4  # estimate for bodies that are not parsed
# Ends of the paths of requests for which engines compute no prompt.
_RENDERS = ("/render", "/derender", "/count_tokens")
READ_ONLY = (b"allow", b"GET, HEAD, OPTIONS")
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class Preparation:
    """The preparation of prompts: short requests in batches on the event loop, long ones in a thread."""

    def __init__(
        self,
        eligible: Eligibility,
        placing: Placing,
        model_refresh: ModelRefresh,
        metrics: Metrics,
        metering: Metering | None = None,
    ):
        self._metering = metering
        self._eligible, self._placing, self._model_refresh, self._metrics = eligible, placing, model_refresh, metrics
        self._models = eligible.models
        self._silent_until: dict[str, float] = {}  # path -> time of the next warning about inexact prompts
        self.long = LongPrompts()
        self._short = Batcher(self._together)
        self._in_background: set[asyncio.Task[None]] = set()

    def begin(self, exchange: Exchange) -> None:
        """Prepare a request's prompt, then call `exchange.prepared` or `exchange.refused`."""
        if len(exchange.request.body) <= OFFLOAD_BYTES:
            self._short.add(exchange)
        else:
            self._prepare_in_thread(exchange)

    def begin_other(self, exchange: Exchange) -> None:
        """Prepare a request whose prompt the gateway does not read; it reads the model's name from the body."""
        request = exchange.request
        if request.method != "POST" or exchange.response is not None:
            self._ready(exchange, None)
        elif len(request.body) <= OFFLOAD_BYTES:
            self._was_read(exchange, self._read(exchange))
        else:
            self._in_thread(exchange, self._read, self._was_read)

    def _read(self, exchange: Exchange) -> tuple[str | None, ApiError | None]:
        """Return the model that a request names, and an error if its other fields are not allowed."""
        request, error = exchange.request, None
        content_type = request.header(b"content-type") or ""
        if exchange.tenant is None:
            model = named_model(content_type, request.body)
        else:
            model, error = read_unprepared(content_type, request.body)
        if error is None and request.path == INVOCATIONS and not is_form(content_type):
            try:
                refuse_invocation(request.body)
            except ApiError as refused:
                error = refused
        return model, error

    def _was_read(self, exchange: Exchange, found: tuple[str | None, ApiError | None]) -> None:
        model, error = found
        exchange.model = model
        if exchange.tenant is not None:
            error = exchange.tenant.refusal(model) or error
        if error is not None:
            exchange.refused(error)
        elif model is not None and self._eligible.is_unknown(model):
            self._run_in_background(self._prepare_again(exchange, None))
        else:
            self._ready(exchange, None)

    def _ready(self, exchange: Exchange, prompt: Prompt | None) -> None:
        """Go on with a prepared request once its tenant's limits allow it."""
        if exchange.state is ExchangeState.ENDED:  # meanwhile; a claim made now would never be released
            return
        if prompt is not None and prompt.note:
            self._count(prompt)
        metering, tenant = self._metering, exchange.tenant
        tokens = prompt.tokens if prompt is not None else 0
        if metering is not None and tenant is not None:
            exchange.charge = metering.charge(tenant, tokens)
        if metering is None or (charge := exchange.charge) is None:
            exchange.prepared(prompt)
            return
        if not tokens:
            charge.unread = _unread_tokens(exchange.request)

        def decided(error: ApiError | None) -> None:
            if error is None:
                exchange.run_isolated(exchange.prepared, prompt)
            else:
                exchange.run_isolated(exchange.refused, error)

        metering.claim(charge, decided)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._in_background.add(task)
        task.add_done_callback(self._in_background.discard)

    async def prompt(self, path: str, body: bytes, headers: Mapping[str, str], from_tenant: bool = False) -> Prompt:
        """Prepare the prompt of a request that the gateway does not send itself.

        `from_tenant`: refuse what tenants may not request. Raises ApiError, or any exception that preparation raises.
        """
        prompt = await self._prompt(path, body, headers, from_tenant)
        if self._eligible.is_unknown(prompt.model):  # the model may have been loaded just now
            await self._model_refresh.refresh()
            prompt = await self._prompt(path, body, headers, from_tenant)
        return prompt

    async def _prompt(self, path: str, body: bytes, headers: Mapping[str, str], from_tenant: bool) -> Prompt:
        def prepare() -> Prompt:
            if path not in PROMPT_PATHS:
                content_type = headers.get("content-type", "")
                model, error = named_model(content_type, body), None
                if from_tenant:
                    model, error = read_unprepared(content_type, body)
                if error is not None:
                    raise error
                return unread(path, model)
            refusal = refusal_of_object if from_tenant else None
            prompt = self._models.routes.prepare(path, body, headers, adapters, refusal)
            if (error := self._unnamed(prompt)) is not None:
                raise error
            return prompt

        adapters = self._eligible.adapters
        if len(body) <= OFFLOAD_BYTES:
            event_loop.holds, event_loop.until = True, inf
            try:
                return prepare()
            except TakesLong:
                pass
            finally:
                event_loop.holds = False
        return await self.long.submit(len(body), prepare)

    def _unnamed(self, prompt: Prompt) -> ApiError | None:
        """Return the error for a prompt that names no model where several are served, else None."""
        if prompt.model or prompt.previous_response or not (models := self._models.routes.models):
            return None
        return ApiError(400, f"name a model; served here: {', '.join(models)}", param="model", code="model_not_named")

    def _together(self, exchanges: list[Exchange]) -> None:
        """Prepare and place a batch stage by stage: in a batch of 12, a request takes a third less CPU than alone."""
        event_loop.holds, event_loop.until = True, perf_counter() + LOOP_SECONDS
        try:
            prepared = []
            for exchange in exchanges:
                if exchange.state is not ExchangeState.ENDED:
                    prepared.append((exchange, self._prepare(exchange)))
        finally:
            event_loop.holds = False
        self._placing.begin_batch()
        try:
            for exchange, (prompt, seconds) in prepared:
                if prompt is TAKES_LONG:
                    exchange.run_isolated(self._prepare_in_thread, exchange)
                else:
                    exchange.run_isolated(self._prepared, exchange, prompt, seconds, "prepare")
        finally:
            self._placing.end_batch()

    def _prepare_in_thread(self, exchange: Exchange) -> None:
        self._in_thread(
            exchange,
            self._prepare,
            lambda exchange, done: self._prepared(exchange, done[0], done[1], "prepare_offloaded"),
        )

    def _in_thread(
        self, exchange: Exchange, work: Callable[[Exchange], object], then: Callable[[Exchange, Any], None]
    ) -> None:
        """Run `work` in a thread, and `then` with its result on the event loop.

        Until a thread begins the work, only the exchange refers to the request's body: if the client leaves, the body
        is freed, and the work is left out.
        """

        def ended(thread: asyncio.Future[Any]) -> None:
            if exchange.state is not ExchangeState.ENDED:
                exchange.run_isolated(lambda: then(exchange, thread.result()))

        thread: asyncio.Future[Any] = self.long.submit(
            len(exchange.request.body), lambda: None if exchange.state is ExchangeState.ENDED else work(exchange)
        )
        thread.add_done_callback(ended)

    def _prepare(self, exchange: Exchange) -> Prepared:
        """Prepare a prompt. This may run in a thread, so it must not change shared state."""
        begun, request = perf_counter(), exchange.request
        if event_loop.holds and begun > event_loop.until:
            return TAKES_LONG, 0.0
        try:
            prompt = self._models.routes.prepare(
                request.path,
                request.body,
                None
                if SESSION_WORDS.isdisjoint(request.named)
                else {name.decode(): request.header(name) or "" for name in SESSION_WORDS},
                self._eligible.adapters,
                refusal_of_object if exchange.tenant is not None else None,
            )
        except ApiError as error:
            # The error's traceback refers to this frame, and would keep the request in memory until garbage collection.
            error.__context__ = error.__traceback__ = None
            return error, perf_counter() - begun
        except TakesLong:
            return TAKES_LONG, 0.0
        except Exception:  # the request still deserves an answer
            log.exception("preparing a request failed; it goes by load")
            return None, perf_counter() - begun
        return prompt, perf_counter() - begun

    def _prepared(self, exchange: Exchange, prompt: Prompt | ApiError | None, seconds: float, stage: str) -> None:
        if isinstance(prompt, ApiError):
            exchange.refused(prompt)
            return
        if prompt is None:
            self._metrics.prompt_failures.inc(exchange.request.path)
            self.begin_other(exchange)
            return
        exchange.model = prompt.model  # for the usage log, in case the request is refused before it has the prompt
        exchange.stages.append((stage, seconds))
        error = None if exchange.tenant is None else exchange.tenant.refusal(prompt.model)
        if error is None and not prompt.model:
            error = self._unnamed(prompt)
        if error is not None:
            exchange.refused(error)
            return
        if not prompt.kind and not self._eligible.finer:  # too short to be forwarded as ids
            prompt.token_ids = b""
            if prompt.also is not None:
                prompt.also.token_ids = b""
        if prompt.model not in self._eligible.names and self._eligible.is_unknown(prompt.model):
            self._run_in_background(self._prepare_again(exchange, prompt))
        else:
            self._ready(exchange, prompt)

    def _count(self, prompt: Prompt) -> None:
        """Count a prompt whose tokens the gateway does not know completely; log it at most every SAID_EVERY seconds."""
        if prompt.media:
            self._metrics.media_prompts.inc(prompt.media)
        if prompt.declined and self._eligible.ready_for(prompt.model or None):
            self._metrics.prompt_failures.inc(prompt.path)
            if perf_counter() >= self._silent_until.get(prompt.path, 0.0):
                self._silent_until[prompt.path] = perf_counter() + SAID_EVERY
                log.warning("a prompt is not known exactly at %s: %s", prompt.path, prompt.note)

    async def _prepare_again(self, exchange: Exchange, prompt: Prompt | None) -> None:
        """Refresh the model list once and prepare the prompt again; None: the gateway reads no prompt of it.

        The requested name may be a LoRA adapter loaded since the last refresh; an adapter has its own block hashes.
        """
        await self._model_refresh.refresh()
        if prompt is None or self._eligible.is_unknown(prompt.model):
            exchange.run_isolated(self._ready, exchange, prompt)
        elif exchange.state is not ExchangeState.ENDED:
            self._prepare_in_thread(exchange)


def _unread_tokens(request: Request) -> int:
    """Return the approximate number of prompt tokens of a JSON body that is passed on without being parsed."""
    if request.body[:1] != b"{" or request.path.endswith(_RENDERS):
        return 0
    return len(request.body) // BYTES_PER_TOKEN


class Proxy:
    """The proxy of one process, with the handler for requests that the HTTP layer calls."""

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
        """Put the parts together.

        `retries`: retries per request.
        `request_timeout`: seconds until the first byte of an answer; `idle_timeout`: seconds between two reads of one.
        `response_headers`: add a response header with the replica's id.
        `cached_tokens_header`: add one with the number of prompt tokens predicted to be in the replica's cache.
        `replicas`: all known replicas, by id.
        `on_traffic`, `on_end`: callbacks of `Settling`; `usage_log`: an `on_end` that needs the tokens of all answers.
        `ask_models`: reads the model lists of all engines.
        `tokenize_once`: forward token ids to replicas that have confirmed them.
        `shadows`: policies to compare with the acting one.
        `allow_paths`: values of `--allow-path`.
        `keys`, `metering`, `overload`, `traces`: None where these features are off.
        `slo_figures`: measure latencies by class and model even without `overload`.
        `continue_streams`: "never", or another value to resume streams whose replica failed.
        `continue_budget`: bytes that the records for this may take in all.
        """
        self.models, self.router, self.metrics = models, router, metrics
        self.pulse = pulse or Pulse()
        # After a stall of the event loop, answers may wait to be read: until they are, no replica counts as late.
        self.pulse.on_held_up.append(lambda now, _: router.ledger.held_up(now))
        self.allowed_paths = AllowedPaths(allow_paths)
        self.eligible = Eligibility(models, router, replicas)
        self.backends = self.eligible.backends
        responses = Responses()
        self.placing = Placing(
            self.eligible,
            router,
            responses,
            metrics,
            self.pulse,
            Shadows(shadows, metrics, getattr(router.policy, "source", router.policy.name)) if shadows else None,
        )
        self.keys, self.metering = keys, metering
        self.figures = figures = Figures(metrics) if slo_figures or overload is not None else None
        self.control: OverloadControl | None = None
        self._metered = usage_log is not None  # meter all answers, not only those of tenants
        self.preparation = Preparation(self.eligible, self.placing, ModelRefresh(ask_models), metrics, metering)
        self.forwarding = TokenIdForwarding(
            metrics, tokenize_once, self.backends, models.made_by, models.made_otherwise, models.made_alike
        )
        self.settling = settling = Settling(
            self.backends, router, metrics, self.forwarding, on_traffic, self.pulse, self.eligible.when_full
        )
        self.conductor = conductor = Conductor(
            self.placing, settling, self.forwarding, responses, metrics, retries=retries, traces=traces,
            discreet=keys is not None, names_replica=response_headers, tells_cached=cached_tokens_header,
            timed=figures is not None or traces is not None,
        )  # fmt: skip
        self.exchanges = conductor.under_way
        queue: Queue | None = None
        if overload is not None and figures is not None:
            self.placing.queue = queue = Queue(overload, self.placing, metrics, figures.model_of)
            figures.class_of, conductor.note = queue.class_of, queue.note
            self.control = queue.control = control_of(
                overload, metrics, queue.look, lambda now: figures.unanswered(self.exchanges, now)
            )
            if differ(queue.classes):
                conductor.priorities = Priorities(queue.qos_of, queue.classes)
        if continue_streams != "never":
            conductor.resumer = Resumer(
                self.placing, settling, self.eligible, metrics, continue_budget, discreet=keys is not None
            )
            settling.on_end.append(conductor.resumer.settled)
        # In this order: the figures ask the queue for the request's class, which the queue then forgets.
        if traces is not None:
            settling.on_end.append(traces.end)
        for one in (figures, queue):
            if one is not None:
                settling.on_end.append(one.ended)
                settling.on_first.append(one.first_token)
        settling.on_end += on_end if usage_log is None else (*on_end, usage_log)
        self.deadlines = Deadlines(conductor, figures, request_timeout=request_timeout, idle_timeout=idle_timeout)
        self._ids = map(f"{os.urandom(6).hex()}-%x".__mod__, itertools.count(1))
        self._local = {MODELS: self._list_models, "/health": self._health}

    @property
    def draining(self) -> bool:
        return self.conductor.draining

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.conductor.draining = True

    def refuse_unanswered(self) -> int:
        """Answer 503 to every request whose client has no byte of an answer yet; return the number of requests."""
        return self.conductor.refuse_unanswered(_shutting_down)

    def end_streams(self) -> int:
        """End all streams with an error event, at shutdown; return their number."""
        return self.conductor.end_streams()

    # --- replicas come and go

    def add(self, backend: Backend) -> None:
        """Add a replica that is ready for the first time."""
        self.backends[backend.id] = backend
        self.changed()

    def remove(self, replica: str) -> Backend | None:
        """Remove a replica; its slot in the map of cached blocks is freed once nothing writes to the slot any more."""
        backend = self.backends.pop(replica, None)
        if backend is not None:
            slot = backend.slot
            backend.stop(then=lambda: self.router.map.detach(slot))
            self.router.remove(replica)
            self.changed()
        return backend

    def changed(self) -> None:
        """Update what depends on the replicas' states, models and prompt spaces (`gateway.spaces`)."""
        self.eligible.changed()
        self.forwarding.look()
        if self.figures is not None:
            self.figures.serve(self.eligible.names)
        if self.placing.queue is not None and self.figures is not None:
            spaces = {space.number: space.name for space in self.models.spaces}
            self.placing.queue.keep(spaces, self.figures.models.keys())
            self.placing.queue.look()

    def waited(self, replica: str, now: float) -> float:
        """Return how long the replica's oldest unanswered prompt has waited, in seconds in which the gateway ran."""
        return self.pulse.ran(self.oldest_unanswered().get(replica, now), now)

    def requests_at(self, replicas: Collection[str]) -> list[str]:
        """Return the ids of the requests that one of these replicas has; the replicas may have been removed."""
        return [
            exchange.id.decode("latin-1")
            for exchange in self.exchanges
            if any(one.backend.id in replicas and one.state is not AttemptState.ENDED for one in exchange.attempts)
        ]

    def oldest_unanswered(self) -> dict[str, float]:
        """Return for each replica when its oldest unanswered prompt was sent, in monotonic seconds."""
        oldest: dict[str, float] = {}
        for exchange in self.exchanges:
            if exchange.prompt is not None and (attempt := exchange.unanswered) is not None:
                id = attempt.backend.id
                oldest[id] = min(attempt.sent_at, oldest.get(id, attempt.sent_at))
        return oldest

    # --- called by the HTTP layer

    def handle(self, client: Downstream, request: Request) -> None:
        """Answer a request, or make an exchange of it."""
        path = request.path
        label = PROMPT_PATHS.get(path)
        has_prompt = label is not None and request.method == "POST"
        tenant = None if self.keys is None else self._authenticated(self.keys, client, request)
        if (
            not has_prompt
            and not isinstance(tenant, ApiError)
            and (answer := self._own_answer(request, tenant)) is not None
        ):
            answer(client, request, tenant)
            return
        exchange = client.exchange = self._exchange(client, request, label or "other")
        if self._metered:
            exchange.meter()
        if path.startswith(RESPONSES):
            exchange.response = referred_to(request)
        self.conductor.begin(exchange)
        error = None if tenant is None else self._turned_down(exchange, tenant)
        if error is None and self.conductor.priorities is not None:
            error = encoding_refusal(request)
        if error is None and has_prompt and b"content-encoding" in request.named and (found := _coding(request)):
            error = compressed(found)
        if error is None and (not has_prompt or self.conductor.draining):
            error = self.refusal(path, request.method, exchange.tenant)
        if error is not None:
            exchange.refused(error)
        elif has_prompt:
            self.preparation.begin(exchange)
        else:
            self.preparation.begin_other(exchange)

    def _exchange(self, client: Downstream, request: Request, label: str) -> Exchange:
        id = request.named.get(b"x-request-id") or next(self._ids).encode()
        return Exchange(self.conductor, client, request, id, label)

    def _authenticated(self, keys: Keys, client: Downstream, request: Request) -> Tenant | ApiError | None:
        """Authenticate the request's API key, and set the connection's limits by the result."""
        tenant = keys.authenticate(request)
        if tenant is None or isinstance(tenant, ApiError):
            client.serve_stranger()
        else:
            client.stranger = False
        return tenant

    def _turned_down(self, exchange: Exchange, tenant: Tenant | ApiError) -> ApiError | None:
        """Return why a tenant's request is refused before it is read, or assign it to its tenant and return None."""
        if isinstance(tenant, ApiError):
            return tenant
        exchange.tenant = tenant
        exchange.meter()
        if self.metering is not None and (over := self.metering.refusal(tenant)) is not None:
            request = exchange.request
            if len(request.body) <= OFFLOAD_BYTES:  # for the access log
                exchange.model = named_model(request.header(b"content-type") or "", request.body)
            return over
        if (error := refusal_of_head(exchange.request, exchange.id)) is not None:
            return error
        return salt_request(exchange.request, tenant.cache_salt) if tenant.cache_salt is not None else None

    def _own_answer(
        self, request: Request, tenant: Tenant | None
    ) -> Callable[[Downstream, Request, Tenant | None], None] | None:
        """Return the function that answers a request for one of the gateway's own paths; None for other requests."""
        if (
            request.path.endswith("/")
            and request.path not in self.allowed_paths
            and self._is_known(request.path.rstrip("/"))
        ):
            return self._without_slash
        if request.method not in ("GET", "HEAD"):
            return None
        name = model_in(request.path)
        if name is not None and (name in self.eligible.names or not (tenant is None or tenant.may_use(name))):
            return self._tell_model
        answer = self._local.get(request.path)
        return answer if self.eligible.names or answer != self._list_models else None

    def _is_known(self, path: str) -> bool:
        return path in self.allowed_paths or model_in(path) is not None

    def refusal(self, path: str, method: str, tenant: Tenant | None = None) -> ApiError | None:
        """Return why a request is not forwarded, or None."""
        if self.draining:
            return _shutting_down()
        if method == "OPTIONS" and (path in self._local or model_in(path) is not None):
            return None  # forwarded: an engine answers it, as for its other paths
        if path in self._local and method not in ("GET", "HEAD"):
            return ApiError(405, f"{method} is not supported for {path}", headers=[READ_ONLY])
        if path in PROMPT_PATHS:
            if method not in ("POST", "OPTIONS"):
                return ApiError(405, f"{method} is not supported for {path}", headers=[(b"allow", b"POST, OPTIONS")])
        elif path not in self.allowed_paths:
            if (model := model_in(path)) is not None:
                return self._no_model(model, method, tenant)
            return ApiError(404, refusal(path, self.keys is not None), code="path_not_allowed")
        if method not in METHODS:
            return ApiError(
                405, f"{method} is not supported", headers=[(b"allow", ", ".join(sorted(METHODS)).encode())]
            )
        return None

    def refuse(self, status: int, message: str, target: bytes) -> tuple[Headers, bytes]:
        """Return the headers and body of the HTTP layer's own error for a request target."""
        path, headers = target.decode("latin-1"), [*JSON, *(HEADERS_OF.get(status, ()))]
        if status == 503 and self.draining:
            error = _shutting_down()
            self.settling.turned_away(error)
            return headers, error.body(path)
        self.metrics.rejections.inc(str(status))
        return headers, error_body(path, status, message, code="gateway_full" if status == 503 else None)

    def sweep(self, now: float) -> None:
        """Check the deadlines of all requests and connections; called a few times a second, with monotonic seconds."""
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
        self.router.decay_idle_costs(now)

    # --- answers of the gateway's own

    def _without_slash(self, client: Downstream, request: Request, tenant: Tenant | None) -> None:
        """Redirect to the path without its slash, as vLLM does; clients repeat the whole request there."""
        path, mark, query = request.target.partition(b"?")
        exchange = self._exchange(client, request, "other")
        self.conductor.begin(exchange)
        self.exchanges.discard(exchange)
        exchange.tenant, exchange.status = tenant, 307
        self.settling.ended(exchange, "complete")
        client.reply(307, b"", [(b"location", path.rstrip(b"/") + mark + query)])

    def _list_models(self, client: Downstream, request: Request, tenant: Tenant | None) -> None:
        """Answer with the list of served models; called only while at least one is known.

        A client would believe an empty list. While no model is known, the request is therefore forwarded: the answer is
        503 until a replica is ready, and a replica that reports its models only for an API key answers it itself.
        """
        names = [name for name in sorted(self.eligible.names) if tenant is None or tenant.may_use(name)]
        data = [self._described(name) for name in names]
        client.reply(200, orjson.dumps({"object": "list", "data": data}), JSON)

    def _tell_model(self, client: Downstream, request: Request, tenant: Tenant | None) -> None:
        name = model_in(request.path) or ""
        if tenant is not None and (error := tenant.refusal(name)) is not None:
            self.settling.turned_away(error)
            client.reply(error.status, error.body(request.path), JSON)
        else:
            client.reply(200, orjson.dumps(self._described(name)), JSON)

    def _described(self, name: str) -> dict[str, Any]:
        """Return a served model or adapter in the format of OpenAI's API."""
        parent = self.eligible.names[name]
        return {
            "id": name, "object": "model", "created": 0, "owned_by": "hitherto", "root": parent or name, "parent": parent,
            "max_model_len": max(self.models.routes.contexts.get(name, ()), default=None),
        }  # fmt: skip

    def _no_model(self, name: str, method: str, tenant: Tenant | None) -> ApiError:
        """Return the error for `/v1/models/NAME` where no such model is listed."""
        if method not in ("GET", "HEAD"):
            return ApiError(405, f"{method} is not supported for {MODELS}/NAME", headers=[READ_ONLY])
        if self.eligible.names or not self.eligible.ready_for(None):
            return self.eligible.known.no_replica_error(name, tenant)
        return ApiError(
            404,
            f"the replicas tell what they serve only to those who bring an API key: ask GET {MODELS}, which passes it on",
            param="model",
            code="model_not_found",
        )

    def _health(self, client: Downstream, request: Request, tenant: Tenant | None) -> None:
        if self.draining:
            client.reply(503, _shutting_down().body(""), [*JSON, GATEWAY_SIGN])
        elif self.eligible.ready_for(None):
            client.reply(200, b"", [GATEWAY_SIGN])
        else:
            client.reply(503, error_body("", 503, "no replica is ready"), [*JSON, GATEWAY_SIGN])


def _coding(request: Request) -> str:
    """Return the content coding of a request's body, "" for none."""
    values = [value for name, value in request.headers if name == b"content-encoding"]
    codings = [one.strip().lower() for one in b",".join(values).decode("latin-1").split(",")]
    return next((one for one in codings if one not in ("", "identity")), "")


def _shutting_down() -> ApiError:
    return ApiError(503, "the gateway is shutting down; ask another one", code="shutting_down")

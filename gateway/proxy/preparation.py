"""The preparation of requests before a replica is chosen: parse the body, tokenize the prompt and hash its blocks.

Bodies of up to `OFFLOAD_BYTES` are prepared on the event loop, in batches. Longer ones are prepared in a thread, as are
short ones that turn out to take long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..errors import ApiError
from ..http.messages import Request
from ..prompt import Prompt
from ..prompt.api.named import is_form, named_model
from ..prompt.api.openai import SESSION_HEADERS, refuse_invocation
from ..prompt.long import LongPrompts
from ..prompt.offload import LOOP_SECONDS, TakesLong, event_loop
from ..prompt.pipeline import OFFLOAD_BYTES
from ..prompt.prompt import PROMPT_PATHS, unread
from ..tenants.handover import read_unprepared, refusal_of_object
from .exchange import Batcher, Exchange
from .paths import INVOCATIONS
from .placement.eligibility import Eligibility
from .placement.model_refresh import ModelRefresh
from .placement.placing import Placing
from .states import ExchangeState

if TYPE_CHECKING:
    from ..ops.metrics import Metrics
    from ..tenants.metering import Metering

log = logging.getLogger("hitherto.proxy")

TAKES_LONG = TakesLong()  # stands for a prompt that would block the event loop too long, so a thread prepares it
# A prepared prompt, or why there is none (None: the gateway failed on it), and the seconds that preparation took.
Prepared = tuple[Prompt | ApiError | TakesLong | None, float]
SAID_EVERY = 60.0  # seconds between two warnings that a prompt's tokens are not known exactly, for each path
SESSION_WORDS = frozenset(name.encode() for name in SESSION_HEADERS)
BYTES_PER_TOKEN = 4  # estimate for bodies that are not parsed
# How paths end at which engines render or count a prompt without computing it.
_RENDERS = ("/render", "/derender", "/count_tokens")


class Preparation:
    """The preparation of requests, which ends with a call of `Exchange.prepared` or `Exchange.refused`."""

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
        """Have a request's prompt prepared, in a batch or in a thread; ends with `exchange.prepared` or `.refused`."""
        if len(exchange.request.body) <= OFFLOAD_BYTES:
            self._short.add(exchange)
        else:
            self._prepare_in_thread(exchange)

    def begin_other(self, exchange: Exchange) -> None:
        """Prepare a request whose prompt the gateway does not tokenize: only its model is read, from its body.

        Calls `exchange.prepared(None)` or `exchange.refused`.
        """
        request = exchange.request
        if (request.method != "POST" and not request.body) or exchange.response is not None:
            self._ready(exchange, None)
        elif len(request.body) <= OFFLOAD_BYTES:
            self._was_read(exchange, self._read(exchange))
        else:
            self._in_thread(exchange, self._read, self._was_read)

    def _read(self, exchange: Exchange) -> tuple[str | None, ApiError | None]:
        """Return the model that a request names, or None, and the error if it has a field that is not allowed."""
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
        """Go on with a request whose prompt is not tokenized. `found`: the result of `_read`."""
        model, error = found
        exchange.names(model)
        if exchange.tenant is not None:
            error = exchange.tenant.refusal(model) or error
        if error is not None:
            exchange.refused(error)
        elif model is not None and self._eligible.is_unknown(model):
            self._run_in_background(self._prepare_again(exchange, None))
        else:
            self._ready(exchange, None)

    def _ready(self, exchange: Exchange, prompt: Prompt | None, placed: list[Exchange] | None = None) -> None:
        """Pass a prepared request on to be placed, or refuse it if it exceeds its tenant's limits.

        `prompt`: None if the gateway does not tokenize the request's prompt.
        `placed`: the list for requests of a batch that have a replica at once.
        """
        if exchange.state is ExchangeState.ENDED:  # what it claimed of the limits now would never be released
            return
        if prompt is not None and prompt.note:
            self._count(prompt)
        metering, tenant = self._metering, exchange.tenant
        tokens = prompt.tokens if prompt is not None else 0
        if metering is not None and tenant is not None:
            exchange.charged(metering.charge(tenant, tokens))
        if metering is None or (charge := exchange.charge) is None:
            exchange.prepared(prompt, placed)
            return
        if not tokens:
            charge.unread = _unread_tokens(exchange.request)

        def decided(error: ApiError | None) -> None:
            if error is None:
                exchange.run_isolated(exchange.prepared, prompt, placed)
            else:
                exchange.run_isolated(exchange.refused, error)

        metering.claim(charge, decided)
        placed = None  # `decided` may be called only later, by Redis: the batch is over by then

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._in_background.add(task)
        task.add_done_callback(self._in_background.discard)

    async def prompt(self, path: str, body: bytes, headers: Mapping[str, str], from_tenant: bool = False) -> Prompt:
        """Return the prepared prompt of a request that the gateway does not forward, as for `/decide` and `/explain`.

        If no replica is known to serve its model, the engines' model lists are read again first. Raises ApiError if the
        request is not valid, or any exception of a bug in preparation.

        `from_tenant`: refuse the fields that tenants may not use.
        """
        prompt = await self._prompt(path, body, headers, from_tenant)
        if self._eligible.is_unknown(prompt.model):  # the model may have been loaded just now
            await self._model_refresh.refresh()
            prompt = await self._prompt(path, body, headers, from_tenant)
        return prompt

    async def _prompt(self, path: str, body: bytes, headers: Mapping[str, str], from_tenant: bool) -> Prompt:
        """Prepare a prompt by the present model lists, on the event loop if that is quick, else in a thread."""

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
        """Prepare all requests of a batch, place them, then send those that have a replica at once.

        In a batch of 12, a request takes a third less CPU than alone.
        """
        event_loop.holds, event_loop.until = True, perf_counter() + LOOP_SECONDS
        try:
            prepared = []
            for exchange in exchanges:
                if exchange.state is not ExchangeState.ENDED:
                    prepared.append((exchange, self._prepare(exchange)))
        finally:
            event_loop.holds = False
        placed: list[Exchange] | None = [] if len(prepared) > 1 else None
        try:
            for exchange, (prompt, seconds) in prepared:
                if prompt is TAKES_LONG:
                    exchange.run_isolated(self._prepare_in_thread, exchange)
                else:
                    exchange.run_isolated(self._prepared, exchange, prompt, seconds, "prepare", placed)
        finally:
            for exchange in placed or ():
                exchange.run_isolated(exchange.placed)

    def _prepare_in_thread(self, exchange: Exchange) -> None:
        self._in_thread(
            exchange,
            self._prepare,
            lambda exchange, done: self._prepared(exchange, done[0], done[1], "prepare_offloaded"),
        )

    def _in_thread(
        self, exchange: Exchange, work: Callable[[Exchange], object], then: Callable[[Exchange, Any], None]
    ) -> None:
        """Call `work(exchange)` in a thread, then `then(exchange, result)` on the event loop.

        Neither is called once the exchange has ended. Until a thread begins the work, only the exchange refers to the
        request's body, so the body of a client that leaves is freed at once.
        """

        def ended(thread: asyncio.Future[Any]) -> None:
            if exchange.state is not ExchangeState.ENDED:
                exchange.run_isolated(lambda: then(exchange, thread.result()))

        thread: asyncio.Future[Any] = self.long.submit(
            len(exchange.request.body), lambda: None if exchange.state is ExchangeState.ENDED else work(exchange)
        )
        thread.add_done_callback(ended)

    def _prepare(self, exchange: Exchange) -> Prepared:
        """Return a request's prompt, or why there is none, and the seconds that this took.

        This may run in a thread, so it must not change shared state.
        """
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
        except Exception:  # a bug: the request is forwarded nevertheless, by load alone
            log.exception("preparing a request failed; it goes by load")
            return None, perf_counter() - begun
        return prompt, perf_counter() - begun

    def _prepared(
        self,
        exchange: Exchange,
        prompt: Prompt | ApiError | None,
        seconds: float,
        stage: str,
        placed: list[Exchange] | None = None,
    ) -> None:
        """Go on with what `_prepare` returned: refuse the request, or check its model and pass it on.

        `stage`: the label of the preparation's `seconds` in metrics.
        `placed`: the list for requests of a batch that have a replica at once.
        """
        if isinstance(prompt, ApiError):
            exchange.refused(prompt)
            return
        if prompt is None:
            self._metrics.prompt_failures.inc(exchange.request.path)
            self.begin_other(exchange)
            return
        exchange.stages.append((stage, seconds))
        error = None
        if exchange.tenant is not None:
            exchange.names(prompt.model)  # for the usage log, in case the request is refused before it has the prompt
            error = exchange.tenant.refusal(prompt.model)
        if error is None and not prompt.model:
            error = self._unnamed(prompt)
        if error is not None:
            exchange.refused(error)
            return
        if not prompt.kind and not self._eligible.finer:  # neither forwarding nor the choice of a replica needs the ids
            prompt.forget_ids()
            if prompt.also is not None:
                prompt.also.forget_ids()
        if prompt.model not in self._eligible.names and self._eligible.is_unknown(prompt.model):
            exchange.names(prompt.model)
            self._run_in_background(self._prepare_again(exchange, prompt))
        else:
            self._ready(exchange, prompt, placed)

    def _count(self, prompt: Prompt) -> None:
        """Count a prompt whose tokens the gateway does not know exactly; log that at most once a minute per path."""
        if prompt.media:
            self._metrics.media_prompts.inc(prompt.media)
        if prompt.declined and self._eligible.ready_for(prompt.model or None):
            self._metrics.prompt_failures.inc(prompt.path)
            if perf_counter() >= self._silent_until.get(prompt.path, 0.0):
                self._silent_until[prompt.path] = perf_counter() + SAID_EVERY
                log.warning("a prompt is not known exactly at %s: %s", prompt.path, prompt.note)

    async def _prepare_again(self, exchange: Exchange, prompt: Prompt | None) -> None:
        """Read the engines' model lists again, then go on with a request for a model that no replica seemed to serve.

        The name may be that of a LoRA adapter loaded since the last refresh. Its prompt is then prepared again, since
        the block hashes depend on the adapter.

        `prompt`: None if the gateway does not tokenize the request's prompt.
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

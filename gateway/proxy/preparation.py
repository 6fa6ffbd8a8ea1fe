"""A request becomes a prompt: short ones together at the end of the event-loop iteration, a long one in a thread."""

from __future__ import annotations

import asyncio
import functools
import heapq
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ApiError
from ..prompt import Prompt
from ..prompt.api.named import named_model
from ..prompt.offload import TakesLong, event_loop
from ..prompt.pipeline import OFFLOAD_BYTES, OFFLOAD_THREADS
from .batcher import Batcher
from .exchange import Exchange
from .newcomers import Newcomers
from .placing import Eligibility, Placing
from .states import State

if TYPE_CHECKING:
    from ..ops.metrics import Metrics

log = logging.getLogger("hitherto.proxy")

NO_PREFILL = ("tokenize", "detokenize")
ENDED = State.ENDED
# Bytes of a body above which one at a time is prepared, so that a thread is left for all others: 64 MiB take seconds.
LARGE = 256 * 1024
# A body waits for smaller ones that come later, but no longer than this: 50 kB for 50 ms, 64 MiB for a minute. It is
# what they take with the slower of the two tokenizers.
PATIENCE = 1e-6  # seconds a byte

TAKES_LONG = TakesLong()  # instead of a prompt: the event loop is not to prepare it
# The prompt, or why there is none (None: a bug of ours), and the seconds it took.
Prepared = tuple[Prompt | ApiError | TakesLong | None, float]


# A body that waits for a thread: when its patience ends, a number, and [work, its future], empty once cancelled.
Waiting = tuple[float, int, list[Any]]
T = TypeVar("T")


class LongPrompts:
    """Threads that prepare long prompts, those first whose patience ends first, and of the largest ones one at a time.

    They are of its own: what others do in threads must not wait for prompts.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(OFFLOAD_THREADS, "prepare")
        self._free = OFFLOAD_THREADS
        self._larger = False  # one that is LARGE is being prepared
        self._numbers = count()
        # Heaps: up to LARGE, and above.
        self._waiting: tuple[list[Waiting], list[Waiting]] = [], []

    def submit(self, size: int, work: Callable[[], T]) -> asyncio.Future[T]:
        """The result of `work`, which runs in a thread. Cancelled before its turn it does not run, and is let go."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        entry = [work, future]
        future.add_done_callback(lambda _: entry.clear())
        heapq.heappush(self._waiting[size > LARGE], (loop.time() + PATIENCE * size, next(self._numbers), entry))
        self._start()
        return future

    def _start(self) -> None:
        lesser, larger = self._waiting
        while self._free and (lesser or (larger and not self._larger)):
            large = bool(larger) and not self._larger and (not lesser or larger[0] < lesser[0])
            *_, entry = heapq.heappop(larger if large else lesser)
            if not entry or entry[1].cancelled():
                continue
            work, future = entry
            thread = asyncio.get_running_loop().run_in_executor(self._threads, work)
            self._free -= 1
            self._larger |= large
            thread.add_done_callback(functools.partial(self._done, future, large))

    def _done(self, future: asyncio.Future[Any], large: bool, thread: asyncio.Future[Any]) -> None:
        self._free += 1
        if large:
            self._larger = False
        self._start()
        if future.cancelled():
            return
        if (error := thread.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(thread.result())


class Preparation:
    def __init__(self, eligible: Eligibility, placing: Placing, newcomers: Newcomers, metrics: Metrics):
        self._eligible, self._placing, self._newcomers, self._metrics = eligible, placing, newcomers, metrics
        self._models = eligible.models
        self.long = LongPrompts()
        self._short = Batcher(self._together)
        self._unheard: set[asyncio.Task[None]] = set()

    def begin(self, exchange: Exchange) -> None:
        """Calls `exchange.prepared`, or `exchange.refused`."""
        if len(exchange.request.body) <= OFFLOAD_BYTES:
            self._short.add(exchange)
        else:
            self._beside(exchange)

    def begin_other(self, exchange: Exchange) -> None:
        """A request that is passed on without a look at its prompt, to replicas that serve its model."""
        request = exchange.request
        if request.method != "POST" or exchange.response is not None or not self._models.several:
            exchange.prepared(None)
            return
        content_type, body = request.header(b"content-type") or "", request.body
        if len(body) <= OFFLOAD_BYTES:
            self._named(exchange, named_model(content_type, body))
        else:
            thread = self.long.submit(len(body), functools.partial(named_model, content_type, body))
            thread.add_done_callback(lambda done: exchange.run_isolated(lambda: self._named(exchange, done.result())))

    def _named(self, exchange: Exchange, model: str | None) -> None:
        exchange.model = model
        if model is not None and self._eligible.is_unknown(model):
            self._ask_anew(self._passed_on(exchange))
        else:
            exchange.prepared(None)

    async def _passed_on(self, exchange: Exchange) -> None:
        await self._newcomers.asked()
        exchange.run_isolated(exchange.prepared, None)

    def _ask_anew(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._unheard.add(task)
        task.add_done_callback(self._unheard.discard)

    async def prompt(self, path: str, body: bytes, headers: Mapping[str, str]) -> Prompt:
        """Of a request that is not sent from here. Raises ApiError, and whatever else goes wrong."""
        models, adapters = self._models, self._eligible.adapters
        if len(body) <= OFFLOAD_BYTES:
            try:
                with event_loop:
                    return models.prepare(path, body, headers, adapters)
            except TakesLong:
                pass
        return await self.long.submit(len(body), functools.partial(models.prepare, path, body, headers, adapters))

    def _together(self, exchanges: list[Exchange]) -> None:
        """Stage by stage: where a dozen come at once, a plain request takes a third less CPU time than one by one."""
        with event_loop:
            prepared = [(exchange, self._prepare(exchange)) for exchange in exchanges if exchange.state is not ENDED]
        self._placing.begin_batch()
        try:
            for exchange, (prompt, seconds) in prepared:
                if prompt is TAKES_LONG:
                    exchange.run_isolated(self._beside, exchange)
                else:
                    exchange.run_isolated(self._prepared, exchange, prompt, seconds, "prepare")
        finally:
            self._placing.end_batch()

    def _beside(self, exchange: Exchange) -> None:
        """Others are answered meanwhile. Nothing is prepared if the client has left when its turn comes."""

        def prepared(thread: asyncio.Future[Prepared | None]) -> None:
            if (done := thread.result()) is not None:
                exchange.run_isolated(self._prepared, exchange, *done, "prepare_offloaded")

        def ended(thread: asyncio.Future[Prepared | None]) -> None:
            if exchange.state is not State.ENDED:
                exchange.run_isolated(prepared, thread)

        thread = self.long.submit(
            len(exchange.request.body), lambda: None if exchange.state is State.ENDED else self._prepare(exchange)
        )
        thread.add_done_callback(ended)

    def _prepare(self, exchange: Exchange) -> Prepared:
        """Runs in a thread for long bodies: touches nothing that changes."""
        begun, request = perf_counter(), exchange.request
        session = request.header(b"x-session-id")
        try:
            prompt = self._models.prepare(
                request.path, request.body, {"x-session-id": session} if session else None, self._eligible.adapters
            )
        except ApiError as error:
            # Its traceback holds this frame, and with it the request, until the garbage collector comes by.
            error.__context__ = error.__traceback__ = None
            return error, perf_counter() - begun
        except TakesLong:
            return TAKES_LONG, 0.0
        except Exception:  # the request still deserves an answer
            log.exception("preparing a request failed; it goes by load")
            return None, perf_counter() - begun
        return prompt, perf_counter() - begun

    def _prepared(self, exchange: Exchange, prompt: Prompt | ApiError | None, seconds: float, stage: str) -> None:
        metrics = self._metrics
        if isinstance(prompt, ApiError):
            exchange.refused(prompt)
            return
        if prompt is None:
            metrics.prompt_failures.inc(exchange.request.path)
            exchange.prepared(None)
            return
        metrics.stage_seconds.observe(stage, seconds)
        if prompt.mode == "load" and exchange.label not in NO_PREFILL:
            metrics.prompt_failures.inc(prompt.path)
        if self._eligible.is_unknown(prompt.model):
            self._ask_anew(self._anew(exchange, prompt))
        else:
            exchange.prepared(prompt)

    async def _anew(self, exchange: Exchange, prompt: Prompt) -> None:
        """Perhaps its model was loaded just now; if so, as an adapter, whose blocks are its own."""
        await self._newcomers.asked()
        if self._eligible.is_unknown(prompt.model):
            exchange.run_isolated(exchange.prepared, prompt)
        else:
            self._beside(exchange)

"""Metrics of answers by service class and model: TTFT, ITL, TPOT and total time, tokens, and the time in each phase.

They are updated at a request's first token and at its end, and for a stream under way by the sweep, four times a
second; never per token (`python -m bench.figures` measures their cost). Without service classes, limits and
`--slo-figures` there is no `Figures` object, and these metrics cost requests nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from policies.classes import DEFAULT_CLASS

from ...http.server import SWEEP_SECONDS
from ...ops.metrics import Metrics
from ..exchange import Attempt, Exchange, output_tokens, time_per_token
from ..responses.usage import Usage
from ..states import ExchangeState

if TYPE_CHECKING:
    from ...prompt import Prompt

MOST_MODELS = 64  # the most values of the model label; a gateway that serves more models counts the rest as OTHER
OTHER = "other"
UNANSWERED = frozenset((ExchangeState.PLACING, ExchangeState.TRYING))


class Figures:
    """The latency metrics of answers, with their labels and the callbacks that update them."""

    def __init__(self, metrics: Metrics, class_of: Callable[[Exchange], str] | None = None):
        """Create the metrics. `class_of(exchange)`: returns a request's service class; None: all are in one class."""
        self._metrics = metrics
        self.class_of = class_of or (lambda exchange: DEFAULT_CLASS.name)
        self.models: dict[str, None] = {}  # the values of the model label, oldest first
        metrics.know("model", self.models)

    # --- labels

    def serve(self, names: Iterable[str]) -> None:
        """Add the models that are served now to the values of the model label in metrics.

        A model that is no longer served stays a value until there are 64 (`MOST_MODELS`). Then a new model replaces it.
        Models for which no value is left are counted as "other".
        """
        served = sorted(names)
        for name in served:
            if name in self.models:
                continue
            if len(self.models) >= MOST_MODELS:
                gone = next((one for one in self.models if one not in served and one != OTHER), None)
                if gone is None:
                    self.models[OTHER] = None
                    return
                del self.models[gone]
                self._metrics.forget(gone, "model")
            self.models[name] = None

    def model_of(self, prompt: Prompt) -> str:
        """Return a prompt's model label in metrics: the requested name if it is among the values, else "other"."""
        if prompt.model in self.models:
            return prompt.model
        self.models.setdefault(OTHER)
        return OTHER

    # --- events of requests

    def first_token(self, attempt: Attempt, held_up: bool) -> None:
        """Observe a stream's time to first token, counted from the time when the request was complete.

        This is one of the `on_first` callbacks of `Settling`.
        """
        exchange: Exchange | None = attempt.exchange  # None if the gateway does not forward the request
        prompt = attempt.prompt
        if exchange is not None and prompt is not None:
            key = self.class_of(exchange), self.model_of(prompt)
            self._metrics.answer_ttft_seconds.observe(key, attempt.first_at - exchange.begun)

    def unanswered(self, exchanges: Iterable[Exchange], now: float) -> dict[tuple[str, str], list[float]]:
        """Return how many seconds each client has waited for its stream's first token, by (class, model label)."""
        waited: dict[tuple[str, str], list[float]] = {}
        for one in exchanges:
            if one.state in UNANSWERED and (prompt := one.prompt) is not None and prompt.stream:
                key = self.class_of(one), self.model_of(prompt)
                waited.setdefault(key, []).append(now - one.begun)
        return waited

    def passing(self, exchange: Exchange, attempt: Attempt, now: float) -> None:
        """Observe the inter-token latencies of a stream since the sweep last saw new reads (`attempt.seen_at`).

        Each read counts as a token. The sweep comes every `SWEEP_SECONDS`. If more time has passed since `seen_at`, the
        stream has paused for the rest of it. This pause is observed as one gap, since a mean over all reads would hide
        it.

        `now`: in monotonic seconds.
        """
        pieces = attempt.pieces - max(attempt.seen_pieces, 1)  # the first read ends no gap between tokens
        if pieces > 0 and attempt.streams and attempt.prompt is not None and not attempt.pauses and attempt.first_at:
            key = self.class_of(exchange), self.model_of(attempt.prompt)
            elapsed = now - attempt.seen_at
            if pieces > 1 and (pause := elapsed - SWEEP_SECONDS) * pieces > elapsed:
                self._metrics.answer_itl_seconds.observe(key, pause)
                elapsed, pieces = elapsed - pause, pieces - 1
            self._metrics.answer_itl_seconds.observe(key, elapsed / pieces, pieces)

    def ended(self, exchange: Exchange, outcome: str, usage: Usage | None) -> None:
        """Observe the latencies, tokens and phases of an answer, if it is complete and has status 200.

        This is one of the `on_end` callbacks of `Settling`.
        """
        attempt, prompt = exchange.attempt, exchange.prompt
        if outcome != "complete" or usage is None or attempt is None or prompt is None:
            return
        answering = exchange.first_answering
        if attempt.status != 200 or not answering.first_at:
            return
        metrics, qos = self._metrics, self.class_of(exchange)
        key, output = (qos, self.model_of(prompt)), output_tokens(attempt, usage)
        first, end = answering.first_at, attempt.ended_at
        metrics.answer_e2e_seconds.observe(key, end - exchange.begun)
        if (tpot := time_per_token(attempt, output)) is not None:
            metrics.answer_tpot_seconds.observe(key, tpot)
        if attempt.streams and not attempt.pauses and not attempt.is_continued:
            self.passing(exchange, attempt, end)
        metrics.answer_tokens.inc(*key, "input", by=usage.prompt or prompt.tokens)
        metrics.answer_tokens.inc(*key, "output", by=output)
        if usage.cached:
            metrics.answer_tokens.inc(*key, "cached", by=usage.cached)
        begun = exchange.attempts[0].begun_at
        sent = answering.begun_at if answering.leg is None else begun  # a first leg's time is part of the prefill
        prepared = exchange.prepared_at or begun
        phases = metrics.answer_phase_seconds
        phases.inc(qos, "prepare", by=prepared - exchange.begun)
        phases.inc(qos, "queue", by=max(0.0, begun - prepared))
        phases.inc(qos, "engine", by=first - sent)
        phases.inc(qos, "decode", by=end - first)
        if sent > begun:
            phases.inc(qos, "retry", by=sent - begun)

"""What is learned from answers: load that moves, costs, and whether what was predicted was delivered."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from policies import hittable

from .answers import error_status, speaks_api
from .blame import DOUBTFUL, REFUSALS, REFUSED_ALIKE, SAME, Suspicion, agree
from .drift import TOLERATED
from .life import ERROR_ANSWER, FOREIGN_ANSWER, RETRYABLE, TAIL, TAIL_BYTES, Failure, Life
from .together import Together
from .usage import Usage, read_usage

if TYPE_CHECKING:
    from policies import Placement

    from ..prompt import Prompt
    from .backend import Backend
    from .decisions import Decided
    from .dispatcher import Dispatcher

log = logging.getLogger("hitherto.proxy")

# An engine that is full is not ill. An error that is not known yet to be the replica's fault is told to its watcher as
# unconfirmed, and one that is known to be the request's counted as that.
FULL, UNCONFIRMED, REQUEST = "status 503", "unconfirmed", "request"
STREAMING_APIS = frozenset(("chat", "completions", "responses", "messages"))
STATUS_CLASS = ("0xx", "1xx", "2xx", "3xx", "4xx", "5xx", "6xx", "7xx", "8xx", "9xx")


def _of_copies(prompt: Prompt, overlap: int, cached: int | None, size: int) -> int:
    """What is predicted of the one sequence that usage speaks of, where several have the same prompt. The first finds what the
    replica held, the others what the first has left, all but the last token's block. In a stream it is the first that is
    told of; else the one that ended last, whichever that is: the prediction is the one that it agrees with."""
    each = prompt.tokens * prompt.n // prompt.copies
    left = min(hittable(each, size), len(prompt.hashes)) * size if prompt.reads_cache else 0
    return left if cached == left and not prompt.stream else overlap


class Outcomes:
    """The part of the dispatcher that is told how requests fare."""

    def __init__(self, dispatcher: Dispatcher):
        self._dispatcher = dispatcher
        self.metrics = dispatcher.metrics
        self.complete: Together[Life] = Together(self._settle_all)

    def failed(self, backend: Backend | None, kind: str) -> None:
        if backend is not None and not backend.gone:
            self.metrics.upstream_errors.inc(backend.id, kind)
            self._dispatcher.on_traffic(backend.id, kind)

    def suspect(self, life: Life, kind: str) -> None:
        """The replica answered with an error: `blame` has the rules for whose fault that is."""
        backend = life.backend
        answered = int(self.metrics.replica_requests.total(replica=backend.id, status="2xx"))
        life.suspicions += (Suspicion(backend.id, backend.replica.engine, kind, backend.record.is_witness(answered)),)
        if kind != FULL and not backend.gone:
            backend.record.failed(answered)
            if kind not in REFUSED_ALIKE:  # a client's key may be wrong: no reason to look whether the engine computes
                self._dispatcher.on_traffic(backend.id, UNCONFIRMED)

    def _decide(self, life: Life) -> None:
        """Another replica has answered the request, or refused it, so whose fault the errors before were is known."""
        if life.status in REFUSALS or life.fault in REFUSALS:
            self._count(life.suspicions, agreed=True)
        else:
            for one in life.suspicions:
                self.failed(self._dispatcher.backends.get(one.replica), one.kind)
        life.suspicions = ()

    def undecided(self, life: Life) -> None:
        """No replica answers the request any more: what errors there were is counted, and held against nobody."""
        if life.suspicions:
            self._count(life.suspicions, agree(life.suspicions))
            life.suspicions = ()

    def _count(self, suspicions: Sequence[Suspicion], agreed: bool) -> None:
        for one in suspicions:
            if one.replica in self._dispatcher.backends:
                self.metrics.upstream_errors.inc(one.replica, REQUEST if agreed and one.kind in SAME | REFUSED_ALIKE else one.kind)

    def turned_away(self, failure: Failure) -> None:
        """No replica was asked."""
        code = failure.fields.get("code") or ("no_replica_ready" if failure.status == 503 else "")
        self.metrics.rejections.inc(code if failure.status in (404, 503) and code else str(failure.status))

    def first_byte(self, life: Life | Decided) -> None:
        backend = life.backend
        if life.status >= 500 or life.fault >= 500 or (life.status in DOUBTFUL and life.suspicions):
            if life.status >= 500 and life.status not in RETRYABLE:
                self.suspect(life, "status 5xx")
            self.undecided(life)
        else:
            self._dispatcher.on_traffic(backend.id, None)
            if life.suspicions:
                self._decide(life)
        ours = life.sent_at < self._dispatcher.held_up_at  # part of that time we did not look
        learns = not life.fault and life.streams and life.status == 200 and life.prompt is not None and not ours and backend.may_learn(life.first_at)
        self._dispatcher.router.first_token(life.placement, life.first_at if life.streams else None, life.first_at - life.sent_at if learns else None)
        if life.fault:  # an error took this long, and no first token
            return
        if life.streams and not backend.gone:  # the first byte of an answer in one piece is its last as well
            self.metrics.ttft.observe(backend.id, life.first_at - life.begun)

    def assume_prefilled(self, life: Life, now: float) -> None:
        """An answer that does not stream shows no first token: take its prefill for done when it should be."""
        if life.placement.computing and now - life.sent_at > life.placement.ttft:
            self._dispatcher.router.first_token(life.placement, None)

    def _settle_all(self, lives: list[Life]) -> None:
        for life in lives:
            try:
                self._settle(life, b"".join(life.tail))
            except Exception:
                log.exception("learning from an answer failed")
                life.take_step(self._dispatcher.router.abandon, life.placement)

    def _settle(self, life: Life, tail: bytes) -> None:
        """A complete answer, which its client has: compare what was predicted with what was delivered."""
        usage, router = read_usage(tail), self._dispatcher.router
        if life.fault:  # its first bytes said so
            router.abandon(life.placement, computed=False)
        elif life.streams and life.status == 200 and (fault := error_status(tail, True)):
            life.fault = fault  # it computed the prompt, and failed later
            router.abandon(life.placement)
            if fault >= 500:
                self.failed(life.backend, ERROR_ANSWER)
        elif tail.find(life.backend.replica.dialect.abort_marker, -TAIL_BYTES) >= 0:  # the engine stopped in the middle of it
            life.fault = 503
            router.abandon(life.placement)
            self.failed(life.backend, "aborted")
        elif self._is_foreign(life, tail, usage):
            life.fault = 502
            router.abandon(life.placement, computed=False)
            self.failed(life.backend, FOREIGN_ANSWER)
        elif life.prompt is not None and life.status == 200 and not life.backend.gone:
            self.finish(life, usage)
            self._dispatcher.forwarding.settled(life, usage)
        else:
            router.abandon(life.placement, computed=not 400 <= life.status < 500)
        self.ended(life, "failed" if life.fault else "complete", usage)

    @staticmethod
    def _is_foreign(life: Life, tail: bytes, usage: Usage) -> bool:
        """Whether its client was given a stream in which no event of an inference API was."""
        if life.first_at or not life.streams or life.status != 200 or usage.prompt is not None or life.label not in STREAMING_APIS:
            return False
        return not speaks_api(tail, life.pieces <= TAIL) and life.held.get(b"content-encoding") is None

    def finish(self, life: Life | Decided, usage: Usage) -> None:
        """The complete answer to a prompt: learn from it."""
        now = monotonic()
        backend, prompt, placement = life.backend, life.prompt, life.placement
        tells_blocks = backend.replica.takes_rank(prompt.path)
        tokens = usage.completion or life.pieces
        learns = life.streams and tokens > 8 and life.first_at > self._dispatcher.held_up_at and backend.may_learn(now)
        reported = usage.cached if tells_blocks and prompt.copies and not prompt.several else None
        self._dispatcher.router.finish(placement, reported, (now - life.first_at) / (tokens - 1) if learns else None)
        self._compare(placement, backend, prompt, usage)
        if backend.intake is not None and tells_blocks:
            backend.intake.request_finished(len(prompt.hashes) - placement.held)

    def _counted_otherwise(self, backend: Backend, prompt: Prompt, counted: int) -> None:
        """The replica computed other tokens than it was chosen by. Counted each time, said the first time."""
        if (backend.id,) not in self.metrics.prompt_mismatches.values:
            log.error("replica %s counted %d prompt tokens where the gateway made %d (%s): its tokenizer or chat template is another, or a flag "
                      "changes its prompts; give the gateway the same --model and --chat-template. `hitherto doctor` compares them",
                      backend.id, counted, prompt.tokens, prompt.path)  # fmt: skip
        self.metrics.prompt_mismatches.inc(backend.id)

    def _compare(self, placement: Placement, backend: Backend, prompt: Prompt, usage: Usage) -> None:
        metrics, name, overlap = self.metrics, backend.id, placement.overlap
        metrics.prompt_tokens.inc(name, by=prompt.tokens)
        predicted = overlap if prompt.copies < 2 else _of_copies(prompt, overlap, usage.cached, placement.demand.block_size)
        metrics.predicted_cached_tokens.inc(name, by=predicted)
        if prompt.mode == "exact" and not prompt.several and usage.prompt not in (None, prompt.tokens):
            self._counted_otherwise(backend, prompt, usage.prompt)
        saved = predicted
        # What was guessed from text says nothing of a map that an engine's events keep.
        guessed = prompt.mode == "text" and backend.intake is not None
        if prompt.several or guessed or not backend.replica.takes_rank(prompt.path):
            backend.drift.aside()
        if not prompt.copies or not backend.replica.takes_rank(prompt.path) or (prompt.several and usage.cached is None):
            pass  # there is nothing to compare with
        elif usage.cached is None:
            backend.drift.unreported(overlap, prompt.tokens)
            if overlap and usage.prompt is not None and backend.replica.cached_tokens is None:
                backend.replica.cached_tokens = False
        else:
            saved = usage.cached
            backend.replica.cached_tokens = True
            metrics.reported_prompt_tokens.inc(name, by=usage.prompt or prompt.tokens)
            metrics.reported_cached_tokens.inc(name, by=saved)
            error = predicted - saved
            outcome = "equal" if error == 0 else "over" if error > 0 else "under"
            metrics.predictions.inc(name, outcome)
            if error:
                metrics.prediction_error_tokens.inc(name, outcome, by=abs(error))
            if prompt.hashes and not prompt.several and not guessed and backend.drift.reported(overlap, saved, prompt.tokens):
                self.heal(backend, f"predicted and reported cached tokens differ by more than {TOLERATED:.0%}")
        metrics.prefill_saved_tokens.inc(name, by=saved)

    def heal(self, backend: Backend, why: str) -> None:
        """Forget what is believed about a replica and learn it again from its events, or from scratch."""
        self.metrics.heals.inc(backend.id)
        log.warning("replica %s: map rebuilt: %s", backend.id, why)
        backend.drift.reset()
        if backend.intake is not None:
            backend.intake.resync()
        else:
            self._dispatcher.router.map.clear(backend.slot)

    def ended(self, life: Life, outcome: str, usage: Usage | None = None) -> None:
        metrics = self.metrics
        status = outcome if outcome in ("aborted", "cut") else STATUS_CLASS[(life.fault or life.status) // 100]
        metrics.requests.inc(life.label, status)
        if life.backend is not None and not life.backend.gone:
            metrics.replica_requests.inc(life.backend.id, status)
        if outcome == "aborted":
            metrics.client_aborts.inc(life.label)
        if life.prompt is not None:
            metrics.prompts.inc(life.prompt.mode)
        metrics.request_seconds.observe(life.label, monotonic() - life.begun)
        if self._dispatcher.on_end is not None:
            self._dispatcher.on_end(life, outcome, usage)

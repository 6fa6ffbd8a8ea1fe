"""Accounting of answers ("settling"): load, learned costs, health, and predictions compared with measurements.

The load reserved on a replica changes as an answer begins and ends, costs are learned from the answer's times, and its
success or failure is reported to the replica's health checks. The cached tokens that the engine reports are compared
with the prediction. If they keep differing, the replica's part of the map (which replica caches which KV blocks) is
rebuilt, or "healed". This module is the only caller of `Router.finish`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite
from time import monotonic
from typing import TYPE_CHECKING

from policies import Placement, Router, hittable, two_legs
from policies.outputs import LEAST_OUTPUT
from replicas import State
from replicas.engines.dialect import ANY_PATH, ERROR
from replicas.pulse import Pulse

from ..prompt.api.openai import MOST_SEQUENCES, UNKNOWN_CONTEXT
from ..prompt.prompt import GUESSED, NO_PREFILL, RESPONSES
from .exactness.drift import TOLERATED
from .exactness.forwarding import TokenIdForwarding
from .exchange import TAIL, TAIL_BYTES, Attempt, Batcher, Exchange, Legs, output_tokens
from .failures import retries
from .failures.blame import (
    DOUBTFUL,
    OVERLOADED,
    PASSED_ON,
    REFUSALS,
    REFUSED_ALIKE,
    REQUEST,
    SAME,
    UnattributedError,
    agree,
)
from .failures.retries import ABORTED, ERROR_ANSWER, KINDS, LEG_REFUSED, Next, of_status
from .placement import pulling
from .responses import answers
from .responses.answers import error_status
from .responses.usage import NEVER_TELL_CACHED, NOTHING, Usage, believed, read_usage
from .states import BROKEN_OFF, AttemptEvent, AttemptState, Leg

if TYPE_CHECKING:
    from ..errors import ApiError
    from ..http.upstream import Head
    from ..ops.metrics import Metrics
    from ..prompt import Prompt
    from .backend import Backend

log = logging.getLogger("hitherto.proxy")

OTHER_ERROR = "status 5xx"  # any 5xx that is not retried on another replica
# Outcomes of legs (prefill, decode) in metrics. A leg that was refused, or whose KV cache was not kept for the other
# leg, has not failed: the request goes on in one leg.
COMPLETE, ABANDONED, FAILED = "complete", "abandoned", "failed"
LEG_OUTCOMES = {COMPLETE: COMPLETE, ABANDONED: ABANDONED, retries.NOT_KEPT: retries.NOT_KEPT, LEG_REFUSED: "refused"}
STREAMING_APIS = frozenset(("chat", "completions", "responses", "messages"))
STATUS_CLASS = ("0xx", "1xx", "2xx", "3xx", "4xx", "5xx", "6xx", "7xx", "8xx", "9xx")

PACE_WEIGHT = 0.2  # weight of the last non-streamed answer in the mean seconds per token of such answers
# From a non-streamed answer, the seconds of a KV transfer are learned only if they were predicted to be at least this
# share of the decode time: fewer seconds drown in the error of that time's prediction.
LEAST_MOVED = 0.5
# How long a first leg (prefill) may outlast the second leg's first token. Its answer comes at about that time, and if
# its connection were closed before, the decoder might lose the cache.
TRAILS_SECONDS = 10.0
# A request that has waited this long shows that its replica computes, if the replica is still ready. Otherwise its
# counters would have stood still too long (`replicas.progress.STALLED`, the time between two readings of its metrics,
# and as long again for a probe).
COMPUTES_SECONDS = 30.0
# A replica that refuses a request because it is full is tried last for FULL_SECONDS, or for the time in its Retry-After
# header. MOST_FULL_SECONDS bounds that time, because the replica may have refused only one client's API key.
FULL_SECONDS, MOST_FULL_SECONDS = 1.0, 60.0

# Bounds above which reported usage is not believed: UTF-8 bytes per character (a token has at least one byte), tokens
# that an engine may add to a prompt, and turns in one answer at /v1/responses, where engines call tools of their own
# and generate again.
LONGEST_CHARACTER, MOST_ADDED, MOST_TURNS = 4, 4096, 16

OnTraffic = Callable[[str, str | None, int], None]  # (replica's id, kind of failure or None, number of answers)
OnFirst = Callable[[Attempt, bool], None]  # the bool: whether the event loop was stalled while the token came
OnEnd = Callable[[Exchange, str, Usage | None], None]  # (exchange, outcome, usage)


def _of_copies(prompt: Prompt, predicted: int, cached: int | None, size: int, drops: bool) -> int:
    """Return the cached tokens to expect in the usage of a request for several answers to one prompt (`n`).

    Usage reports the cached tokens of only one sequence (answer):

    - A stream reports on the first sequence. It finds the blocks that the replica had cached before (`predicted`).
    - Other answers report on the sequence that ended last, which may be the first or a later one. A later one finds all
      full blocks before the prompt's last token, since the first one has computed them. So of the two predictions, the
      one that equals the report is returned.

    `predicted`: cached tokens predicted for the first sequence.
    `cached`: the reported ones, None if there is no report.
    `size`: tokens per block.
    `drops`: whether the replica recomputes the last block that it finds in its cache.
    """
    each = prompt.tokens * prompt.n // prompt.copies
    left = max(0, min(hittable(each, size), len(prompt.hashes)) - drops) * size if prompt.reads_cache else 0
    return left if cached == left and not prompt.stream else predicted


class Settling:
    """The accounting of requests, which updates load, costs, health and metrics by their answers."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        router: Router,
        metrics: Metrics,
        forwarding: TokenIdForwarding,
        on_traffic: OnTraffic,
        pulse: Pulse,
        when_full: Callable[[Backend, float], None],
    ):
        """Create the accounting.

        `on_traffic(replica, kind, count)`: reports to the health checks that a replica failed in this way, or, if
            `kind` is None, that it answered `count` requests.
        `when_full(backend, until)`: marks a replica that refuses a request as full, until a time in monotonic seconds.
        """
        self._backends, self._router, self.metrics, self._forwarding = backends, router, metrics, forwarding
        self.on_traffic, self.pulse, self._when_full = on_traffic, pulse, when_full
        # Called for every request that ends, with its outcome and usage, and for the first token of every stream.
        self.on_end: list[OnEnd] = []
        self.on_first: list[OnFirst] = []
        self.complete = Batcher(self._settle_all)

    # --- reports to health

    def tell(self, backend: Backend, kind: str) -> None:
        """Report a failure of a replica to the health checks, after the answers that came before it."""
        self.tell_answers()
        self.on_traffic(backend.id, kind, 1)

    def tell_answers(self, replica: str | None = None) -> None:
        """Report to the health checks how many requests replicas have answered since the last report.

        Reporting answers one by one would cost six more calls per request. This is called a few times a second, and
        before each report of a failure, because the health checks compare failures with the answers of other ranks and
        engines.

        `replica`: the id of the one replica to report on, before a probe of it is evaluated; None: all replicas.
        """
        backends = self._backends
        told = backends.values() if replica is None else [backends[replica]] if replica in backends else ()
        for backend in told:
            count, backend.answers = backend.answers, 0
            if count:
                self.on_traffic(backend.id, None, count)

    # --- failures

    def blame(self, backend: Backend | None, kind: str) -> None:
        """Count a failure that is the replica's fault, and report it to the health checks.

        Does nothing if `backend` is None or was removed.
        """
        if backend is not None and not backend.gone:
            self.metrics.upstream_errors.inc(backend.id, kind)
            self.tell(backend, kind)

    def record_error(self, exchange: Exchange, attempt: Attempt, kind: str) -> None:
        """Record an error answer in the exchange, so that the rules in `blame` can decide whose fault it is later.

        A full replica is marked as full. Any other error counts as one more failure in a row of this replica. Unless it
        is a 401, 403 or 404, it is also reported to the health checks, as unconfirmed.

        A decoder that may only have failed to fetch the prompt's KV cache is no witness against the request.
        """
        backend = attempt.backend
        witness = backend.is_witness and not attempt.could_not_fetch(kind)
        exchange.erred(UnattributedError(backend.id, backend.replica.engine, kind, witness))
        if kind in OVERLOADED:
            self._when_full(backend, monotonic() + seconds_full(attempt.response_head))
        elif not backend.gone:
            backend.failures += 1
            if kind not in REFUSED_ALIKE:  # a client's key may be wrong, which is no reason to probe the engine
                self.tell(backend, retries.UNCONFIRMED)

    def _attribute(self, exchange: Exchange, attempt: Attempt) -> None:
        """Decide whose fault a request's earlier errors were, now that another replica has answered it or refused it.

        If that replica refused the request, the request was at fault. If it answered the request, the replicas that had
        failed the request were at fault.
        """
        if attempt.status in REFUSALS or attempt.fault in REFUSALS:
            self._count(exchange.attributed(), agreed=True)
        else:
            for one in exchange.attributed():
                self.blame(self._backends.get(one.replica), one.kind)

    def close_unattributed(self, exchange: Exchange) -> None:
        """Count the errors of a request that no replica has answered, without blaming any replica for them."""
        if exchange.unattributed_errors:
            errors = exchange.attributed()
            self._count(errors, agree(errors))

    def _count(self, unattributed_errors: Sequence[UnattributedError], agreed: bool) -> None:
        """Count errors in metrics. `agreed`: two engines answered alike, so the errors are the request's fault."""
        for one in unattributed_errors:
            if one.replica in self._backends:
                self.metrics.upstream_errors.inc(
                    one.replica, REQUEST if agreed and one.kind in SAME | REFUSED_ALIKE else one.kind
                )

    def turned_away(self, error: ApiError) -> None:
        """Count a request that was refused before any replica was asked."""
        code = error.code or ("no_replica_ready" if error.status == 503 else "")
        self.metrics.rejections.inc(code if error.status in (404, 503) and code else str(error.status))

    def release(self, attempt: Attempt, computed: bool) -> None:
        """Release the load reserved for an attempt, without learning costs from it.

        `computed`: whether its replica may have computed the prompt, and so may have the prompt's blocks cached.
        """
        self._router.abandon(attempt.placement, computed=computed)

    # --- two legs

    def leg_ended(self, leg: Leg, kind: str = COMPLETE) -> None:
        """Count in metrics how a leg of a request (prefill or decode) ended; must be called once for each leg.

        `kind`: the kind of its failure (`retries.KINDS`), or COMPLETE, or ABANDONED if it was not needed any more.
        """
        outcome = LEG_OUTCOMES.get(kind, FAILED)
        self.metrics.legs.inc(leg.value, outcome)
        if outcome == FAILED:
            self.metrics.leg_failures.inc(leg.value, kind)

    def handed_over(self, exchange: Exchange, first: Attempt, legs: Legs) -> None:
        """Account for a complete first leg (prefill): release its load and learn the cost of its prefill.

        Its cached tokens are compared with the prediction.
        """
        backend, placement, prompt, usage = first.backend, first.placement, first.prompt, legs.usage
        assert prompt is not None and usage is not None
        backend.answers += 1
        if exchange.unattributed_errors:
            self._attribute(exchange, first)
        learns = self.pulse.saw(first.sent_at, first.first_at) and backend.may_learn(first.first_at)
        self._router.first_token(placement, first.first_at, first.first_at - first.sent_at if learns else None)
        tells_blocks = backend.replica.takes_rank(prompt.path)
        self._router.finish(placement, usage.cached if tells_blocks else None)
        self.leg_ended(Leg.PREFILL)
        if backend.gone:
            return
        self.metrics.replica_requests.inc(backend.id, "2xx")
        self._compare(placement, backend, prompt, usage, tells_blocks, exchange.request.body)
        if tells_blocks:
            self._tell_intake(backend, placement, prompt)

    def _transferred(self, second: Attempt, legs: Legs, writing: float, learns: bool) -> None:
        """Record how long the KV transfer of a second leg (decode) took.

        This is the time from sending the leg to its first byte, without the time in which the first leg still ran, and
        without the time of the decoder's own work.

        `writing`: the predicted seconds of decoding before the first byte, for an answer that is not streamed.
        `learns`: whether to learn the cost of transfers from it. This is only done if the sending replica was ready all
            the time.
        """
        seconds = second.first_at - second.sent_at - max(0.0, legs.computed_at - second.sent_at)
        moving = two_legs.moving_seconds(second.placement, seconds - writing) - legs.computing
        self.metrics.transfer_seconds.observe(second.backend.id, legs.arrived(moving))
        self.metrics.predicted_transfer_seconds.inc(second.backend.id, by=legs.moving)
        sender = legs.prefiller.replica
        if learns and sender.state is State.READY and sender.since <= second.sent_at:
            self._router.transfers.observe(legs.prefiller.id, legs.decoder.id, legs.moved, moving, second.first_at)

    def prefilled_elsewhere(self, legs: Legs, computed: bool) -> None:
        """End the accounting of a first leg (prefill) after the second one was answered or has failed.

        If both legs run at the same time, the first leg is given `TRAILS_SECONDS` (10 s) to end after the second leg's
        answer has begun, since its own answer comes at about that time. If the second leg has failed, the first one is
        dropped now. If an engine sent the first leg itself, its end is not seen here, so the load reserved for it is
        released now.

        `computed`: whether the second leg was answered, which shows that the prompt was computed.
        """
        if legs.first is not None:
            if computed:
                asyncio.get_running_loop().call_later(TRAILS_SECONDS, self.drop_first, legs)
            else:
                self.drop_first(legs)
        if (placement := legs.take_unsent()) is None:
            return
        if not computed:
            self._router.abandon(placement, computed=False)
            return
        self._router.first_token(placement, None)
        self._router.answered(placement, monotonic())
        self._router.finish(placement)
        self.leg_ended(Leg.PREFILL)
        legs.prefiller.drift.exclude()  # its cached tokens are not reported

    def drop_first(self, legs: Legs) -> None:
        """Drop the first leg (prefill) of a request if it still runs, and release its load."""
        first = legs.take_first()
        if first is not None and first.state is not AttemptState.ENDED:
            first.end_as(AttemptEvent.DROPPED)
            self.release(first, computed=first.sent_at > 0)
            self.leg_ended(Leg.PREFILL, ABANDONED)

    def drop_unsent(self, legs: Legs) -> None:
        """Drop the first leg (prefill) of a request if it was not sent yet, since the second one is being answered."""
        if legs.first is not None and not legs.first.sent_at:
            self.drop_first(legs)

    def drop_legs(self, exchange: Exchange) -> None:
        """End the legs of a request that fails, or goes on with one replica for prompt and answer.

        Its first leg (prefill) is dropped if it still runs, and the load reserved for a leg that was not sent is
        released. The load of a leg that was sent is released with its attempt.
        """
        legs = exchange.leave_legs()
        if legs is not None:
            self.drop_first(legs)
            for placement in (legs.placement, legs.unsent):
                if placement is not None:
                    self._router.abandon(placement, computed=False)

    def leg_failed(self, exchange: Exchange, attempt: Attempt, kind: str, following: Next) -> None:
        """Account for a leg that failed, and decide whether the request may be split into legs again.

        If the decoder may not have got the prompt's KV cache, this pair of replicas is not chosen for a while.

        `kind`: the kind of failure.
        `following`: what follows for the request.
        """
        legs, leg = exchange.legs, attempt.leg
        if legs is None or leg is None:
            return
        self.leg_ended(leg, kind)
        exchange.stay_whole(following is Next.WHOLE)
        if following is Next.LEGS or attempt.could_not_fetch(kind) or (leg is Leg.DECODE and kind == retries.HUNG):
            self._router.transfers.failed(legs.prefiller.id, legs.decoder.id, monotonic())
        if following is not Next.DECODER:
            self.drop_legs(exchange)

    # --- the first byte

    def answered(self, exchange: Exchange, attempt: Attempt) -> None:
        """Account for the first byte of an answer: decide whose fault earlier errors were, and end the prefill.

        If the answer is an error that is passed to the client because no retry or no other replica is left, the
        request's errors are counted without blaming a replica.
        """
        backend = attempt.backend
        if (status := attempt.fault or attempt.status) >= 500 or (status in DOUBTFUL and exchange.unattributed_errors):
            if attempt.status >= 500 and attempt.status not in retries.RETRYABLE:
                self.record_error(exchange, attempt, OTHER_ERROR)
            self.close_unattributed(exchange)
        else:
            backend.answers += 1
            if exchange.unattributed_errors:
                self._attribute(exchange, attempt)
        if not attempt.came_whole:  # else `finish` accounts for all of it at once
            self.first_token(attempt, exchange.begun)

    def first_token(self, attempt: Attempt, since: float) -> None:
        """Record an attempt's first byte: end its prefill in the load ledger, learn its TTFT, and update metrics.

        The load of a second leg decodes from its reservation on; only the time of its KV transfer is learned.

        `since`: when the client began to wait, in monotonic seconds.
        """
        backend, at = attempt.backend, attempt.first_at
        ok = attempt.status == 200 and not attempt.fault
        ours = attempt.streams and not self.pulse.saw(attempt.sent_at, at)
        tells = ok and attempt.streams and attempt.prompt is not None and not (ours or attempt.seen_late)
        learns = tells and backend.may_learn(at)
        self._router.first_token(
            attempt.placement, at if ok and attempt.streams else None, at - attempt.sent_at if learns else None
        )
        if ok and not attempt.streams:
            self._router.answered(attempt.placement, at)
        if attempt.leg is not None and (legs := attempt.exchange.legs) is not None:
            self.prefilled_elsewhere(legs, ok)
            if ok and attempt.streams and not backend.gone:
                self._transferred(attempt, legs, 0.0, learns)
        # The first byte of an error is no first token, and a non-streamed answer comes only with its last token.
        if not attempt.fault and attempt.streams and not backend.gone:
            self.metrics.ttft_seconds.waiting[()].append(at - since)
            self.metrics.replica_ttft_seconds.waiting[backend.id,].append(at - attempt.sent_at)
            if attempt.status == 200:
                for told in self.on_first:
                    told(attempt, ours)

    def look_for_first(self, exchange: Exchange, attempt: Attempt, now: float) -> None:
        """Search the last bytes of a stream for output, if its first bytes were relayed before they showed any.

        If there is output, `now` (monotonic seconds) becomes the time of the first token, marked as too late to learn
        from.
        """
        if attempt.status == 200 and answers.has_begun(
            exchange.label, b"".join([one[-TAIL_BYTES:] for one in attempt.tail])
        ):
            attempt.show_first(now, late=True)
            if attempt.is_continued:  # the stream's first token came from another replica
                self._router.first_token(attempt.placement, now)
            else:
                self.first_token(attempt, exchange.begun)

    def came(self, attempt: Attempt) -> None:
        """Add a stream's reads since the last sweep to its load as tokens; a read has one token, or sometimes a few."""
        if not attempt.first_at and attempt.streams:
            self.look_for_first(attempt.exchange, attempt, monotonic())
        if attempt.streams:
            self._router.came(attempt.placement, attempt.pieces - attempt.seen_pieces)

    def joined(self, attempt: Attempt) -> None:
        """Account for the first byte of an attempt that resumes another replica's stream."""
        backend, at = attempt.backend, attempt.first_at
        backend.answers += 1
        if attempt.exchange.unattributed_errors:
            self._attribute(attempt.exchange, attempt)
        if not at:  # its bytes so far show no output: `look_for_first` follows
            return
        learns = self.pulse.saw(attempt.sent_at, at) and backend.may_learn(at)
        self._router.first_token(attempt.placement, at, at - attempt.sent_at if learns else None)

    def still_unanswered(self, attempt: Attempt, now: float) -> None:
        """Update the load of a request that has no byte of an answer yet; called at each sweep.

        The prefill of a non-streamed answer is assumed to be done after its predicted time. A long unanswered request
        makes its replica count as late. After 30 s (`COMPUTES_SECONDS`) it no longer does if the replica is still
        ready, since that shows that the replica is computing.

        `now`: in monotonic seconds.
        """
        placement, waited = attempt.placement, self.pulse.ran(attempt.sent_at, now)
        if not attempt.streams and placement.computing and waited > placement.ttft:
            self._router.first_token(placement, None)
        if waited > COMPUTES_SECONDS and attempt.backend.replica.state is State.READY:
            self._router.disregard(placement)

    # --- the end

    def _settle_all(self, exchanges: list[Exchange]) -> None:
        """Account for a batch of complete answers, then for the end of their requests."""
        for exchange in exchanges:
            attempt, usage = exchange.attempts[-1], None
            try:
                usage = self._settle(exchange, attempt, b"".join(attempt.tail))
            except Exception:
                log.exception("learning from an answer failed")
                exchange.run_isolated(self._router.abandon, attempt.placement)
            self.ended(exchange, "failed" if attempt.fault else "complete", usage)

    def _settle(self, exchange: Exchange, attempt: Attempt, tail: bytes) -> Usage:
        """Account for a complete answer; return the token usage that its last bytes (`tail`) report."""
        prompt, backend = attempt.prompt, attempt.backend
        depth = 2 if attempt.streams and exchange.tells_response else 1
        usage = read_usage(tail, depth)
        if usage is NOTHING and attempt.usage is not None:
            usage = attempt.usage.usage(depth)
        if usage is not NOTHING:
            record = exchange.stream_record
            whole = record.prompt if attempt.is_continued and record is not None else prompt
            sequences = 1 if exchange.response is not None else MOST_SEQUENCES
            usage = believed(usage, *most_tokens(backend, whole, sequences))
        # If the answer to a prompt came in one read, `Handler.on_body` has checked its end with its first bytes.
        seen = attempt.pieces == 1 and attempt.first_at and prompt is not None
        ended = COMPLETE
        if attempt.leg is not None:
            ended = self._leg_answered(exchange, attempt, tail)
            if exchange.legs is not None and not attempt.first_at:  # no first byte was accounted for
                self.prefilled_elsewhere(exchange.legs, attempt.status == 200)
        if attempt.fault:  # seen in its first bytes
            self.release(attempt, computed=False)
        elif not seen and (late := self._late_failure(exchange, attempt, tail, usage)) is not None:
            fault, ended, computed = late
            attempt.found_error(fault, computed)
            self.release(attempt, attempt.computed)
            if attempt.fault >= 500:
                self.blame(backend, ended)
            else:
                ended = LEG_REFUSED
        elif prompt is not None and attempt.status == 200 and not backend.gone:
            if not attempt.first_at and attempt.streams:
                self.look_for_first(exchange, attempt, attempt.ended_at)
            self.finish(attempt, prompt, usage)
            if not attempt.is_continued:
                self._forwarding.settled(attempt, prompt, exchange.request, usage)
        else:
            self.release(attempt, computed=not 400 <= attempt.status < 500)
        if attempt.leg is not None and attempt.error is None:  # else it was counted when it failed
            self.leg_ended(attempt.leg, ended)
        return usage

    def _leg_answered(self, exchange: Exchange, attempt: Attempt, tail: bytes) -> str:
        """Return how a second leg (decode) ended whose answer was passed to the client.

        The result is COMPLETE or the kind of failure, as the answer's head and first bytes show.
        """
        if attempt.fault >= 500:
            return ABORTED if cut_short(attempt, exchange.request.path, tail[-TAIL_BYTES:]) else ERROR_ANSWER
        if attempt.status == 200 and not attempt.fault:
            return COMPLETE
        if of_status(attempt.status) in KINDS:
            return of_status(attempt.status)
        return LEG_REFUSED if attempt.fault or attempt.status < 500 else OTHER_ERROR

    def _late_failure(
        self, exchange: Exchange, attempt: Attempt, tail: bytes, usage: Usage
    ) -> tuple[int, str, bool] | None:
        """Return the failure that an answer's last bytes show, or None.

        A failure is (the status that it amounts to, its kind, whether the prompt was computed).

        `tail`: the last bytes.
        """
        is_stream, whole = attempt.streams and attempt.status == 200, attempt.pieces <= TAIL
        if is_stream and (fault := error_status(tail, True)):
            # If the stream began with the error, nothing was computed. Only without a prompt can that be seen here: if
            # there is one, the judge has checked the stream's first bytes.
            began_as_error = attempt.prompt is None and whole and error_status(attempt.tail[0], True) > 0
            return fault, ERROR_ANSWER, not began_as_error
        if cut_short(attempt, exchange.request.path, tail[-TAIL_BYTES:]):
            return 503, ABORTED, True
        if attempt.first_at or not is_stream or usage.prompt is not None or exchange.label not in STREAMING_APIS:
            return None
        if answers.speaks_api(tail, whole) or attempt.response_head.get(b"content-encoding") is not None:
            return None
        # The client was sent a stream without a single event of an inference API.
        return 502, retries.FOREIGN_ANSWER if answers.says_anything(tail) else ERROR_ANSWER, False

    def finish(self, attempt: Attempt, prompt: Prompt, usage: Usage) -> None:
        """Account for the complete answer to a prompt: release its load, learn costs, update metrics.

        It learns the seconds per output token, the length of answers and the seconds of a KV transfer. It leaves out
        any of these that this answer does not show well, for example after a stall of the event loop. The cached tokens
        in `usage` are compared with the prediction.
        """
        now = monotonic()
        backend, placement = attempt.backend, attempt.placement
        rank_paths = placement.candidate.rank_paths
        tells_blocks = rank_paths is None or prompt.path in rank_paths
        _, completion, cached = usage
        tokens = output_tokens(attempt, usage) if completion is None else completion
        learns = (
            attempt.streams
            and not (attempt.is_continued or attempt.seen_late)  # a resumed stream's usage covers the whole stream
            and tokens > LEAST_OUTPUT
            and self.pulse.saw(attempt.first_at, now)
            and backend.may_learn(now)
        )
        # The cached tokens of other answers show nothing about the replica: a second leg's cache came from another one,
        # and the usage of a resumed stream covers the whole stream.
        whole = attempt.leg is None and not attempt.is_continued
        reported = cached if whole and tells_blocks and prompt.copies and not prompt.several else None
        # The length of an answer that the gateway capped is not known; learning from shorter ones alone would mislead.
        tells_length = not (prompt.several or attempt.is_continued or prompt.capped)
        output = tokens if tokens and tells_length else None
        self._router.finish(
            placement,
            reported,
            (now - attempt.first_at) / (tokens - 1) if learns else None,
            output,
            attempt.first_at if attempt.came_whole else None,
        )
        if completion and completion > LEAST_OUTPUT and attempt.sent_at and not attempt.streams and attempt.leg is None:
            pace = (now - attempt.sent_at) * prompt.sequences / completion
            backend.pace += (pace - backend.pace) * (PACE_WEIGHT if backend.pace else 1.0)
        if attempt.leg is Leg.DECODE and not attempt.streams and completion and (legs := attempt.exchange.legs):
            on_time = self.pulse.saw(attempt.sent_at, now) and backend.may_learn(now)
            # Predictions alone decide whether to learn. Where decoding takes most of the time, the rest is mostly the
            # error of its prediction, and choosing by the measured rest would select large errors.
            writing = two_legs.writing_seconds(placement, completion)
            if legs.moving >= writing * LEAST_MOVED:
                self._transferred(attempt, legs, writing, on_time)
        timed = not attempt.streams or (attempt.first_at > 0 and not attempt.seen_late)
        if tokens > 1 and timed and not (prompt.several or attempt.is_continued):
            # A non-streamed answer does not show when its first token was written.
            begun = attempt.first_at if attempt.streams else attempt.sent_at + placement.ttft
            if now > begun:
                self.metrics.replica_decode_seconds.values[backend.id,] += now - begun
                self.metrics.replica_decode_tokens.values[backend.id,] += tokens - 1
        if whole:
            body = b"" if attempt.exchange is None else attempt.exchange.request.body  # none if not forwarded here
            self._compare(placement, backend, prompt, usage, tells_blocks, body)
        else:
            backend.drift.exclude()
        if tells_blocks and backend.intake is not None:
            self._tell_intake(backend, placement, prompt)

    def _counted_otherwise(self, backend: Backend, prompt: Prompt, counted: int, made: int, body: bytes) -> None:
        """Record that the replica counted another number of prompt tokens than the gateway.

        For prompts in mode "exact" this is counted each time in metrics, and logged once per replica. After a second
        such body of a kind (template, tools or none, shape of the content), the tokens of that kind's prompts no longer
        count as exactly known.

        `counted`, `made`: the replica's and the gateway's number of tokens of the prompt.
        """
        why = f"it counted {counted} tokens of a prompt of {made} at {prompt.path}"
        self._forwarding.made_otherwise(backend.id, prompt, body, why)
        if prompt.mode == "text":
            return
        if (backend.id,) not in self.metrics.prompt_mismatches.values:
            log.error("replica %s counted %d prompt tokens where the gateway made %d (%s): its tokenizer or chat template is another, or a flag "
                      "changes its prompts; give the gateway the same --model and --chat-template. `hitherto doctor` compares them",
                      backend.id, counted, made, prompt.path)  # fmt: skip
        self.metrics.prompt_mismatches.inc(backend.id)

    def _compare(
        self, placement: Placement, backend: Backend, prompt: Prompt, usage: Usage, tells_blocks: bool, body: bytes
    ) -> None:
        """Compare the prompt and cached tokens that an engine reports with the gateway's prediction.

        Updates the metrics of both. If predictions keep differing, the replica's part of the map of cached blocks is
        rebuilt.

        `tells_blocks`: whether the engine computes requests to this path on this very replica (data-parallel rank), so
            that its cached tokens are those of the replica.
        `body`: the request's body, b"" if it is freed; needed where the numbers of prompt tokens differ.
        """
        counted, _, cached = usage
        metrics, name, held, size = self.metrics, backend.id, placement.predicted, placement.demand.block_size
        series = (name,)
        metrics.prompt_tokens.values[series] += prompt.tokens
        if cached is not None and placement.pull is not None:
            # For a prompt that fills its last block, the engine's KV connector reports all tokens as found. But the
            # last token is computed anyway, and whether the other replica has that block was not asked.
            cached = min(cached, hittable(prompt.tokens, size) * size)
        predicted = held
        if prompt.copies > 1:
            drops = backend.slot >= 0 and self._router.map.drops(backend.slot)
            predicted = _of_copies(prompt, held, cached, size, drops)
        metrics.predicted_cached_tokens.values[series] += predicted
        made = prompt.tokens if prompt.mode in ("exact", "media") else prompt.made
        if counted is not None and made is not None and not prompt.several:
            if counted != made:
                self._counted_otherwise(backend, prompt, counted, made, body)
            elif prompt.doubted:
                self._forwarding.made_alike(name, prompt)
        saved = predicted
        # Prompts whose tokens are guessed show nothing about a map that an engine's KV events maintain.
        guessed = prompt.mode != "exact" and backend.intake is not None
        if guessed and prompt.mode not in GUESSED:
            # An engine that finds more may hash images differently (by its flags), which is no fault of the map.
            guessed = prompt.mode == "media" and cached is not None and cached > held
        if prompt.several or guessed or not tells_blocks:
            backend.drift.exclude()
        if not prompt.copies or not tells_blocks or (prompt.several and cached is None):
            pass  # the report, if there is one, cannot be compared with the prediction
        elif cached is None:
            backend.drift.unreported(placement.overlap, prompt.tokens)  # the engine counts fetched tokens separately
            told = counted is not None and prompt.path not in NEVER_TELL_CACHED
            if placement.pull is not None:
                saved -= placement.pull.tokens  # it is not known whether they came
                metrics.peer_pulls.inc(name, "unknown")
            if held and told and backend.replica.cached_tokens is None:
                backend.replica.cached_tokens = False
        else:
            saved = cached
            backend.replica.cached_tokens = True
            metrics.reported_prompt_tokens.values[series] += counted or prompt.tokens
            metrics.reported_cached_tokens.values[series] += saved
            error = predicted - saved
            scrape = backend.replica.scrape
            looks_further = scrape is not None and bool(scrape.external_queries)
            outcome = "equal" if error == 0 else "over" if error > 0 else "under"
            metrics.predictions.values[name, outcome] += 1
            if error:
                metrics.prediction_error_tokens.inc(name, outcome, by=abs(error))
            if placement.pull is not None and not pulling.ended(self._router, metrics, placement, saved):
                backend.drift.exclude()  # a failed pull is no evidence about the replica's own cache
            elif saved > held and looks_further and not self._router.map.holds_below(backend.slot):
                # It searches slower cache tiers whose contents it does not report, so the map is not at fault.
                backend.drift.exclude()
            elif (
                prompt.hashes
                and not prompt.several
                and not guessed
                and backend.drift.reported(
                    # Only the engine knows which parts of a block it has cached, so less than a block is no difference.
                    held,
                    held if backend.is_finer and abs(held - saved) < size else saved,
                    prompt.tokens,
                    placement.fetched,
                    size,
                )
            ):
                self.heal(backend, f"predicted and reported cached tokens differ by more than {TOLERATED:.0%}")
            self._follow_offset(backend, size)
        metrics.prefill_saved_tokens.values[series] += saved

    def _tell_intake(self, backend: Backend, placement: Placement, prompt: Prompt) -> None:
        """Report to the intake of KV events how many blocks of a complete request were new to the replica.

        The intake then expects events for these blocks.
        """
        if backend.intake is not None and not prompt.media:  # which blocks an image or audio takes is not known
            again = backend.slot >= 0 and self._router.map.drops(backend.slot)
            backend.intake.request_finished(len(prompt.hashes) - placement.overlap_blocks - again)

    def compare_counts(self, backend: Backend, queries: float | None, hits: float | None, idle: bool) -> None:
        """Compare an engine's cache counters, read from its metrics, with the predictions since they were last read.

        If they differ too much, the replica's part of the map of cached blocks is rebuilt.

        `queries`, `hits`: prompt tokens looked up in the cache, and found there, in all; None if not reported.
        `idle`: whether no request is in flight at the replica.
        """
        size = backend.event_format[0] if backend.event_format else 0
        if backend.drift.counted(queries, hits, idle, size):
            self.heal(backend, "the engine's own count of cached tokens differs from what was predicted")
        self._follow_offset(backend, size)

    def _follow_offset(self, backend: Backend, size: int) -> None:
        """Predict one cached block less, or one more, from now on if the recent answers all show that difference.

        The replica's map then says whether the engine recomputes (drops) the last block of each hit. `size`: tokens per
        block.
        """
        offset, prefixes = backend.drift.offset, self._router.map
        if not offset or abs(offset) != size or backend.gone or prefixes.drops(backend.slot) == (offset > 0):
            return
        prefixes.drop(backend.slot, offset > 0, backend.replica.looks_to_end)
        backend.drift.reset()
        log.info("replica %s: its answers show that it %s the last block of what it finds, so %s is predicted from here on",
                 backend.id, *(("computes", "a block less") if offset > 0 else ("keeps", "a block more")))  # fmt: skip

    def follow_drop(self, backend: Backend) -> None:
        """Adapt predictions to the engine's report of whether it recomputes the last cached block that it finds.

        If answers later show that the report is wrong, `_follow_offset` corrects the predictions.
        """
        replica = backend.replica
        drops = replica.drops_block and not replica.looks_ahead
        if drops != backend.said_to_drop:
            backend.said_to_drop = drops
            self._router.map.drop(backend.slot, drops, replica.looks_to_end)

    def heal(self, backend: Backend, why: str) -> None:
        """Clear a replica's part of the map of cached blocks, and have its KV events, or new requests, fill it again.

        `why`: the reason, for the log.
        """
        self.metrics.heals.inc(backend.id)
        log.warning("replica %s: map rebuilt: %s", backend.id, why)
        backend.drift.reset()
        if backend.intake is not None:
            backend.intake.resync()
        else:
            self._router.map.clear(backend.slot)

    def ended(self, exchange: Exchange, outcome: str, usage: Usage | None = None) -> None:
        """Count a request that has ended in metrics, and call the `on_end` callbacks.

        `outcome`: "complete" (the client has a replica's whole answer, whatever its status), "failed" (it has a whole
            200 with an error in it), "refused" (the gateway answered with an error, also after attempts), "aborted"
            (the client left) or "cut" (the answer broke off). The legs of a request that failed are dropped by now.
        """
        metrics, attempt, now = self.metrics, exchange.attempts[-1] if exchange.attempts else None, monotonic()
        if outcome in BROKEN_OFF:
            status = outcome
        elif exchange.status or attempt is None:
            status = STATUS_CLASS[exchange.status // 100]
        else:
            answer = attempt.fault or attempt.status
            status = STATUS_CLASS[answer // 100]
            if answer in PASSED_ON:
                metrics.rejections.inc(PASSED_ON[answer])
        metrics.requests.values[exchange.label, status] += 1
        if attempt is not None and attempt.sent_at and not attempt.backend.gone:
            backend = attempt.backend
            metrics.replica_requests.values[backend.id, status] += 1
            if status == "2xx":
                backend.failures = 0
                metrics.replica_answer_seconds.values[backend.id,] += now - attempt.sent_at
        if outcome == "aborted":
            metrics.client_aborts.inc(exchange.label)
        # A request that is the client's error does not show how well the gateway knows the prompts that engines get.
        if (
            exchange.prompt is not None
            and attempt is not None
            and exchange.prompt.path not in NO_PREFILL
            and status != "4xx"
        ):
            metrics.prompts.values[exchange.prompt.mode,] += 1
        if status == "2xx":  # the time of a refusal is not that of an answer
            metrics.request_seconds.waiting[exchange.label,].append(now - exchange.begun)
        for stage, seconds in exchange.stages:
            metrics.stage_seconds.waiting[stage,].append(seconds)
        for told in self.on_end:
            try:
                told(exchange, outcome, usage)
            except Exception:
                log.exception("%s failed at the end of a request", getattr(told, "__qualname__", told))
        exchange.attempts.clear()  # they refer to the exchange: a cycle


def seconds_full(head: Head) -> float:
    """Return for how many seconds a full replica wants no requests, by the Retry-After header of its answer.

    At most 60 s (`MOST_FULL_SECONDS`) are returned, and 1 s (`FULL_SECONDS`) if there is no valid header.
    """
    told = (head.get(b"retry-after") or b"").decode("latin-1").strip()
    try:
        seconds = float(told)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(told).astimezone(UTC) - datetime.now(UTC)).total_seconds()
        except (ValueError, OverflowError):
            seconds = FULL_SECONDS
    return min(max(seconds, 0.0), MOST_FULL_SECONDS) if isfinite(seconds) else FULL_SECONDS


def cut_short(attempt: Attempt, path: str, answer: bytes) -> bool:
    """Return whether the first or last bytes of an answer say that its engine aborted it."""
    aborted = attempt.backend.replica.dialect.aborted
    return bool((aborted.get(path if attempt.status < 500 else ERROR) or aborted[ANY_PATH])(answer))


def most_tokens(backend: Backend, prompt: Prompt | None, sequences: int = MOST_SEQUENCES) -> tuple[int, int]:
    """Return the most prompt tokens and the most output tokens that a request can have.

    Reported usage above these limits is not believed.

    `prompt`: None if the gateway has not read it.
    `sequences`: the number of sequences (prompts times choices) to assume in that case.
    """
    context = backend.replica.max_model_len or UNKNOWN_CONTEXT
    if prompt is None:
        return context * sequences, context * sequences
    read = written = context
    if prompt.rendered_chars and prompt.mode == "exact" and prompt.previous_response is None:
        read = LONGEST_CHARACTER * prompt.rendered_chars + MOST_ADDED
        read = context if context < read else read
    if (most := prompt.max_tokens) is not None and most < written:
        written = max(1, most)  # for `echo` without an answer vLLM writes one
    turns = MOST_TURNS if prompt.path == RESPONSES else 1
    return read * prompt.sequences * turns, written * prompt.sequences * turns

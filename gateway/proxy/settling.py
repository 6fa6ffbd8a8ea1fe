"""Accounting of answers ("settling"): load, learned costs, health, and predictions compared with measurements.

The reserved load changes as an answer begins and ends, costs are learned from its times, and success or failure is
reported to the replica's health checks. The cached tokens that the engine reports are compared with the prediction; if
they keep differing, the replica's part of the map (which replica caches which blocks) is rebuilt, or "healed". This
module is the only caller of `Router.finish`.
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
from . import retries
from .blame import DOUBTFUL, OVERLOADED, PASSED_ON, REFUSALS, REFUSED_ALIKE, REQUEST, SAME, UnattributedError, agree
from .exactness.drift import TOLERATED
from .exactness.forwarding import TokenIdForwarding
from .exchange import TAIL, TAIL_BYTES, Attempt, Batcher, Exchange, Legs, output_tokens
from .placement import pulling
from .responses import answers
from .responses.answers import NOTHING, Usage, believed, error_status, read_usage
from .retries import ABORTED, ERROR_ANSWER, KINDS, LEG_REFUSED, Next, of_status
from .states import BROKEN_OFF, AttemptEvent, AttemptState, Leg

if TYPE_CHECKING:
    from ..errors import ApiError
    from ..http.upstream import Head
    from ..ops.metrics import Metrics
    from ..prompt import Prompt
    from .backend import Backend

log = logging.getLogger("hitherto.proxy")

OTHER_ERROR = "status 5xx"  # any 5xx that is not retried on another replica
# Outcomes of legs. A leg that was refused, or whose cache was not kept, has not failed: the request goes on in one leg.
COMPLETE, ABANDONED, FAILED = "complete", "abandoned", "failed"
LEG_OUTCOMES = {COMPLETE: COMPLETE, ABANDONED: ABANDONED, retries.NOT_KEPT: retries.NOT_KEPT, LEG_REFUSED: "refused"}
STREAMING_APIS = frozenset(("chat", "completions", "responses", "messages"))
STATUS_CLASS = ("0xx", "1xx", "2xx", "3xx", "4xx", "5xx", "6xx", "7xx", "8xx", "9xx")

PACE_WEIGHT = 0.2  # weight of the last non-streamed answer in the mean seconds per token of such answers
# From a non-streamed answer, transfer time is learned only if it was predicted to be at least this share of the decode
# time: a smaller one drowns in that prediction's error.
LEAST_MOVED = 0.5
# How long a first leg may outlast the second leg's first token. Its answer comes at about that time, and closing its
# connection earlier could cost the decoder the cache.
TRAILS_SECONDS = 10.0
# A replica whose counters stand still while a request waits this long is no longer ready (`replicas.progress.STALLED`,
# the time between two looks, and as long again for a probe).
COMPUTES_SECONDS = 30.0
# A replica that refuses a request because it is full is tried last for FULL_SECONDS, or for the time of its
# Retry-After, at most MOST_FULL_SECONDS: it may have refused the API key of one client only.
FULL_SECONDS, MOST_FULL_SECONDS = 1.0, 60.0

# Bounds for believable usage: UTF-8 bytes per character (a token has at least one byte), tokens that an engine may add
# to a prompt, and turns of one response: at /v1/responses engines call tools of their own and go on.
LONGEST_CHARACTER, MOST_ADDED, MOST_TURNS = 4, 4096, 16

OnTraffic = Callable[[str, str | None, int], None]
OnFirst = Callable[[Attempt, bool], None]  # True: the event loop was held up while the token came
OnEnd = Callable[[Exchange, str, Usage | None], None]


def _of_copies(prompt: Prompt, predicted: int, cached: int | None, size: int, drops: bool) -> int:
    """Return the cached tokens predicted for the one of several sequences (`n`) of a prompt that usage reports on.

    The first sequence finds the blocks that the replica held. The others also find those that the first has computed,
    all full blocks before the last token. A stream reports on the first sequence. Other answers report on the one that
    ended last, which may be any, so for them the prediction that equals the report is returned.

    `predicted`: cached tokens predicted for the first sequence; `cached`: the reported ones.
    `size`: tokens per block.
    `drops`: the replica recomputes the last block that it finds.
    """
    each = prompt.tokens * prompt.n // prompt.copies
    left = max(0, min(hittable(each, size), len(prompt.hashes)) - drops) * size if prompt.reads_cache else 0
    return left if cached == left and not prompt.stream else predicted


class Settling:
    """The accounting of requests: load, costs, health and metrics follow from their answers."""

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

        `on_traffic(replica, kind, count)`: reports a failure of this kind to the health checks, or, if `kind` is None,
        `count` answers.
        `when_full(backend, until)`: called for a replica that refuses a request because it is full; `until` in
        monotonic seconds.
        """
        self._backends, self._router, self.metrics, self._forwarding = backends, router, metrics, forwarding
        self.on_traffic, self.pulse, self._when_full = on_traffic, pulse, when_full
        # Called for every request that ends, with its outcome and usage, and for the first token of every stream.
        self.on_end: list[OnEnd] = []
        self.on_first: list[OnFirst] = []
        self.complete = Batcher(self._settle_all)

    # --- reports to health

    def tell(self, backend: Backend, kind: str) -> None:
        """Report a failure to the health checks, after the answers that came before it."""
        self.tell_answers()
        self.on_traffic(backend.id, kind, 1)

    def tell_answers(self, replica: str | None = None) -> None:
        """Report to the health checks how many requests replicas have answered since the last call.

        Reporting answers one by one would cost six more calls per request. Called for all replicas a few times a second
        and before a failure is reported, which is compared with the answers of the engine's other ranks and siblings.

        `replica`: report on this one alone, before a probe of it is evaluated.
        """
        backends = self._backends
        told = backends.values() if replica is None else [backends[replica]] if replica in backends else ()
        for backend in told:
            count, backend.answers = backend.answers, 0
            if count:
                self.on_traffic(backend.id, None, count)

    # --- failures

    def failed(self, backend: Backend | None, kind: str) -> None:
        """Count a failure that is the replica's fault, and report it to the health checks."""
        if backend is not None and not backend.gone:
            self.metrics.upstream_errors.inc(backend.id, kind)
            self.tell(backend, kind)

    def record_error(self, exchange: Exchange, attempt: Attempt, kind: str) -> None:
        """Record an error answer; the rules in `blame` decide whether the replica or the request is at fault.

        A decoder that may only have failed to fetch the prompt's cache is no evidence against the request.
        """
        backend = attempt.backend
        witness = backend.is_witness and not attempt.could_not_fetch(kind)
        exchange.unattributed_errors += (UnattributedError(backend.id, backend.replica.engine, kind, witness),)
        if kind in OVERLOADED:
            self._when_full(backend, monotonic() + seconds_full(attempt.response_head))
        elif not backend.gone:
            backend.failures += 1
            if kind not in REFUSED_ALIKE:  # a client's key may be wrong, which is no reason to probe the engine
                self.tell(backend, retries.UNCONFIRMED)

    def _attribute(self, exchange: Exchange, attempt: Attempt) -> None:
        """Decide whose fault earlier errors were, now that another replica has answered or refused the request."""
        if attempt.status in REFUSALS or attempt.fault in REFUSALS:
            self._count(exchange.unattributed_errors, agreed=True)
        else:
            for one in exchange.unattributed_errors:
                self.failed(self._backends.get(one.replica), one.kind)
        exchange.unattributed_errors = ()

    def close_unattributed(self, exchange: Exchange) -> None:
        """Count the errors of a request that no replica answers, without blaming any replica."""
        if exchange.unattributed_errors:
            self._count(exchange.unattributed_errors, agree(exchange.unattributed_errors))
            exchange.unattributed_errors = ()

    def _count(self, unattributed_errors: Sequence[UnattributedError], agreed: bool) -> None:
        for one in unattributed_errors:
            if one.replica in self._backends:
                self.metrics.upstream_errors.inc(
                    one.replica, REQUEST if agreed and one.kind in SAME | REFUSED_ALIKE else one.kind
                )

    def turned_away(self, error: ApiError) -> None:
        """Count a request that was refused before any replica was asked."""
        code = error.code or ("no_replica_ready" if error.status == 503 else "")
        self.metrics.rejections.inc(code if error.status in (404, 503) and code else str(error.status))

    def abandon(self, attempt: Attempt, computed: bool) -> None:
        """Release an attempt's load without learning from it. `computed`: its replica may have computed the prompt."""
        self._router.abandon(attempt.placement, computed=computed)

    # --- two legs

    def leg_ended(self, leg: Leg, kind: str = COMPLETE) -> None:
        """Count how a leg ended; called once for each. `kind`: of failure (`retries`), or COMPLETE or ABANDONED."""
        outcome = LEG_OUTCOMES.get(kind, FAILED)
        self.metrics.legs.inc(leg.value, outcome)
        if outcome == FAILED:
            self.metrics.leg_failures.inc(leg.value, kind)

    def handed_over(self, exchange: Exchange, first: Attempt, legs: Legs) -> None:
        """Account for a complete first leg, and learn the cost of its prefill."""
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
        """Record how long the KV transfer took: a second leg's time to its first byte, less the decoder's own time.

        The time is learned only if the sender was ready throughout.

        `writing`: the predicted seconds of decoding that are part of that time.
        """
        seconds = second.first_at - second.sent_at - max(0.0, legs.computed_at - second.sent_at)
        moving = two_legs.moving_seconds(second.placement, seconds - writing) - legs.computing
        legs.moved_in = max(0.0, moving)
        self.metrics.transfer_seconds.observe(second.backend.id, legs.moved_in)
        self.metrics.predicted_transfer_seconds.inc(second.backend.id, by=legs.moving)
        sender = legs.prefiller.replica
        if learns and sender.state is State.READY and sender.since <= second.sent_at:
            self._router.transfers.observe(legs.prefiller.id, legs.decoder.id, legs.moved, moving, second.first_at)

    def prefilled_elsewhere(self, legs: Legs, computed: bool) -> None:
        """Account for a first leg that an engine sent itself, or that runs at the same time as the second leg.

        If a first leg of the second kind is still running, it gets TRAILS_SECONDS to end, since its answer comes soon
        after the second leg's first token; if the second leg failed, it is dropped now.

        `computed`: whether the second leg was answered, so that the prompt was computed.
        """
        if legs.first is not None:
            if computed:
                asyncio.get_running_loop().call_later(TRAILS_SECONDS, self.drop_first, legs)
            else:
                self.drop_first(legs)
        placement, legs.unsent = legs.unsent, None
        if placement is None:
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
        """Drop the first leg if it still runs."""
        first, legs.first = legs.first, None
        if first is not None and first.state is not AttemptState.ENDED:
            first.end_as(AttemptEvent.DROPPED)
            self.abandon(first, computed=first.sent_at > 0)
            self.leg_ended(Leg.PREFILL, ABANDONED)

    def drop_legs(self, exchange: Exchange) -> None:
        """Release the reservations and the first leg of a request that goes on without legs."""
        legs, exchange.legs = exchange.legs, None
        if legs is not None:
            self.drop_first(legs)
            for placement in (legs.placement, legs.unsent):
                if placement is not None:
                    self._router.abandon(placement, computed=False)

    def leg_failed(self, exchange: Exchange, attempt: Attempt, kind: str, following: Next) -> None:
        """Account for a leg that failed in this way (`kind`), given what follows for the request.

        If the cache may not have come, the pair of replicas is not chosen for a while.
        """
        legs, leg = exchange.legs, attempt.leg
        if legs is None or leg is None:
            return
        self.leg_ended(leg, kind)
        exchange.stays_whole = following is Next.WHOLE
        if following is Next.LEGS or attempt.could_not_fetch(kind) or (leg is Leg.DECODE and kind == retries.HUNG):
            self._router.transfers.failed(legs.prefiller.id, legs.decoder.id, monotonic())
        if following is not Next.DECODER:
            self.drop_legs(exchange)

    # --- the first byte

    def answered(self, exchange: Exchange, attempt: Attempt) -> None:
        """Account for the first byte of an answer."""
        backend = attempt.backend
        if (status := attempt.fault or attempt.status) >= 500 or (status in DOUBTFUL and exchange.unattributed_errors):
            if attempt.status >= 500 and attempt.status not in retries.RETRYABLE:
                self.record_error(exchange, attempt, OTHER_ERROR)
            self.close_unattributed(exchange)
        else:
            backend.answers += 1
            if exchange.unattributed_errors:
                self._attribute(exchange, attempt)
        self.first_token(attempt, exchange.begun)

    def first_token(self, attempt: Attempt, since: float) -> None:
        """Record an attempt's first byte; `since` is when its client began to wait, in monotonic seconds."""
        backend, at = attempt.backend, attempt.first_at
        ok, upstream = attempt.status == 200 and not attempt.fault, attempt.upstream
        is_whole = ok and not attempt.streams and upstream is not None and upstream.complete
        if is_whole and attempt.prompt is not None and attempt.leg is None:
            attempt.came_whole = True
            return
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
        # The first byte of an error is no first token, and that of a non-streamed answer is its last as well.
        if not attempt.fault and attempt.streams and not backend.gone:
            self.metrics.ttft_seconds.observe((), at - since)
            self.metrics.replica_ttft_seconds.observe(backend.id, at - attempt.sent_at)
            if attempt.status == 200:
                for told in self.on_first:
                    told(attempt, ours)

    def look_for_first(self, exchange: Exchange, attempt: Attempt, now: float) -> None:
        """Look for the first token of a stream whose first bytes were relayed before they showed one."""
        if attempt.status == 200 and answers.has_begun(
            exchange.label, b"".join([one[-TAIL_BYTES:] for one in attempt.tail])
        ):
            attempt.first_at, attempt.seen_late = now, True
            self.first_token(attempt, exchange.begun)

    def came(self, attempt: Attempt) -> None:
        """Count a stream's reads since the last sweep as tokens; a read has one token, or sometimes a few."""
        if not attempt.first_at and attempt.streams:
            self.look_for_first(attempt.exchange, attempt, monotonic())
        if attempt.streams:
            self._router.came(attempt.placement, attempt.pieces - attempt.seen_pieces)

    def joined(self, attempt: Attempt) -> None:
        """Account for the first byte of an attempt that resumes a stream."""
        backend, at = attempt.backend, attempt.first_at or monotonic()
        backend.answers += 1
        if attempt.exchange.unattributed_errors:
            self._attribute(attempt.exchange, attempt)
        learns = self.pulse.saw(attempt.sent_at, at) and backend.may_learn(at)
        self._router.first_token(attempt.placement, at, at - attempt.sent_at if learns else None)

    def still_unanswered(self, attempt: Attempt, now: float) -> None:
        """Assume that the prefill of a non-streamed answer is done after its predicted time.

        After COMPUTES_SECONDS without an answer, a request at a ready replica no longer makes the replica count as
        late: a replica that stays ready is computing.
        """
        placement, waited = attempt.placement, self.pulse.ran(attempt.sent_at, now)
        if not attempt.streams and placement.computing and waited > placement.ttft:
            self._router.first_token(placement, None)
        if waited > COMPUTES_SECONDS and attempt.backend.replica.state is State.READY:
            self._router.disregard(placement)

    # --- the end

    def _settle_all(self, exchanges: list[Exchange]) -> None:
        for exchange in exchanges:
            attempt, usage = exchange.attempts[-1], None
            try:
                usage = self._settle(exchange, attempt, b"".join(attempt.tail))
            except Exception:
                log.exception("learning from an answer failed")
                exchange.run_isolated(self._router.abandon, attempt.placement)
            self.ended(exchange, "failed" if attempt.fault else "complete", usage)

    def _settle(self, exchange: Exchange, attempt: Attempt, tail: bytes) -> Usage:
        """Account for a complete answer, whose last bytes are `tail`; return its usage."""
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
        # Where the answer to a prompt came in one read, the judge has seen its end.
        seen = attempt.pieces == 1 and attempt.first_at and prompt is not None
        ended = COMPLETE
        if attempt.leg is not None:
            ended = self._leg_answered(exchange, attempt, tail)
            if exchange.legs is not None:  # the answer's first bytes showed no token
                self.prefilled_elsewhere(exchange.legs, attempt.status == 200)
        if attempt.fault:  # seen in its first bytes
            self.abandon(attempt, computed=False)
        elif not seen and (late := self._late_failure(exchange, attempt, tail, usage)) is not None:
            attempt.fault, ended, attempt.computed = late
            self.abandon(attempt, attempt.computed)
            if attempt.fault >= 500:
                self.failed(backend, ended)
            else:
                ended = LEG_REFUSED
        elif prompt is not None and attempt.status == 200 and not backend.gone:
            if not attempt.first_at and attempt.streams:
                self.look_for_first(exchange, attempt, attempt.ended_at)
            self.finish(attempt, prompt, usage)
            if not attempt.is_continued:
                self._forwarding.settled(attempt, prompt, exchange.request, usage)
        else:
            self.abandon(attempt, computed=not 400 <= attempt.status < 500)
        if attempt.leg is not None:
            self.leg_ended(attempt.leg, ended)
        return usage

    def _leg_answered(self, exchange: Exchange, attempt: Attempt, tail: bytes) -> str:
        """Return how the second leg, whose answer the client has, ended, by the answer's head and first bytes."""
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
        """Return the failure that an answer's end shows, or None.

        A failure is (the status that it amounts to, its kind, whether the prompt was computed).
        """
        is_stream, whole = attempt.streams and attempt.status == 200, attempt.pieces <= TAIL
        if is_stream and (fault := error_status(tail, True)):
            # If the stream began with the error, nothing was computed. The judge checks streams of read prompts.
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
        """Learn from the complete answer to a prompt."""
        now = monotonic()
        backend, placement = attempt.backend, attempt.placement
        tells_blocks = backend.replica.takes_rank(prompt.path)
        _, completion, cached = usage
        tokens = output_tokens(attempt, usage)
        learns = (
            attempt.streams
            and not (attempt.is_continued or attempt.seen_late)  # a resumed stream's usage covers the whole stream
            and tokens > LEAST_OUTPUT
            and self.pulse.saw(attempt.first_at, now)
            and backend.may_learn(now)
        )
        # A second leg's cache came from another replica, and the usage of a resumed stream covers the whole stream.
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
                self.metrics.replica_decode_seconds.inc(backend.id, by=now - begun)
                self.metrics.replica_decode_tokens.inc(backend.id, by=tokens - 1)
        if whole:
            body = b"" if attempt.exchange is None else attempt.exchange.request.body  # none if not forwarded here
            self._compare(placement, backend, prompt, usage, tells_blocks, body)
        else:
            backend.drift.exclude()
        if tells_blocks:
            self._tell_intake(backend, placement, prompt)

    def _counted_otherwise(self, backend: Backend, prompt: Prompt, counted: int, made: int, body: bytes) -> None:
        """Record that the replica `counted` another number of prompt tokens than the gateway `made`.

        For prompts in mode "exact" this is counted each time and logged once per replica. After a second such body of a
        kind, prompts of that kind no longer count as exact.
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
        counted, _, cached = usage
        metrics, name, held, size = self.metrics, backend.id, placement.predicted, placement.demand.block_size
        metrics.prompt_tokens.inc(name, by=prompt.tokens)
        if cached is not None and placement.pull is not None:
            # For a prompt that fills its last block the connector reports all tokens as found, though the last token is
            # computed anyway; whether the peer has that block was not asked.
            cached = min(cached, hittable(prompt.tokens, size) * size)
        drops = backend.slot >= 0 and self._router.map.drops(backend.slot)
        predicted = held if prompt.copies < 2 else _of_copies(prompt, held, cached, size, drops)
        metrics.predicted_cached_tokens.inc(name, by=predicted)
        made = prompt.tokens if prompt.mode in ("exact", "media") else prompt.made
        if counted is not None and made is not None and not prompt.several:
            if counted != made:
                self._counted_otherwise(backend, prompt, counted, made, body)
            elif prompt.doubted:
                self._forwarding.made_alike(name, prompt)
        saved = predicted
        # Guessed prompts are no evidence about a map that an engine's events maintain.
        guessed = prompt.mode != "exact" and backend.intake is not None
        if guessed and prompt.mode not in GUESSED:
            # An engine that finds more may hash images differently (by its flags), which is no fault of the map.
            guessed = prompt.mode == "media" and cached is not None and cached > held
        if prompt.several or guessed or not tells_blocks:
            backend.drift.exclude()
        if not prompt.copies or not tells_blocks or (prompt.several and cached is None):
            pass  # there is nothing to compare with
        elif cached is None:
            backend.drift.unreported(placement.overlap, prompt.tokens)  # the engine counts fetched tokens separately
            told = counted is not None and prompt.path not in answers.NEVER_TELL_CACHED
            if placement.pull is not None:
                saved -= placement.pull.tokens  # it is not known whether they came
                metrics.peer_pulls.inc(name, "unknown")
            if held and told and backend.replica.cached_tokens is None:
                backend.replica.cached_tokens = False
        else:
            saved = cached
            backend.replica.cached_tokens = True
            metrics.reported_prompt_tokens.inc(name, by=counted or prompt.tokens)
            metrics.reported_cached_tokens.inc(name, by=saved)
            error = predicted - saved
            scrape = backend.replica.scrape
            looks_further = scrape is not None and bool(scrape.external_queries)
            outcome = "equal" if error == 0 else "over" if error > 0 else "under"
            metrics.predictions.inc(name, outcome)
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
                    # Parts of a block are known to the engine only.
                    held,
                    held if backend.is_finer and abs(held - saved) < size else saved,
                    prompt.tokens,
                    placement.fetched,
                    size,
                )
            ):
                self.heal(backend, f"predicted and reported cached tokens differ by more than {TOLERATED:.0%}")
            self._follow_offset(backend, size)
        metrics.prefill_saved_tokens.inc(name, by=saved)

    def _tell_intake(self, backend: Backend, placement: Placement, prompt: Prompt) -> None:
        """Report to the intake of KV events how many blocks of a complete request were new to the replica."""
        if backend.intake is not None and not prompt.media:  # the blocks of media are not known
            again = backend.slot >= 0 and self._router.map.drops(backend.slot)
            backend.intake.request_finished(len(prompt.hashes) - placement.overlap_blocks - again)

    def compare_counts(self, backend: Backend, queries: float | None, hits: float | None, idle: bool) -> None:
        """Compare the engine's own scraped cache counters with the predictions.

        `queries`, `hits`: tokens looked up and found; None if not reported.
        `idle`: no request is in flight at the replica.
        """
        size = backend.event_format[0] if backend.event_format else 0
        if backend.drift.counted(queries, hits, idle, size):
            self.heal(backend, "the engine's own count of cached tokens differs from what was predicted")
        self._follow_offset(backend, size)

    def _follow_offset(self, backend: Backend, size: int) -> None:
        """Predict one block less, or one more, from now on if all recent answers differed by one block."""
        offset, prefixes = backend.drift.offset, self._router.map
        if not offset or abs(offset) != size or backend.gone or prefixes.drops(backend.slot) == (offset > 0):
            return
        prefixes.drop(backend.slot, offset > 0, backend.replica.looks_to_end)
        backend.drift.reset()
        log.info("replica %s: its answers show that it %s the last block of what it finds, so %s is predicted from here on",
                 backend.id, *(("computes", "a block less") if offset > 0 else ("keeps", "a block more")))  # fmt: skip

    def follow_drop(self, backend: Backend) -> None:
        """Follow the engine's report of whether it recomputes the last block that it finds.

        Answers may later show that the report is wrong (`_follow_offset`).
        """
        replica = backend.replica
        drops = replica.drops_block and not replica.looks_ahead
        if drops != backend.said_to_drop:
            backend.said_to_drop = drops
            self._router.map.drop(backend.slot, drops, replica.looks_to_end)

    def heal(self, backend: Backend, why: str) -> None:
        """Clear a replica's part of the map, and learn its blocks again, from its KV events or from new requests."""
        self.metrics.heals.inc(backend.id)
        log.warning("replica %s: map rebuilt: %s", backend.id, why)
        backend.drift.reset()
        if backend.intake is not None:
            backend.intake.resync()
        else:
            self._router.map.clear(backend.slot)

    def ended(self, exchange: Exchange, outcome: str, usage: Usage | None = None) -> None:
        """Count a request that ended with this outcome, and call the `on_end` callbacks."""
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
        metrics.requests.inc(exchange.label, status)
        if attempt is not None and attempt.sent_at and not attempt.backend.gone:
            metrics.replica_requests.inc(attempt.backend.id, status)
            if status == "2xx":
                attempt.backend.failures = 0
                metrics.replica_answer_seconds.inc(attempt.backend.id, by=now - attempt.sent_at)
        if outcome == "aborted":
            metrics.client_aborts.inc(exchange.label)
        # A client's error is no evidence of how well prompts are known.
        if (
            exchange.prompt is not None
            and attempt is not None
            and exchange.prompt.path not in NO_PREFILL
            and status != "4xx"
        ):
            metrics.prompts.inc(exchange.prompt.mode)
        if status == "2xx":  # the time of a refusal is not that of an answer
            metrics.request_seconds.observe(exchange.label, now - exchange.begun)
        for stage, seconds in exchange.stages:
            metrics.stage_seconds.observe(stage, seconds)
        for told in self.on_end:
            try:
                told(exchange, outcome, usage)
            except Exception:
                log.exception("%s failed at the end of a request", getattr(told, "__qualname__", told))
        exchange.attempts.clear()  # they refer to the exchange: a cycle


def seconds_full(head: Head) -> float:
    """Return for how many seconds a full replica wants no requests: its Retry-After, at most MOST_FULL_SECONDS."""
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
    """Return the most prompt tokens and output tokens that a request can have.

    `sequences`: the number of sequences to assume where the prompt was not read.
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

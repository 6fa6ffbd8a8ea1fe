"""The decision on an answer by its head and first bytes: pass it to the client, wait for more, or try another replica.

Engines send the head of an answer before the prefill, and some errors with status 200 or as an event of a stream. So
the first bytes are checked before the client gets anything, while another replica can still answer. The rules in
`blame` say whether an error is the replica's fault or the request's.
"""

from __future__ import annotations

from typing import Literal

from ...http.upstream import UpstreamError
from ..backend import Backend
from ..exchange import Attempt, Exchange
from ..failures import retries
from ..failures.blame import DOUBTFUL, OVERLOADED, agree, request_at_fault
from ..placement.eligibility import Eligibility
from ..settling import Settling
from . import answers
from .answers import MOST_HELD_BACK, Beginning, Sight, begins, first_error, look

# Statuses that may be due to what the gateway wrote into the request (token ids, a leg's parameters). The request is
# repeated as received, so that a client only sees errors that its own request caused.
MAY_BE_OURS = frozenset((400, 404, 413, 415, 422, 431))
# The clients of OpenAI and Anthropic retry a request after a 5xx unless they get this header.
NO_RETRY = (b"x-should-retry", b"false")


class Judge:
    """The checks of replicas' answers, and the choice of replicas that are left to try after a failed attempt."""

    def __init__(self, eligible: Eligibility, settling: Settling, retries: int):
        """Create the judge. `retries`: the number of retries per request."""
        self._eligible, self._settling, self._retries = eligible, settling, retries

    def head(self, exchange: Exchange, attempt: Attempt, content_type: bytes) -> UpstreamError | None:
        """Return why an answer with an unusual head is not passed to the client; None if it may be passed.

        Records a replica's error in the exchange, since only another replica's answer shows whose fault it is, and at
        the replica, which may be full. So the last error answer, after which no retry or no replica is left, is passed
        to the client like any answer.

        `content_type`: in lower case.
        """
        status = attempt.status
        has_prompt, kind = exchange.prompt is not None, retries.of_status(status)
        if attempt.leg is not None and status >= 300 and exchange.legs is not None and exchange.legs.transfer.header:
            kind = retries.LEG_REFUSED if status in MAY_BE_OURS else retries.PREFILL_FAILED
            return UpstreamError(kind, f"answered {status} to a request that was to be computed elsewhere first")
        if has_prompt and not attempt.streams and answers.foreign_head(status, content_type):
            return _foreign(f"answered {status} with {answers.media_type(content_type)}")
        doubtful = status in DOUBTFUL and exchange.response is None and (has_prompt or kind in OVERLOADED)
        if (status in retries.RETRYABLE or doubtful) and self._record_and_ask_another(exchange, attempt, kind):
            return UpstreamError(kind, f"answered {status}")
        if status == 404 and exchange.response is not None and self.left(exchange, attempt):
            return UpstreamError(retries.ELSEWHERE, "answered 404")
        return self._ours(attempt, status, str(status))

    def _ours(self, attempt: Attempt, status: int, what: str) -> UpstreamError | None:
        """Return the error for an answer that may be due to what the gateway wrote into the request; else None.

        That may be token ids in place of the text, or the parameters of a leg (prefill or decode).

        `status`: the answer's, or the one that an error in its body amounts to.
        `what`: the answer in words, for the error's message.
        """
        if status not in MAY_BE_OURS:
            return None
        if attempt.sent_ids or attempt.asks_ids:
            return UpstreamError(retries.IDS, f"answered {what}")
        return None if attempt.leg is None else UpstreamError(retries.LEG_REFUSED, f"answered a second leg with {what}")

    def first_bytes(
        self, exchange: Exchange, attempt: Attempt, data: bytes, held_back: int, whole: bool
    ) -> UpstreamError | Literal[Sight.EARLY, Sight.BLIND] | None:
        """Judge the first bytes of an answer with status 200 to a prompt.

        Returns
        - an error, if the client gets nothing of this answer;
        - `Sight.EARLY`, to wait for more bytes;
        - `Sight.BLIND`, to relay the bytes, since they are very many and show neither output nor an error;
        - None, to relay an answer. If it contains an error, `attempt.fault` is set to the status that this amounts to.

        `held_back`: how many of the bytes an earlier call has checked.
        `whole`: whether the body is complete with these bytes.
        """
        head = attempt.response_head
        began = not held_back and begins(exchange.label, data, attempt.streams)
        if not began and head.get(b"content-encoding") is None:
            sight = self._look(exchange, attempt, data, held_back, whole)
            if sight is Sight.FOREIGN:
                return _foreign(f"answered 200 with {repr(data[:40]) if data else 'an empty body'}")
            if sight is Sight.SILENT:
                # Called to record the error alone: whatever it returns, the client cannot use this answer.
                self._record_and_ask_another(exchange, attempt, retries.ERROR_ANSWER)
                return UpstreamError(retries.ERROR_ANSWER, "answered 200 with a stream without an event")
            if sight is Sight.EARLY or sight is Sight.BLIND:
                return sight
        fault = first_error(data if (seen := attempt.beginning) is None else seen.body, attempt.streams)
        kind = full if (full := retries.of_status(fault)) in OVERLOADED else retries.ERROR_ANSWER
        if (fault >= 500 or kind is full) and self._record_and_ask_another(exchange, attempt, kind):
            return UpstreamError(kind, f"answered 200 with an error that amounts to {fault}")
        if (error := self._ours(attempt, fault, f"200 and an error that amounts to {fault}")) is None:
            attempt.found_error(fault)
        return error

    def _look(self, exchange: Exchange, attempt: Attempt, data: bytes, held_back: int, whole: bool) -> Sight:
        """Return what the first bytes of a body show; the first `held_back` of them were checked before.

        A longer body that is held back is parsed again only once it has grown enough, else the result is EARLY.
        """
        head, label = attempt.response_head, exchange.label
        if attempt.streams:
            if (beginning := attempt.beginning) is None:
                attempt.parse_stream(beginning := Beginning(head.is_chunked))
                held_back = 0
            return beginning.look(label, data[held_back:], whole)
        if not whole and len(data) < MOST_HELD_BACK and not answers.has_grown(len(data), attempt.looked_at):
            return Sight.EARLY
        attempt.looked_through(len(data))
        return look(label, data, False, (head.get(b"content-type") or b"").lower(), whole)

    def _record_and_ask_another(self, exchange: Exchange, attempt: Attempt, kind: str) -> bool:
        """Record an error answer; return whether to ask another replica, instead of passing the error to the client.

        If two engines have failed the request alike, the client also gets a header that tells it not to retry.
        """
        self._settling.record_error(exchange, attempt, kind)
        if not request_at_fault(exchange.unattributed_errors) and self.may_retry(exchange, attempt, kind):
            return True
        if agree(exchange.unattributed_errors):
            attempt.response_head.add(NO_RETRY)
        return False

    # --- what is left to try

    def may_retry(self, exchange: Exchange, attempt: Attempt, kind: str = "") -> bool:
        """Return whether a failed attempt may be replaced by another one.

        A retry has to be left, and a replica to send the request to. That may be the same replica, if it is a decoder
        that could not fetch the prompt's KV cache from another replica: it can compute the prompt itself.

        `kind`: the kind of failure, one of `retries.KINDS`; "" if nothing has failed yet.
        """
        if exchange.attempts_used >= self._retries:
            return False
        return attempt.could_not_fetch(kind) or bool(self.left(exchange, attempt))

    def left(self, exchange: Exchange, attempt: Attempt) -> list[Backend]:
        """Return the replicas that are left to try if this attempt fails."""
        return self._eligible.remaining(
            exchange.prompt, (*exchange.tried, attempt.backend), exchange.model, exchange.able
        )


def _foreign(what: str) -> UpstreamError:
    """Return the error for an answer that no engine wrote: something else listens at the replica's address."""
    return UpstreamError(retries.FOREIGN_ANSWER, f"{what}, which is no answer of an inference engine")

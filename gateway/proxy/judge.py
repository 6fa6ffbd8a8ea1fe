"""Whether what a replica begins to answer goes to the client, or another replica is asked."""

from __future__ import annotations

from time import monotonic

from ..http.upstream import UpstreamError
from .answers import Sight, begins, error_status, foreign_head, look
from .backend import Backend
from .blame import DOUBTFUL, agree, settled
from .exchange import Attempt, Exchange
from .placing import Eligibility
from .retries import ABORTED, ELSEWHERE, ERROR_ANSWER, FOREIGN_ANSWER, IDS, RETRYABLE, of_status
from .settling import Settling

# To a request with ids in it: it is said again as received, so that the client's own fault is all a client is told of.
MAY_BE_OURS = frozenset((400, 404, 413, 415, 422, 431))
# Clients of OpenAI and Anthropic, which repeat a request after a 5xx by themselves, obey it.
NO_RETRY = (b"x-should-retry", b"false")


class Judge:
    def __init__(self, eligible: Eligibility, settling: Settling, retries: int):
        """`retries`: as in `retries.after`."""
        self._eligible, self._settling, self._retries = eligible, settling, retries

    def head(self, exchange: Exchange, attempt: Attempt) -> UpstreamError | None:
        """Why an answer with this head is not for the client, if it is not."""
        status, head = attempt.status, attempt.response_head
        content_type = head.get(b"content-type") or b""
        attempt.streams = content_type.startswith(b"text/event-stream")
        if status == 200 and (attempt.streams or content_type.startswith(b"application/json")):
            return None
        has_prompt = exchange.prompt is not None
        if has_prompt and not attempt.streams and foreign_head(status, content_type):
            return _foreign(f"answered {status} with {content_type.decode('latin-1')[:100]}")
        if (
            status in RETRYABLE or (status in DOUBTFUL and has_prompt and exchange.response is None)
        ) and self._unsettled(exchange, attempt, of_status(status)):
            return UpstreamError(of_status(status), f"answered {status}")
        if status == 404 and exchange.response is not None and self.others(exchange, attempt):
            return UpstreamError(ELSEWHERE, "answered 404")
        if attempt.sent_ids and status in MAY_BE_OURS:
            return UpstreamError(IDS, f"answered {status}")
        return None

    def first(
        self, exchange: Exchange, attempt: Attempt, data: bytes, whole: bool = False
    ) -> bytes | UpstreamError | None:
        """The first bytes of an answer's body, or all of it: what the client gets, why it gets nothing of this answer,
        or None while nothing of an answer is in them."""
        held_back = attempt.withheld
        if held_back:
            data, attempt.withheld = held_back + data, b""
        if attempt.status == 200 and exchange.prompt is not None:
            if (held_back or not begins(exchange.label, data, attempt.streams)) and attempt.response_head.get(
                b"content-encoding"
            ) is None:
                sight = look(
                    exchange.label, data, attempt.streams, attempt.response_head.get(b"content-type") or b"", whole
                )
                if sight is Sight.FOREIGN:
                    return _foreign(f"answered 200 with {data[:40]!r}")
                if sight is Sight.EARLY:
                    attempt.withheld = data
                    return None
                if sight is Sight.BLIND:
                    return data
            fault = error_status(data, attempt.streams)
            if fault >= 500 and self._unsettled(exchange, attempt, ERROR_ANSWER):
                return UpstreamError(ERROR_ANSWER, f"answered 200 with an error that amounts to {fault}")
            if attempt.sent_ids and fault in MAY_BE_OURS:
                return UpstreamError(IDS, f"answered 200 with an error that amounts to {fault}")
            attempt.fault = fault
        if attempt.backend.replica.dialect.aborted(exchange.request.path, data):
            if self.may_retry(exchange, attempt):
                return UpstreamError(ABORTED, "aborted it")
            attempt.fault = 503
            self._settling.failed(attempt.backend, ABORTED)
        attempt.first_at = monotonic()
        return data

    def may_retry(self, exchange: Exchange, attempt: Attempt) -> bool:
        """Whether a failing answer may be thrown away: an attempt and another replica are left."""
        return len(exchange.tried) < self._retries and bool(self.others(exchange, attempt))

    def others(self, exchange: Exchange, attempt: Attempt) -> list[Backend]:
        """Replicas that are left to try if this attempt fails."""
        return self._eligible.remaining(exchange.prompt, (*exchange.tried, attempt.backend), exchange.model)

    def _unsettled(self, exchange: Exchange, attempt: Attempt, kind: str) -> bool:
        """Whether to ask another replica, now that this one has answered with an error. Else the client gets that."""
        self._settling.record_error(exchange, attempt, kind)
        if not settled(exchange.unattributed_errors) and self.may_retry(exchange, attempt):
            return True
        if agree(exchange.unattributed_errors):
            attempt.response_head.add(NO_RETRY)
        return False


def _foreign(what: str) -> UpstreamError:
    """No engine wrote this: something else listens at the replica's address. No client is given such an answer."""
    return UpstreamError(FOREIGN_ANSWER, f"{what}, which is no answer of an inference engine")

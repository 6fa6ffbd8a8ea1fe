"""The rules for what follows a failed attempt: tables, and one pure function that reads them (`after`).

- The request is repeated once at the same replica after a pooled connection turned out to be closed, or if the replica
  did not accept token ids, since neither is evidence against the replica. It is also repeated there if the connection
  was closed before the request can have been read and no other replica is left: one of several processes behind the
  address may have ended. A connection is replaced only once.
- Any other failure leads to another replica, as long as retries are left. If no replica is left, placing ends the
  request (`Exchange.unplaced`). An error that a replica answered with is no failure then: `responses/judge.py` passes
  it to the client if it finds neither a retry nor a replica left.
- A request under which two replicas crashed or hung gets no third one, since the request may be the cause. A replica
  that closed the connection before it can have read the whole request is not counted. Nor is a replica that shuts down
  gracefully, as in a rolling restart; its requests may go to any replica.
- A request in two legs (prefill on one replica, decode on another) has two engines at once, perhaps on one machine. So
  two crashes are too many only if both engines were computing its prompt, or both were writing its answer.

Rules for requests in two legs:

- If the first leg fails, replicas for the legs are chosen again, without the one that failed. If a replica keeps no KV
  cache for others, or refuses the leg's body, the request is sent as one leg ("whole").
- A second leg that could not be sent goes to another decoder, with the same transfer parameters while these are valid.
- If the second leg was sent, its engine may have fetched the cache, or had it freed. So the prompt is computed again,
  most likely by the replica that still has it cached.
- A failed KV transfer shows as an error of the second leg, and a stalled one as no answer for many times the predicted
  time. From then on the request is sent as one leg.
- If both legs run at the same time, an engine also reports an error when the other engine dies. So it is not known
  which of the two failed: they are not paired for a while, and neither replica is excluded.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ...http.upstream import CLOSED as CLOSED
from ...http.upstream import CONNECT as CONNECT
from ...http.upstream import OWN as OWN
from ...http.upstream import PROTOCOL as PROTOCOL
from ...http.upstream import REMOVED as REMOVED

# The kinds of failure that are not a connection's (`http.upstream` has these). Another process listens at the replica's
# address by now.
REPLACED = "replaced"
# Of time: an unhealthy replica sent nothing for too long; a replica that shuts down closed the connection or stopped
# sending; a stream stalled; no byte came within the request's timeout.
HUNG, LEFT, STALLED, TIMEOUT = "hung", "left", "stalled", "timeout"
# Of the answer: an error in the body of a 200; an answer that no inference engine wrote; the engine aborted the
# request; the engine accepts no token ids; another replica has the stored response that the request refers to.
ERROR_ANSWER, FOREIGN_ANSWER, ABORTED, IDS, ELSEWHERE = "error answer", "foreign answer", "aborted", "ids", "elsewhere"
# Of the legs of a request (prefill, decode): the prefiller kept no KV cache for the decoder; a leg's body was refused;
# the decoder waits for a cache that does not come; a decoder that requests the prefill itself reports an error, which
# may be its own or the prefiller's.
NOT_KEPT, LEG_REFUSED, TRANSFER_STALLED = "not kept", "leg refused", "transfer stalled"
PREFILL_FAILED = "prefill failed"
# The replica that resumed a stream produced text that does not continue what the client already received.
DIFFERS = "differs"
SHUT_DOWN = "shutting_down"  # the gateway shut down within an answer
# Statuses after which any request is retried on another replica, as long as one is left. After
# a 501 it is not: no such engine could serve it.
RETRYABLE = frozenset((500, 502, 503, 504))
# The kind that is reported to a replica's health checks for an error that may not be the replica's fault.
UNCONFIRMED = "unconfirmed"
MOST_CRASHES = 2  # crashes or hangs of replicas at the same work for one request; a single one may be a coincidence


def of_status(status: int) -> str:
    """Return the kind of failure of an answer with this error status."""
    return f"status {status}"


class FailureKind(NamedTuple):
    """The properties of a kind of failure."""

    computed: bool  # the replica may have computed the prompt
    blamed: bool  # it counts against the replica at once; otherwise another replica's answer decides (`blame`)
    crash: bool = False  # the replica crashed, or hangs, while it has the request
    counts: bool = True  # the failed attempt uses up one of the request's retries
    sent: bool = True  # the replica may have received the request


KINDS: dict[str, FailureKind] = {
    CONNECT: FailureKind(computed=False, blamed=True, sent=False),
    REMOVED: FailureKind(computed=False, blamed=True, sent=False),
    OWN: FailureKind(computed=False, blamed=False, counts=False, sent=False),
    REPLACED: FailureKind(computed=False, blamed=False, counts=False, sent=False),
    CLOSED: FailureKind(computed=True, blamed=True, crash=True),
    PROTOCOL: FailureKind(computed=True, blamed=True, crash=True),
    HUNG: FailureKind(computed=True, blamed=True, crash=True),
    LEFT: FailureKind(computed=True, blamed=False, counts=False),
    ABORTED: FailureKind(computed=True, blamed=True),
    FOREIGN_ANSWER: FailureKind(computed=False, blamed=True),
    ERROR_ANSWER: FailureKind(computed=False, blamed=False),
    ELSEWHERE: FailureKind(computed=False, blamed=False, counts=False),
    NOT_KEPT: FailureKind(computed=True, blamed=False, counts=False),
    LEG_REFUSED: FailureKind(computed=False, blamed=False, counts=False),
    TRANSFER_STALLED: FailureKind(computed=False, blamed=False),
    PREFILL_FAILED: FailureKind(computed=False, blamed=False, counts=False),
    DIFFERS: FailureKind(computed=True, blamed=False),
    **{of_status(status): FailureKind(computed=False, blamed=False) for status in (401, 403, 404, 429, 503)},
    **{of_status(status): FailureKind(computed=True, blamed=False) for status in (500, 502, 504)},
}


CRASHES = frozenset(kind for kind, failure in KINDS.items() if failure.crash)
# Kinds of failure that a second leg (decode) has if its KV cache did not come.
TRANSFER_FAILED = frozenset(
    (TRANSFER_STALLED, PREFILL_FAILED, ERROR_ANSWER, *(of_status(status) for status in (500, 502, 504)))
)
# Kinds of failure that may be due to a pull (of the prompt's KV cache from another replica): an error, an abort, a
# crash or a hang. An engine that is full, was not reached or is another process by now shows nothing about the pull.
PULL_FAILED = frozenset((CLOSED, HUNG, ABORTED, ERROR_ANSWER, *(of_status(status) for status in (500, 502, 504))))


# Kinds of failure of a replica that has ended, is shutting down or could not be sent the request.
AWAY = frozenset((ABORTED, LEFT, *(kind for kind, failure in KINDS.items() if not failure.sent)))


class Next(Enum):
    """The next step after a failed attempt; each value says in words which replica gets the request."""

    SAME = "the same replica once more"
    ANEW = "any replica, this one included: nothing was sent to it, or it ends and comes back"
    OTHER = "another replica"
    DECODER = "another decoder, with the same parameters"
    WHOLE = "any replica, and no legs any more"
    FULL = "none: the gateway itself is at its limits"
    LEGS = "any two replicas, as legs anew"
    LOST = "none: too many went down with it"
    EXHAUSTED = "none: it has had its attempts"


class Failed(NamedTuple):
    """A failed attempt, with the properties by which `after` decides what follows."""

    kind: str  # of failure, a key of KINDS; or STALLED, within an answer
    stale: bool = False  # it was sent on a pooled connection, which failed before any byte of an answer
    repeated: bool = False  # it was already the repetition on a new connection
    had_whole: bool = False  # on an earlier connection, which it closed, the replica may have read the whole request
    second_leg: bool = False  # it was a second leg (decode)
    still_kept: bool = False  # it has legs, and the transfer parameters for the second one are still valid
    computes: bool = True  # the replica was to compute the prompt, unlike that of a second leg
    writes: bool = True  # the replica was to write the answer, unlike that of a first leg (prefill)
    beside: bool = False  # it was a first leg that ran beside the second one, whose failure may be the cause
    unread: bool = False  # its connection was closed before the replica can have read the whole request
    alone: bool = False  # no other replica is left to try
    agreed: bool = False  # two engines have answered the request with the same error, so the request is at fault


def is_crash(failed: Failed) -> bool:
    """Return whether a failure shows that the replica crashed or hangs with the request.

    If the replica cannot have read the whole request on this connection, the failure alone does not show that. It was
    refused, closed too early, or led to another process. Then it depends on an earlier connection: this is a crash if
    the replica closed that one after it may have read the whole request.
    """
    if failed.unread or failed.kind in (CONNECT, REPLACED):
        return failed.had_whole
    return failed.kind in CRASHES


class Crashes(NamedTuple):
    """The numbers of replicas that crashed or hung with a request, while computing its prompt or writing its answer.

    A replica that had the whole request is counted in both.
    """

    computing: int = 0  # while computing its prompt
    writing: int = 0  # while writing its answer

    @property
    def too_many(self) -> bool:
        return max(self) >= MOST_CRASHES

    def after(self, failed: Failed) -> Crashes:
        """Return the numbers after one more failure, which are the same if that is no crash."""
        one = is_crash(failed)
        return Crashes(self.computing + (one and failed.computes), self.writing + (one and failed.writes))


NO_CRASHES = Crashes()


def after(failed: Failed, used: int, crashes: Crashes, retries: int) -> Next:
    """Return what follows a failed attempt.

    The second crash ends a request as LOST, even if it has retries left.

    `used`: how many earlier failures of the request count against its retries.
    `crashes`: the crashes of replicas under the request, this failure included.
    `retries`: how many retries are allowed after the first attempt.
    """
    if failed.kind == OWN:
        return Next.FULL
    if failed.kind == IDS or (failed.kind == CLOSED and failed.stale and not failed.repeated):
        return Next.SAME
    if crashes.too_many:
        return Next.LOST
    if failed.unread and failed.alone and not (failed.repeated or failed.beside) and used < retries:
        return Next.SAME
    if failed.agreed:
        return Next.EXHAUSTED
    if failed.kind in (NOT_KEPT, LEG_REFUSED, PREFILL_FAILED):
        return Next.WHOLE
    if failed.still_kept and not KINDS[failed.kind].sent and used < retries:
        return Next.DECODER
    if failed.kind in (REPLACED, LEFT):
        return Next.ANEW
    if KINDS[failed.kind].counts and used >= retries:
        return Next.EXHAUSTED
    if failed.beside and failed.kind in TRANSFER_FAILED:
        return Next.LEGS
    if failed.second_leg and failed.kind in TRANSFER_FAILED:
        return Next.WHOLE
    return Next.OTHER

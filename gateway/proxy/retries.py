"""The rules of what follows a failed attempt: tables, and one pure function over them.

- After a stale pooled connection, or if a replica did not accept token ids, the request is repeated once at the same
  replica, since neither is evidence against it. The same follows if the connection was closed before the request can
  have been read and no other replica is left: one of several processes behind the address may have ended. A connection
  is replaced only once.
- Any other failure leads to another replica, as long as attempts and replicas are left.
- A request under which two replicas crashed or hung gets no third one, since the request may be the cause. A replica
  that closed the connection before it can have read the whole request does not count. Nor does a replica that shuts
  down gracefully, as in a rolling restart; its requests may go to any replica.
- A request in two legs has two engines at once, perhaps on one machine. Two crashes are too many only where both
  engines were computing its prompt, or both were writing its answer.

Requests in two legs:

- A first leg that fails is placed again without that replica. If the replica keeps no cache for others, or refuses the
  leg's body, the request stays whole, that is in one leg.
- A second leg that was not sent goes to another decoder, with the same transfer parameters while these are valid. An
  engine that was sent the second leg may have fetched the cache, or had it freed, so the prompt is computed again, most
  likely by the replica that still has it cached.
- A failed KV transfer shows as an error of the second leg, and a stalled one as many times the predicted time without
  an answer. From then on the request stays whole.
- Where both legs run at the same time, an engine also reports an error if the other one died, so it is not known which
  of them failed: the two are not paired for a while, and neither replica is excluded.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

# Kinds of failure. Failures of the connection: it was not accepted, it was closed, the peer does not speak HTTP, the
# replica was removed meanwhile, the replica is another process by now.
CONNECT, CLOSED, PROTOCOL, REMOVED, REPLACED = "connect", "closed", "protocol", "removed", "replaced"
# The gateway itself cannot open a connection, since it has no file descriptors left.
OWN = "own"
# Failures in time: an unhealthy replica sent nothing for too long; a replica that shuts down closed the connection or
# stopped sending; a stream stalled; no byte came within the request's timeout.
HUNG, LEFT, STALLED, TIMEOUT = "hung", "left", "stalled", "timeout"
# Failures of the answer: an error within a status 200; an answer that no engine wrote; the engine aborted the request;
# the engine accepts no token ids; another replica has the stored response that the request refers to.
ERROR_ANSWER, FOREIGN_ANSWER, ABORTED, IDS, ELSEWHERE = "error answer", "foreign answer", "aborted", "ids", "elsewhere"
# Failures of legs: the first leg's replica kept no cache for the second; a leg's body was refused; the second's replica
# waits for a cache that does not come; a decoder that requests the prefill itself reports an error, which may be its
# own or the prefill's.
NOT_KEPT, LEG_REFUSED, TRANSFER_STALLED = "not kept", "leg refused", "transfer stalled"
PREFILL_FAILED = "prefill failed"
# The replica that resumed a stream produced text that does not continue what the client already received.
DIFFERS = "differs"
SHUT_DOWN = "shutting_down"  # the gateway shut down within an answer
# Statuses after which any request is retried on another replica; after a 501, no engine of the kind could serve it.
RETRYABLE = frozenset((500, 502, 503, 504))
# The kind reported to a replica's watcher for an error that may not be the replica's fault.
UNCONFIRMED = "unconfirmed"
MOST_CRASHES = 2  # crashes or hangs under the same work of one request; a single one may be a coincidence


def of_status(status: int) -> str:
    return f"status {status}"


class FailureKind(NamedTuple):
    """The properties of a kind of failure."""

    computed: bool  # the replica may have computed the prompt
    blamed: bool  # it counts against the replica at once; otherwise another replica's answer decides (`blame`)
    crash: bool = False  # the replica crashed or hangs while it has the request
    counts: bool = True  # it uses up one of the request's attempts
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
# Failures of a second leg whose cache did not come.
TRANSFER_FAILED = frozenset(
    (TRANSFER_STALLED, PREFILL_FAILED, ERROR_ANSWER, *(of_status(status) for status in (500, 502, 504)))
)
# Failures that a pull from a peer may have caused: an error, an abort, a crash or a hang. An engine that is full, was
# not reached or is another process by now is no evidence about the pull.
PULL_FAILED = frozenset((CLOSED, HUNG, ABORTED, ERROR_ANSWER, *(of_status(status) for status in (500, 502, 504))))


# Failures of a replica that has ended or is shutting down.
AWAY = frozenset((ABORTED, LEFT, *(kind for kind, failure in KINDS.items() if not failure.sent)))


class Next(Enum):
    """The next step after a failed attempt."""

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
    """The properties of a failed attempt on which `after` depends."""

    kind: str
    stale: bool = False  # on a pooled connection, before any byte of an answer
    repeated: bool = False  # it was already the repetition on a new connection
    had_whole: bool = False  # the replica may have read the whole request on the connection before this attempt's
    handed_over: bool = False  # it was a second leg
    still_kept: bool = False  # it was a second leg whose parameters were valid
    computes: bool = True  # it was to compute the prompt, unlike a second leg
    writes: bool = True  # it was to write the answer, unlike a first leg
    beside: bool = False  # it was a first leg for which the second one waited; that one's failure may be the cause
    unread: bool = False  # its connection was closed before the replica can have read the whole request
    alone: bool = False  # no other replica is left
    agreed: bool = False  # two engines have answered alike: the request is at fault


def is_crash(failed: Failed) -> bool:
    """Return whether the replica crashed or hangs after it may have read the whole request.

    If it cannot have read it in this attempt (connection refused, closed unread, or to another process), this is a
    crash only if the previous connection was lost after the replica may have read the request.
    """
    if failed.unread or failed.kind in (CONNECT, REPLACED):
        return failed.had_whole
    return KINDS[failed.kind].crash


class Crashes(NamedTuple):
    """The number of replicas that crashed or hung while they had a request, by their work on it."""

    computing: int = 0  # while computing its prompt
    writing: int = 0  # while writing its answer

    @property
    def too_many(self) -> bool:
        return max(self) >= MOST_CRASHES

    def after(self, failed: Failed) -> Crashes:
        one = is_crash(failed)
        return Crashes(self.computing + (one and failed.computes), self.writing + (one and failed.writes))


NO_CRASHES = Crashes()


def after(failed: Failed, used: int, crashes: Crashes, retries: int) -> Next:
    """Return what follows a failed attempt.

    `used`: attempts that the request had used up before the failed one.
    `crashes`: crashes under the request before this failure.
    `retries`: the number of retries allowed after the first attempt.
    """
    if failed.kind == OWN:
        return Next.FULL
    if failed.kind == IDS or (failed.kind == CLOSED and failed.stale and not failed.repeated):
        return Next.SAME
    if crashes.after(failed).too_many:
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
    if failed.handed_over and failed.kind in TRANSFER_FAILED:
        return Next.WHOLE
    return Next.OTHER

"""What follows when an attempt fails before its client has a byte. Data, and one function over it. Pure.

The rules: a kept connection that died of old age, and a replica that did not take token ids, are asked once more, since
neither says anything about the replica. So is the last replica that is left, if it closed the connection before it can
have read the request: one of several processes behind its address may have ended. A connection is replaced once,
whichever of the two it was. Any other failure leads to another replica, as long as attempts and replicas are left. A
request under which two replicas went down or hung gets no third one: it may be what kills them. A replica that closed
the connection before it can have read all of the request is none of these. Nor is one that ends gracefully: whoever
replaces all engines in turn asks it to, so its requests go anywhere from there. One in two legs has two engines at
once, which may be of one machine: they do different work, so two that go down are too many only where both were
computing its prompt, or both were writing its answer.

A first leg that fails is placed anew without that replica. Where its answer shows that the replica keeps no cache for
others, or that it does not take the leg's body, the request stays whole. A second leg that was not sent goes to another
decoder, with the same parameters while they are good: an engine that was sent it may have fetched the cache, or had it
freed. After that the prompt is computed again, by a replica that most likely still has it in its own cache. An error
that an engine answers to a second leg is what a failed transfer looks like, and no answer for many times as long as
predicted what a stalled one does, so from then on the request stays whole. Of legs that run at the same time an engine
also answers with an error where the other one died, so that says of neither which it was: their pair is left out for a
while, and both stay.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

# Kinds of failure. The wire's own: no connection, one that ended, no HTTP, a replica that was removed meanwhile, and
# one that is another process by now.
CONNECT, CLOSED, PROTOCOL, REMOVED, REPLACED = "connect", "closed", "protocol", "removed", "replaced"
# The gateway itself cannot open a connection: it has no descriptors left.
OWN = "own"
# A replica that is unwell has sent nothing for too long; one that ends gracefully broke the connection, or stood still;
# a stream stopped; no byte came within the request's time.
HUNG, LEFT, STALLED, TIMEOUT = "hung", "left", "stalled", "timeout"
# What an answer shows: an error behind a status 200, what no engine wrote, that the engine gave up, that it takes no
# ids, and that the stored response which is asked for is another replica's.
ERROR_ANSWER, FOREIGN_ANSWER, ABORTED, IDS, ELSEWHERE = "error answer", "foreign answer", "aborted", "ids", "elsewhere"
# Of legs: the first one's replica kept no cache for the second; the body that a leg has instead of the client's was
# refused; the second one's replica waits for a cache that does not come; one that has the prompt computed elsewhere by
# itself says that this failed, or that it did: which of the two it was its answer does not tell.
NOT_KEPT, LEG_REFUSED, TRANSFER_STALLED = "not kept", "leg refused", "transfer stalled"
PREFILL_FAILED = "prefill failed"
# The replica that resumed a stream wrote something that does not follow what the client has.
DIFFERS = "differs"
SHUT_DOWN = "shutting_down"  # the gateway's own end cuts an answer
# Statuses after which another replica is asked, whatever the request. 501 means the engine can't do it at all, and
# neither can its siblings.
RETRYABLE = frozenset((500, 502, 503, 504))
# An error that is not known yet to be the replica's fault is told to its watcher as this.
UNCONFIRMED = "unconfirmed"
MOST_CRASHES = 2  # replicas that go down or hang with the same work of one request; one may be a coincidence


def of_status(status: int) -> str:
    return f"status {status}"


class FailureKind(NamedTuple):
    """What a failure of some kind says."""

    computed: bool  # the replica may have computed the prompt
    blamed: bool  # it counts against the replica at once; else what another one answers decides (`blame`)
    crash: bool = False  # the replica went down, or hangs, with the request in its hands
    counts: bool = True  # as one of the attempts that a request has
    sent: bool = True  # the replica may have got the request


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
# How a second leg ends whose cache did not come: what engines answer then, or no answer.
TRANSFER_FAILED = frozenset(
    (TRANSFER_STALLED, PREFILL_FAILED, ERROR_ANSWER, *(of_status(status) for status in (500, 502, 504)))
)
# How an attempt ends that a pull from a peer may have ended: an engine that answers with an error, gives up, goes down
# or hangs. One that is full, was not reached or is another process by now says nothing of it.
PULL_FAILED = frozenset((CLOSED, HUNG, ABORTED, ERROR_ANSWER, *(of_status(status) for status in (500, 502, 504))))


# How an attempt ends at a replica that is not there any more, or ends.
AWAY = frozenset((ABORTED, LEFT, *(kind for kind, failure in KINDS.items() if not failure.sent)))


class Next(Enum):
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
    """An attempt's end, as far as it matters here."""

    kind: str
    stale: bool = False  # on a kept connection, before a byte of an answer
    repeated: bool = False  # it was itself the repetition on a connection of its own ...
    had_whole: bool = False  # ... and the replica may have read all of the request on the one before
    handed_over: bool = False  # it was a second leg ...
    still_kept: bool = False  # ... whose parameters were good
    computes: bool = True  # it was to compute the prompt; a second leg is not
    writes: bool = True  # it was to write the answer; a first leg is not
    beside: bool = False  # it was a first leg while the second one waited for it, and may have failed because of that
    unread: bool = False  # its connection, kept or new, was closed before it can have read the whole request
    alone: bool = False  # no other replica is left
    agreed: bool = False  # two engines have answered alike: it is the request


def is_crash(failed: Failed) -> bool:
    """Whether the replica went down or hangs with the request in its hands, which it has once it has read all of it. A
    connection that brought it nothing whole (refused, closed unread, or one to another process) is a crash if the one
    before it died with this request on it."""
    if failed.unread or failed.kind in (CONNECT, REPLACED):
        return failed.had_whole
    return KINDS[failed.kind].crash


class Crashes(NamedTuple):
    """How many replicas went down or hung while they had a request, by what they did with it."""

    computing: int = 0  # its prompt
    writing: int = 0  # its answer

    @property
    def too_many(self) -> bool:
        return max(self) >= MOST_CRASHES

    def after(self, failed: Failed) -> Crashes:
        one = is_crash(failed)
        return Crashes(self.computing + (one and failed.computes), self.writing + (one and failed.writes))


NO_CRASHES = Crashes()


def after(failed: Failed, used: int, crashes: Crashes, retries: int) -> Next:
    """`used`: the attempts that the request has had before, as far as they count; `crashes`: of replicas under it,
    before this one; `retries`: how many more attempts than one it has."""
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

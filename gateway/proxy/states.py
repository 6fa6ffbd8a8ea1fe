"""The state machines of an exchange and of its attempts: tables alone, without clock, sockets or replicas.

An exchange is a client's request. An attempt sends it, or a part of it, to one replica. The states of an exchange:

              prepared        placed           answered
    PREPARING -------> PLACING -----> TRYING ----------> ANSWERING --finished--> ENDED
        |               | ^             |                    |
        |               | +-- failed ---+                    +--failed, timed out--> ENDED (cut)
        +-refused-> ENDED <- refused, exhausted, timed out

With service classes or limits, a request for which no replica has room waits in the queue. It stays PLACING meanwhile.
When it leaves the queue, its replica is chosen by the load at that time.

The states of an attempt:

    CONNECTING --connected--> AWAITING --answered--> ANSWERING --finished--> ENDED

An exchange may have two legs, each an attempt: one replica computes the prompt (prefill), another writes the answer
(decode). The answer to the first leg is never relayed. So the first attempt goes from AWAITING to ENDED, the exchange
stays TRYING (`handed over`), and the client gets the answer to the second leg.

Until the first byte of an answer has gone to the client, a failed attempt may be followed by another one. After that, a
failure ends the answer in a way that the client can notice: the exchange is cut.

With --continue-streams, a failure within a stream leads from ANSWERING to RESUMING instead (`interrupted`). Attempts
follow each other there as in TRYING, and the first byte of the stream's rest leads back to ANSWERING. Only a stream
that no replica resumes is cut.

`gone` (the client left) ends an exchange in any state. An attempt ends when its replica's answer is complete, when it
fails, and when its exchange no longer needs it (`dropped`). A pair of state and event that is not in the tables is a
bug, and raises KeyError.

Looking up a member of these classes takes 100 ns, a module's global variable 5 ns. So modules that need a member for
each request or read assign it to a global of their own.
"""

from __future__ import annotations

from enum import Enum

# Outcomes of an exchange that metrics count in place of its status: the client left, or the answer broke off.
BROKEN_OFF = frozenset(("aborted", "cut"))


class Leg(Enum):
    """The two legs of a request: one replica computes the prompt (prefill), another writes the answer (decode)."""

    PREFILL = "prefill"
    DECODE = "decode"

    __hash__ = object.__hash__


class ExchangeState(Enum):
    """The states of an exchange, which is one client's request."""

    PREPARING = "preparing"  # the prompt is being tokenized
    # A replica is being chosen: at once, unless the request waits in the queue or Redis has the gateways' load ledger.
    # A request that is repeated at the same replica is in this state for a moment, and keeps the load reserved there.
    PLACING = "placing"
    TRYING = "trying"  # an attempt is under way, and nothing of an answer has gone to the client
    ANSWERING = "answering"  # the first byte of an answer has gone to the client
    RESUMING = "resuming"  # the replica failed within the stream: another one is chosen, or asked for the rest
    ENDED = "ended"

    __hash__ = object.__hash__  # the one of Enum is written in Python, and triples the time of a lookup in the table


class ExchangeEvent(Enum):
    """The events that change the state of an exchange, which is one client's request."""

    PREPARED = "prepared"  # the prompt is tokenized, or need not be
    REFUSED = "refused"  # the request cannot be served: it is invalid or not allowed, or there is no replica
    PLACED = "placed"  # load is reserved on a replica, a newly chosen one or the same again
    ANSWERED = "answered"  # the first bytes for the client have come
    HANDED_OVER = "handed over"  # the first leg is complete: another replica can fetch the prompt's cache
    FAILED = "failed"  # the attempt failed
    INTERRUPTED = "interrupted"  # the attempt failed, and another replica may resume its answer
    EXHAUSTED = "exhausted"  # no attempt or no replica is left
    FINISHED = "finished"  # the answer is complete
    TIMED_OUT = "timed out"  # a deadline has passed, or the gateway shuts down
    GONE = "gone"  # the client has left

    __hash__ = object.__hash__


S, E = ExchangeState, ExchangeEvent
# (state, event) -> (next state, the method that acts: of `Handler` in handle.py, or `Failures` in failures/actions.py)
TRANSITIONS: dict[tuple[ExchangeState, ExchangeEvent], tuple[ExchangeState, str]] = {
    **{(state, E.GONE): (S.ENDED, "Failures.client_left") for state in S if state is not S.ENDED},
    (S.PREPARING, E.PREPARED): (S.PLACING, "Handler.place"),
    (S.PREPARING, E.REFUSED): (S.ENDED, "Failures.turn_away"),
    (S.PREPARING, E.TIMED_OUT): (S.ENDED, "Failures.answer_error"),
    (S.PLACING, E.PLACED): (S.TRYING, "Handler.start"),
    (S.PLACING, E.REFUSED): (S.ENDED, "Failures.turn_away"),
    (S.PLACING, E.EXHAUSTED): (S.ENDED, "Failures.answer_error"),
    (S.PLACING, E.TIMED_OUT): (S.ENDED, "Failures.answer_error"),
    (S.TRYING, E.ANSWERED): (S.ANSWERING, "Handler.relay"),
    (S.TRYING, E.HANDED_OVER): (S.TRYING, "Handler.hand_over"),
    (S.TRYING, E.FAILED): (S.PLACING, "Failures.retry"),
    (S.TRYING, E.TIMED_OUT): (S.ENDED, "Failures.answer_error"),
    (S.ANSWERING, E.FINISHED): (S.ENDED, "Handler.settle"),
    (S.ANSWERING, E.FAILED): (S.ENDED, "Failures.cut"),
    (S.ANSWERING, E.TIMED_OUT): (S.ENDED, "Failures.cut"),
    (S.ANSWERING, E.INTERRUPTED): (S.RESUMING, "Failures.resume"),
    (S.RESUMING, E.PLACED): (S.RESUMING, "Handler.start"),
    (S.RESUMING, E.FAILED): (S.RESUMING, "Failures.retry"),
    (S.RESUMING, E.ANSWERED): (S.ANSWERING, "Handler.join"),
    (S.RESUMING, E.FINISHED): (S.ENDED, "Handler.settle"),  # only the end of the stream was missing
    (S.RESUMING, E.REFUSED): (S.ENDED, "Failures.give_up"),
    (S.RESUMING, E.EXHAUSTED): (S.ENDED, "Failures.give_up"),
    (S.RESUMING, E.TIMED_OUT): (S.ENDED, "Failures.give_up"),
}


class AttemptState(Enum):
    """The states of an attempt to have one replica answer a request."""

    CONNECTING = "connecting"  # a replica is chosen and reserved, no connection yet
    AWAITING = "awaiting"  # the request is sent, and nothing of an answer has gone to the client
    ANSWERING = "answering"  # what the replica sends goes to the client
    ENDED = "ended"

    __hash__ = object.__hash__


class AttemptEvent(Enum):
    """The events that change the state of an attempt to have one replica answer a request."""

    CONNECTED = "connected"
    ANSWERED = "answered"
    FINISHED = "finished"
    FAILED = "failed"  # no connection, a broken one, or no valid answer
    DROPPED = "dropped"  # the exchange no longer needs it

    __hash__ = object.__hash__


L, T = AttemptState, AttemptEvent
ATTEMPT_TRANSITIONS: dict[tuple[AttemptState, AttemptEvent], AttemptState] = {
    (L.CONNECTING, T.CONNECTED): L.AWAITING,
    (L.CONNECTING, T.FAILED): L.ENDED,
    (L.CONNECTING, T.DROPPED): L.ENDED,
    (L.AWAITING, T.ANSWERED): L.ANSWERING,
    (L.AWAITING, T.FINISHED): L.ENDED,  # a first leg, whose answer is not relayed
    (L.AWAITING, T.FAILED): L.ENDED,
    (L.AWAITING, T.DROPPED): L.ENDED,
    (L.ANSWERING, T.FINISHED): L.ENDED,
    (L.ANSWERING, T.FAILED): L.ENDED,
    (L.ANSWERING, T.DROPPED): L.ENDED,
}

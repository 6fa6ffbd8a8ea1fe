"""The state machines of an exchange and its attempts, as pure tables without clock, sockets or replicas.

An exchange is a client's request; an attempt sends it, or one leg of it, to one replica:

              prepared        placed           answered
    PREPARING -------> PLACING -----> TRYING ----------> ANSWERING --finished--> ENDED
        |               | ^             |                    |
        |               | +-- failed ---+                    +--failed, timed out--> ENDED (cut)
        +-refused-> ENDED <- refused, exhausted, timed out

Where requests are admitted by class or limit, a request for which no replica has room goes from PLACING to QUEUED
(`held`), and back when its turn comes (`called`); it is then placed by the replicas' load at that time.

    CONNECTING --connected--> AWAITING --answered--> ANSWERING --finished--> ENDED

Where one replica computes the prompt and another writes the answer, an exchange has two legs, each an attempt. The
answer to the first leg is kept and never relayed: the first attempt goes from AWAITING to ENDED, the exchange stays
TRYING (`handed over`), and the second leg is the attempt whose answer the client gets.

Until the first byte of an answer has gone to the client, a failed attempt may be followed by another one. After that, a
failure ends the answer in a way that the client can notice: the exchange is cut. Where streams are resumed, the
exchange goes from ANSWERING to RESUMING instead (`interrupted`). Attempts follow each other there as in TRYING, and the
first byte of the rest leads back to ANSWERING; only a stream that no replica resumes is cut. `gone` (the client left)
ends every state. An attempt ends when its replica's answer is complete, when it fails, and when its exchange no longer
needs it (`dropped`). A pair of state and event that is not in the tables is a bug, and raises KeyError.

Looking up a member of these classes takes 100 ns, a module's global 5 ns: modules that need a member for each request
or read give it a name of their own.
"""

from __future__ import annotations

from enum import Enum

BROKEN_OFF = frozenset(("aborted", "cut"))  # outcomes of an exchange that replace its status in metrics


class Leg(Enum):
    """The two legs of a request: one replica computes the prompt (prefill), another writes the answer (decode)."""

    PREFILL = "prefill"
    DECODE = "decode"

    __hash__ = object.__hash__


class ExchangeState(Enum):
    """The states of an exchange."""

    PREPARING = "preparing"  # the prompt is being tokenized
    PLACING = "placing"  # a replica is being chosen; takes no time unless the ledger is shared
    QUEUED = "queued"  # the request waits until there is room
    TRYING = "trying"  # an attempt is under way, nothing of an answer has gone to the client
    ANSWERING = "answering"  # the client has the first byte
    RESUMING = "resuming"  # the replica failed within the stream: another one is chosen or asked to resume it
    ENDED = "ended"

    __hash__ = object.__hash__  # Enum's own runs in Python and triples the time of a lookup in the table


class ExchangeEvent(Enum):
    """The events of an exchange."""

    PREPARED = "prepared"
    REFUSED = "refused"  # the request cannot be served: it is invalid or not allowed, or there is no replica
    HELD = "held"  # no replica has room for the request now
    CALLED = "called"  # a replica may have room for it
    PLACED = "placed"
    ANSWERED = "answered"
    HANDED_OVER = "handed over"  # the first leg is complete: another replica can fetch the prompt's cache
    FAILED = "failed"  # the attempt failed
    INTERRUPTED = "interrupted"  # the attempt failed, and another replica may resume its answer
    EXHAUSTED = "exhausted"  # no attempt or no replica is left
    FINISHED = "finished"
    TIMED_OUT = "timed out"
    GONE = "gone"

    __hash__ = object.__hash__


class Action(Enum):
    """The actions that follow events of an exchange."""

    PLACE = "choose a replica and reserve"
    HOLD = "let it wait"
    TRY = "take or open a connection to it, and send"
    RETRY = "try the same replica again, or another one"
    HAND_OVER = "settle the first leg, send the second one"
    RELAY = "send head and bytes to the client"
    SETTLE = "release, learn, check, log"
    RESUME = "settle what broke off, choose a replica for the rest"
    JOIN = "send the rest behind what the client has"
    CUT = "end the client's stream so that it can tell"
    GIVE_UP = "no replica resumes it: end the client's stream so that it can tell"
    TURN_AWAY = "answer with an error; no replica was asked"
    REPORT = "answer with an error"
    ABANDON = "nobody waits for an answer"

    __hash__ = object.__hash__


S, E, A = ExchangeState, ExchangeEvent, Action
TRANSITIONS: dict[tuple[ExchangeState, ExchangeEvent], tuple[ExchangeState, Action]] = {
    (S.PREPARING, E.PREPARED): (S.PLACING, A.PLACE),
    (S.PREPARING, E.REFUSED): (S.ENDED, A.TURN_AWAY),
    (S.PREPARING, E.TIMED_OUT): (S.ENDED, A.REPORT),
    (S.PREPARING, E.GONE): (S.ENDED, A.ABANDON),
    (S.PLACING, E.HELD): (S.QUEUED, A.HOLD),
    (S.QUEUED, E.CALLED): (S.PLACING, A.PLACE),
    (S.QUEUED, E.REFUSED): (S.ENDED, A.TURN_AWAY),
    (S.QUEUED, E.TIMED_OUT): (S.ENDED, A.REPORT),
    (S.QUEUED, E.GONE): (S.ENDED, A.ABANDON),
    (S.PLACING, E.PLACED): (S.TRYING, A.TRY),
    (S.PLACING, E.REFUSED): (S.ENDED, A.TURN_AWAY),
    (S.PLACING, E.EXHAUSTED): (S.ENDED, A.REPORT),
    (S.PLACING, E.TIMED_OUT): (S.ENDED, A.REPORT),
    (S.PLACING, E.GONE): (S.ENDED, A.ABANDON),
    (S.TRYING, E.ANSWERED): (S.ANSWERING, A.RELAY),
    (S.TRYING, E.HANDED_OVER): (S.TRYING, A.HAND_OVER),
    (S.TRYING, E.FAILED): (S.PLACING, A.RETRY),
    (S.TRYING, E.TIMED_OUT): (S.ENDED, A.REPORT),
    (S.TRYING, E.GONE): (S.ENDED, A.ABANDON),
    (S.ANSWERING, E.FINISHED): (S.ENDED, A.SETTLE),
    (S.ANSWERING, E.FAILED): (S.ENDED, A.CUT),
    (S.ANSWERING, E.TIMED_OUT): (S.ENDED, A.CUT),
    (S.ANSWERING, E.GONE): (S.ENDED, A.ABANDON),
    (S.ANSWERING, E.INTERRUPTED): (S.RESUMING, A.RESUME),
    (S.RESUMING, E.PLACED): (S.RESUMING, A.TRY),
    (S.RESUMING, E.FAILED): (S.RESUMING, A.RETRY),
    (S.RESUMING, E.ANSWERED): (S.ANSWERING, A.JOIN),
    (S.RESUMING, E.FINISHED): (S.ENDED, A.SETTLE),  # only the end of the stream was missing
    (S.RESUMING, E.REFUSED): (S.ENDED, A.GIVE_UP),
    (S.RESUMING, E.EXHAUSTED): (S.ENDED, A.GIVE_UP),
    (S.RESUMING, E.TIMED_OUT): (S.ENDED, A.GIVE_UP),
    (S.RESUMING, E.GONE): (S.ENDED, A.ABANDON),
}


class AttemptState(Enum):
    """The states of an attempt."""

    CONNECTING = "connecting"  # a replica is chosen and reserved, no connection yet
    AWAITING = "awaiting"  # the request is sent, nothing of an answer has gone to the client
    ANSWERING = "answering"
    ENDED = "ended"

    __hash__ = object.__hash__


class AttemptEvent(Enum):
    """The events of an attempt."""

    CONNECTED = "connected"
    ANSWERED = "answered"
    FINISHED = "finished"
    FAILED = "failed"  # no connection, a broken one, or no valid answer
    DROPPED = "dropped"

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

"""An exchange and its attempts as tables. Pure: no clock, no sockets, no replicas.

An exchange is what a client asked for; an attempt is one leg of it, to one replica:

              prepared        placed           answered
    PREPARING -------> PLACING -----> TRYING ----------> ANSWERING --finished--> ENDED
        |               | ^             |                    |
        |               | +-- failed ---+                    +--failed, timed out--> ENDED (cut)
        +-refused-> ENDED <- refused, exhausted, timed out

Where requests are admitted by class or limit, one for which there is no room goes from PLACING to QUEUED (`held`), and
back when it is its turn (`called`), to be placed by what is true then.

    CONNECTING --connected--> AWAITING --answered--> ANSWERING --finished--> ENDED

Where a prompt is computed on one replica and its answer written by another, an exchange has two legs, each an attempt.
The answer to the first one is kept and never relayed: it goes from AWAITING to ENDED, the exchange stays TRYING
(`handed over`), and the second leg is the attempt that answers.

Until the first byte of an answer has gone to the client, a failed attempt is followed by another one; from then on the
exchange is cut, and the client must be able to tell. Where streams are resumed (`interrupted`), it goes from
ANSWERING to RESUMING instead, where attempts follow each other as in TRYING, and back with the first byte of the rest;
only a stream that no replica resumes is cut. `gone` (the client left) ends every state. An attempt
ends when its replica's answer is complete, when it fails, and when its exchange does not want it any more (`dropped`).
A pair that is not in its table can't happen; if it does, it is a bug and raises.

Looking up a member of these classes takes 100 ns, a name of a module 5: where a member is needed for each request or
each read, the module that needs it gives it a name.
"""

from __future__ import annotations

from enum import Enum

BROKEN_OFF = frozenset(("aborted", "cut"))  # outcomes of an exchange that stand in place of a status


class Leg(Enum):
    """Which part of an exchange an attempt is, where it is not the whole."""

    PREFILL = "prefill"
    DECODE = "decode"

    __hash__ = object.__hash__


class ExchangeState(Enum):
    """Of an exchange."""

    PREPARING = "preparing"  # tokens are being made
    PLACING = "placing"  # a replica is being chosen; takes no time unless the ledger is shared
    QUEUED = "queued"  # it waits until there is room
    TRYING = "trying"  # an attempt is under way, nothing of an answer has gone to the client
    ANSWERING = "answering"  # the client has the first byte
    RESUMING = "resuming"  # its replica broke off: another one is being chosen or asked to resume it
    ENDED = "ended"

    __hash__ = object.__hash__  # Enum's own runs in Python: 3 x the time of a lookup in the table


class ExchangeEvent(Enum):
    """In an exchange."""

    PREPARED = "prepared"
    REFUSED = "refused"  # the request can't be served as it is: the client's fault, or no replica
    HELD = "held"  # no replica has room for it now
    CALLED = "called"  # one may have room for it
    PLACED = "placed"
    ANSWERED = "answered"
    HANDED_OVER = "handed over"  # the first leg is complete: another replica can fetch the prompt's cache
    FAILED = "failed"  # the attempt did
    INTERRUPTED = "interrupted"  # the attempt failed, and another replica may resume its answer
    EXHAUSTED = "exhausted"  # no attempt or no replica is left
    FINISHED = "finished"
    TIMED_OUT = "timed out"
    GONE = "gone"

    __hash__ = object.__hash__


class Action(Enum):
    """What follows in an exchange."""

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
    (S.RESUMING, E.FINISHED): (S.ENDED, A.SETTLE),  # all was written but what closes the stream
    (S.RESUMING, E.REFUSED): (S.ENDED, A.GIVE_UP),
    (S.RESUMING, E.EXHAUSTED): (S.ENDED, A.GIVE_UP),
    (S.RESUMING, E.TIMED_OUT): (S.ENDED, A.GIVE_UP),
    (S.RESUMING, E.GONE): (S.ENDED, A.ABANDON),
}


class AttemptState(Enum):
    """States of an attempt."""

    CONNECTING = "connecting"  # a replica is chosen and reserved, no connection yet
    AWAITING = "awaiting"  # the request is sent, nothing of an answer has gone to the client
    ANSWERING = "answering"
    ENDED = "ended"

    __hash__ = object.__hash__


class AttemptEvent(Enum):
    """Events in an attempt."""

    CONNECTED = "connected"
    ANSWERED = "answered"
    FINISHED = "finished"
    FAILED = "failed"  # no connection, or it broke, or the answer is none
    DROPPED = "dropped"

    __hash__ = object.__hash__


L, T = AttemptState, AttemptEvent
ATTEMPT_TRANSITIONS: dict[tuple[AttemptState, AttemptEvent], AttemptState] = {
    (L.CONNECTING, T.CONNECTED): L.AWAITING,
    (L.CONNECTING, T.FAILED): L.ENDED,
    (L.CONNECTING, T.DROPPED): L.ENDED,
    (L.AWAITING, T.ANSWERED): L.ANSWERING,
    (L.AWAITING, T.FINISHED): L.ENDED,  # a first leg, of which the client gets nothing
    (L.AWAITING, T.FAILED): L.ENDED,
    (L.AWAITING, T.DROPPED): L.ENDED,
    (L.ANSWERING, T.FINISHED): L.ENDED,
    (L.ANSWERING, T.FAILED): L.ENDED,
    (L.ANSWERING, T.DROPPED): L.ENDED,
}

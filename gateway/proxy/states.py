"""The life of a request as a table. Pure: no clock, no sockets, no replicas.

              prepared          chosen            connected          answered
    PREPARING --------> CHOOSING ------> CONNECTING -------> AWAITING -------> STREAMING --finished--> ENDED
        |                 | ^                |                   |                 |
        |                 | +----- lost -----+---- lost, unwell -+                 |
        |                 |   (retry, on another replica)                          |
        +-refused--> ENDED+--exhausted, timed out--> ENDED                         +--lost, timed out--> ENDED (cut)

Until the first byte of an answer has gone to the client a failure moves the request to another
replica; from then on it can only be cut, and the client must be able to tell. `gone` (the client left)
ends every state. A pair that is not in the table can't happen; if it does, it is a bug and raises.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    PREPARING = "preparing"  # tokens are being made
    CHOOSING = "choosing"  # a replica is being chosen; takes no time unless the ledger is shared
    CONNECTING = "connecting"  # a replica is chosen and reserved, no connection yet
    AWAITING = "awaiting"  # the request is sent, nothing of an answer has gone to the client
    STREAMING = "streaming"  # the client has the first byte
    ENDED = "ended"

    __hash__ = object.__hash__  # Enum's own runs in Python: 3 x the time of a lookup in the table


class Event(Enum):
    PREPARED = "prepared"
    REFUSED = "refused"  # the request can't be served as it is: the client's fault, or no replica
    CHOSEN = "chosen"
    CONNECTED = "connected"
    UNWELL = "unwell"  # the replica answered 5xx and another one may do better
    LOST = "lost"  # no connection, or it broke
    EXHAUSTED = "exhausted"  # no attempt or no replica is left
    ANSWERED = "answered"
    FINISHED = "finished"
    TIMED_OUT = "timed out"
    GONE = "gone"

    __hash__ = object.__hash__


class Action(Enum):
    CHOOSE = "choose a replica and reserve"
    CONNECT = "take or open a connection"
    SEND = "send the request"
    RETRY = "release, exclude the replica, choose again"
    RELAY = "send head and bytes to the client"
    SETTLE = "release, learn, check, log"
    CUT = "end the client's stream so that it can tell"
    REPORT = "answer with an error"
    ABANDON = "close the upstream connection, release"

    __hash__ = object.__hash__


S, E, A = State, Event, Action
TRANSITIONS: dict[tuple[State, Event], tuple[State, Action]] = {
    (S.PREPARING, E.PREPARED): (S.CHOOSING, A.CHOOSE),
    (S.PREPARING, E.REFUSED): (S.ENDED, A.REPORT),
    (S.PREPARING, E.TIMED_OUT): (S.ENDED, A.REPORT),
    (S.PREPARING, E.GONE): (S.ENDED, A.ABANDON),
    (S.CHOOSING, E.CHOSEN): (S.CONNECTING, A.CONNECT),
    (S.CHOOSING, E.EXHAUSTED): (S.ENDED, A.REPORT),
    (S.CHOOSING, E.TIMED_OUT): (S.ENDED, A.REPORT),
    (S.CHOOSING, E.GONE): (S.ENDED, A.ABANDON),
    (S.CONNECTING, E.CONNECTED): (S.AWAITING, A.SEND),
    (S.CONNECTING, E.LOST): (S.CHOOSING, A.RETRY),
    (S.CONNECTING, E.TIMED_OUT): (S.ENDED, A.REPORT),
    (S.CONNECTING, E.GONE): (S.ENDED, A.ABANDON),
    (S.AWAITING, E.ANSWERED): (S.STREAMING, A.RELAY),
    (S.AWAITING, E.UNWELL): (S.CHOOSING, A.RETRY),
    (S.AWAITING, E.LOST): (S.CHOOSING, A.RETRY),
    (S.AWAITING, E.TIMED_OUT): (S.ENDED, A.REPORT),
    (S.AWAITING, E.GONE): (S.ENDED, A.ABANDON),
    (S.STREAMING, E.FINISHED): (S.ENDED, A.SETTLE),
    (S.STREAMING, E.LOST): (S.ENDED, A.CUT),
    (S.STREAMING, E.TIMED_OUT): (S.ENDED, A.CUT),
    (S.STREAMING, E.GONE): (S.ENDED, A.ABANDON),
}

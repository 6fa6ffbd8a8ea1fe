"""The life cycle of a replica as a table: which event leads from which state to which.

No clock, no I/O. An event that the table does not have for a state leaves the state as it is, so a late event (such as
a probe's answer about a replica that is draining) does no harm.

  STARTING  launched, or adopted and not answering yet    no traffic
  WARMING   answers, but does not list its model yet      no traffic
  READY     answers and serves                            traffic
  DEGRADED  up, but requests or probes fail, or nothing   traffic only if no replica is READY
            is computed though requests wait
  LEAVING   its engine shuts down gracefully: it finishes no new traffic
            its requests and takes nothing new
  DRAINING  finishes its requests                         no new traffic
  STOPPED   drained, on purpose; comes back only when asked
  FAILED    exited, unreachable or hung; comes back by itself when it answers again
"""

from enum import StrEnum


class State(StrEnum):
    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    DEGRADED = "degraded"
    LEAVING = "leaving"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


TAKES_TRAFFIC = (State.READY, State.DEGRADED)  # in this order: DEGRADED only if no replica is READY
# IN_USE: the adopted engine still runs and is probed. ENGINE_THERE has DRAINING too: such a replica may still get
# requests that were placed there before.
IN_USE = (*TAKES_TRAFFIC, State.LEAVING)
ENGINE_THERE = (*IN_USE, State.DRAINING)


class Event(StrEnum):
    LAUNCHED = "launched"  # a process was started, or a stopped replica is resumed
    ANSWERS = "answers"  # /health is 200
    SERVES = "serves"  # /health is 200 and /v1/models lists the model
    TROUBLE = "trouble"  # traffic or probes fail, or requests only wait, yet something answers
    LEAVES = "leaves"  # it refuses new requests and continues those it has
    GONE = "gone"  # exited, connection refused, or silent for too long
    RESTARTED = "restarted"  # answers, but as another process than before
    DOUBTED = "doubted"  # something answers, but not as the former engine did
    DRAIN = "drain"
    STOPPED = "stopped"


# The events that have an effect in every state but DRAINING and STOPPED; and (`_SERVED`) those that have one while a
# replica serves: in READY, DEGRADED and LEAVING.
_ALWAYS = {
    Event.LAUNCHED: State.STARTING,
    Event.GONE: State.FAILED,
    Event.DRAIN: State.DRAINING,
    Event.STOPPED: State.STOPPED,
}
_SERVED = _ALWAYS | {
    Event.TROUBLE: State.DEGRADED,
    Event.LEAVES: State.LEAVING,
    Event.RESTARTED: State.WARMING,
    Event.DOUBTED: State.WARMING,
}
TABLE: dict[State, dict[Event, State]] = {
    State.STARTING: _ALWAYS | {Event.ANSWERS: State.WARMING},
    State.WARMING: _ALWAYS | {Event.SERVES: State.READY},
    State.READY: _SERVED,
    State.DEGRADED: _SERVED | {Event.SERVES: State.READY},
    State.LEAVING: _SERVED | {Event.SERVES: State.READY},
    State.DRAINING: {Event.GONE: State.STOPPED, Event.STOPPED: State.STOPPED},
    State.STOPPED: {Event.LAUNCHED: State.STARTING},
    State.FAILED: _ALWAYS | {Event.ANSWERS: State.WARMING},
}


def follows(state: State, event: Event) -> State | None:
    """Return the state after `event`, or None if the event has no effect in this state."""
    return TABLE[state].get(event)

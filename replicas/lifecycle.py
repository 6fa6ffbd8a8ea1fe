"""A replica's life as a table: which state follows which event.

Pure: no clock, no I/O. A pair that is not in the table leaves the state as it is, so late news (a
probe's answer about a replica that is draining) can do no harm.

  STARTING  launched, or adopted and not heard yet        no traffic
  WARMING   answers, but has not said it serves its model  no traffic
  READY     answers and serves                             traffic
  DEGRADED  up, but requests or probes fail, or nothing    traffic only if no replica is READY
            is computed though requests wait
  LEAVING   its engine ends gracefully: it finishes what    no new traffic
            it has, and takes nothing new
  DRAINING  finishes what it has                           no new traffic
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


TAKES_TRAFFIC = (State.READY, State.DEGRADED)  # in this order: the second only where no replica is in the first
# The engine that was adopted still runs, and is looked at; in the second one a draining one as well, which may get what
# it was chosen for before.
IN_USE = (*TAKES_TRAFFIC, State.LEAVING)
ENGINE_THERE = (*IN_USE, State.DRAINING)


class Event(StrEnum):
    LAUNCHED = "launched"  # a process was started, or a stopped replica is wanted again
    ANSWERS = "answers"  # /health is 200
    SERVES = "serves"  # /health is 200 and /v1/models lists the model
    TROUBLE = "trouble"  # traffic or probes fail, or requests only wait, yet somebody is there
    LEAVES = "leaves"  # it turns newcomers away, and goes on with what it has
    GONE = "gone"  # exited, nobody listens, or silent for too long
    RESTARTED = "restarted"  # answers, but it is another process than before
    DOUBTED = "doubted"  # something answers, but not as the engine did that was there
    DRAIN = "drain"
    STOPPED = "stopped"


TABLE: dict[State, dict[Event, State]] = {
    State.STARTING: {
        Event.LAUNCHED: State.STARTING,
        Event.ANSWERS: State.WARMING,
        Event.GONE: State.FAILED,
        Event.DRAIN: State.DRAINING,
        Event.STOPPED: State.STOPPED,
    },
    State.WARMING: {
        Event.LAUNCHED: State.STARTING,
        Event.SERVES: State.READY,
        Event.GONE: State.FAILED,
        Event.DRAIN: State.DRAINING,
        Event.STOPPED: State.STOPPED,
    },
    State.READY: {
        Event.LAUNCHED: State.STARTING,
        Event.TROUBLE: State.DEGRADED,
        Event.LEAVES: State.LEAVING,
        Event.RESTARTED: State.WARMING,
        Event.DOUBTED: State.WARMING,
        Event.GONE: State.FAILED,
        Event.DRAIN: State.DRAINING,
        Event.STOPPED: State.STOPPED,
    },
    State.DEGRADED: {
        Event.LAUNCHED: State.STARTING,
        Event.SERVES: State.READY,
        Event.TROUBLE: State.DEGRADED,
        Event.LEAVES: State.LEAVING,
        Event.RESTARTED: State.WARMING,
        Event.DOUBTED: State.WARMING,
        Event.GONE: State.FAILED,
        Event.DRAIN: State.DRAINING,
        Event.STOPPED: State.STOPPED,
    },
    State.LEAVING: {
        Event.LAUNCHED: State.STARTING,
        Event.SERVES: State.READY,
        Event.TROUBLE: State.DEGRADED,
        Event.LEAVES: State.LEAVING,
        Event.RESTARTED: State.WARMING,
        Event.DOUBTED: State.WARMING,
        Event.GONE: State.FAILED,
        Event.DRAIN: State.DRAINING,
        Event.STOPPED: State.STOPPED,
    },
    State.DRAINING: {
        Event.GONE: State.STOPPED,
        Event.STOPPED: State.STOPPED,
    },
    State.STOPPED: {
        Event.LAUNCHED: State.STARTING,
    },
    State.FAILED: {
        Event.LAUNCHED: State.STARTING,
        Event.ANSWERS: State.WARMING,
        Event.GONE: State.FAILED,
        Event.DRAIN: State.DRAINING,
        Event.STOPPED: State.STOPPED,
    },
}


def follows(state: State, event: Event) -> State | None:
    """The state after `event`, or None where the event means nothing in this state."""
    return TABLE[state].get(event)

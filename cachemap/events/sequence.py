"""The detection of lost, repeated and restarted event batches, by their numbers and timestamps."""

from enum import Enum


class Order(Enum):
    """How a batch of events relates to the last batch applied."""

    FIRST = "first"  # no batch was applied yet
    CONTIGUOUS = "contiguous"  # the batch directly after the last one
    GAP = "gap"  # batches between the two were lost
    STALE = "stale"  # applied already, or late
    RESTART = "restart"  # the numbering started again: the engine's process was restarted


def classify(last: int | None, last_timestamp: float, sequence: int, timestamp: float) -> Order:
    """Return how a batch relates to the last batch applied.

    `last`, `last_timestamp`: number and time of the last batch applied; `last` is None if there is none.
    `sequence`, `timestamp`: number and time of the new batch. Times are by the engine's clock.

    A batch whose number is not above the last one's came again or late, unless it was sent after the last one. In that
    case the engine has restarted, and its old blocks are gone. The first batch of a restarted engine counts as late if
    its timestamp equals the last batch's.
    """
    if last is None:
        return Order.FIRST
    if sequence == last + 1:
        return Order.CONTIGUOUS
    if sequence > last:
        return Order.GAP
    return Order.RESTART if timestamp > last_timestamp else Order.STALE

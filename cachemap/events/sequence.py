"""The detection of lost, repeated and restarted event batches, by their numbers and timestamps."""

from enum import Enum


class Order(Enum):
    """How a batch of events relates to the last batch applied."""

    FIRST = "first"  # nothing was applied yet
    CONTIGUOUS = "contiguous"  # the one expected
    GAP = "gap"  # some between were lost
    STALE = "stale"  # applied already, or overtaken
    RESTART = "restart"  # the numbering started again: another incarnation of the engine


def classify(last: int | None, last_timestamp: float, sequence: int, timestamp: float) -> Order:
    """Return how a batch relates to the last batch applied.

    `last`, `last_timestamp`: number and time of the last batch applied; `last` is None if there is none.
    `sequence`, `timestamp`: number and time of the new batch. Times are by the engine's clock.

    A batch whose number is not above the last one came again or late, unless it was sent after the last one: then the
    engine has restarted and its old blocks are gone. A restarted engine's first batch counts as old if its timestamp
    equals the last one.
    """
    if last is None:
        return Order.FIRST
    if sequence == last + 1:
        return Order.CONTIGUOUS
    if sequence > last:
        return Order.GAP
    return Order.RESTART if timestamp > last_timestamp else Order.STALE

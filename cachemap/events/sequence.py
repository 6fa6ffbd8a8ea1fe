"""The order of event batches, by their numbers and timestamps."""

from enum import Enum


class Order(Enum):
    """The relation of a batch to the last one applied."""

    FIRST = "first"  # nothing was applied yet
    CONTIGUOUS = "contiguous"  # the one expected
    GAP = "gap"  # some between were lost
    STALE = "stale"  # applied already, or overtaken
    RESTART = "restart"  # the numbering started again: another incarnation of the engine


def classify(last: int | None, last_timestamp: float, sequence: int, timestamp: float) -> Order:
    """Return the order of batch `sequence`, sent at `timestamp` by the engine's clock, relative to the last one.

    A number that is not above the last one is an old batch that came again or late, unless it was sent after the last
    one: then the engine has restarted and its old blocks are gone. A restarted engine's first batch counts as old if
    its timestamp equals the last one.
    """
    if last is None:
        return Order.FIRST
    if sequence == last + 1:
        return Order.CONTIGUOUS
    if sequence > last:
        return Order.GAP
    return Order.RESTART if timestamp > last_timestamp else Order.STALE

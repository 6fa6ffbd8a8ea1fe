"""What a batch's number says about those before it: pure, one decision."""

from enum import Enum


class Order(Enum):
    """How a batch stands to the last one applied."""

    FIRST = "first"  # nothing was applied yet
    CONTIGUOUS = "contiguous"  # the one expected
    GAP = "gap"  # some between were lost
    STALE = "stale"  # applied already, or overtaken
    RESTART = "restart"  # the numbering began anew: another incarnation of the engine


def classify(last: int | None, last_timestamp: float, sequence: int, timestamp: float) -> Order:
    """Order of batch `sequence`, sent at `timestamp` by the engine's clock.

    A number not above the last one is an old batch that came again or late, unless it was
    sent after the last: then the engine started over and its old blocks are gone. The
    first number of all sent at the very same time counts as old.
    """
    if last is None:
        return Order.FIRST
    if sequence == last + 1:
        return Order.CONTIGUOUS
    if sequence > last:
        return Order.GAP
    return Order.RESTART if timestamp > last_timestamp else Order.STALE

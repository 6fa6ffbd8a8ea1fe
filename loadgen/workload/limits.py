"""The `max_tokens` that clients send: a bound on a reply, and all that a gateway knows of its length beforehand.

A load generator asks for replies of known length and sends that length, which no other client can. A simulation that
let a routing rule read it would credit the rule with knowledge that no gateway has.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from loadgen.workload.conversations import Conversation, Turn

CLIENTS = ("mixed", "exact", "none")
ROUND = 4096  # what clients set that want no reply cut off; doubled as long as some reply is longer
_LEAST = 64


def set_limits(conversations: Sequence[Conversation], clients: str, seed: int) -> None:
    """Set every turn's `limit`, by one of `CLIENTS`. One conversation, with its forks, is one client.

    mixed: a third of the clients sends none, a third a round number above all replies, and a third the next power of
    two above the longest reply of its own conversation, as a client does that knows its kind of replies.
    """
    rng = random.Random(f"max_tokens {seed}")  # of its own: the load is the same whatever its clients send
    top = _above(max((turn.max_tokens for turn in _turns(conversations)), default=1), ROUND)
    for conversation in conversations:
        kind = rng.randrange(3)
        turns = list(_turns([conversation]))
        near = _above(max((turn.max_tokens for turn in turns), default=1), _LEAST)
        for turn in turns:
            if clients == "exact":
                turn.limit = turn.max_tokens
            else:
                turn.limit = (None, top, near)[kind] if clients == "mixed" else None


def _turns(conversations: Iterable[Conversation]) -> Iterator[Turn]:
    for conversation in conversations:
        for turn in conversation.turns:
            yield turn
            yield from _turns(turn.forks)


def _above(length: int, least: int) -> int:
    """The least that is enough among `least` and its doubles."""
    while least < length:
        least *= 2
    return least

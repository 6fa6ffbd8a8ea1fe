"""The `max_tokens` that simulated clients send, which is all that a gateway knows of a reply's length beforehand.

A load generator knows the length of each reply and sends that as `max_tokens`, which no real client can. A routing
policy that read it in a simulation would profit from knowledge that no gateway has.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from loadgen.workload.conversations import Conversation, Turn

CLIENTS = ("mixed", "exact", "none")
ROUND = 4096  # `max_tokens` of clients that want no reply cut off; doubled until no reply is longer
_LEAST = 64  # least `max_tokens` of clients that know roughly how long their replies are


def set_limits(conversations: Sequence[Conversation], clients: str, seed: int) -> None:
    """Set the `limit` of every turn: the `max_tokens` that its client sends.

    `clients`: "exact" (the length of each reply), "none" (not sent) or "mixed". A conversation with its forks is one
    client. With "mixed", a third of the clients sends no limit. Another third sends a large round number that no reply
    exceeds. The last third knows roughly how long its replies are: it sends the least power of two, from 64 on, that no
    reply of its own conversation exceeds. `seed`: decides which client is of which kind.
    """
    rng = random.Random(f"max_tokens {seed}")  # of its own, so that the load is the same for all `clients`
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
    """Return `least`, doubled until it is at least `length`."""
    while least < length:
        least *= 2
    return least

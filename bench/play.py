"""Plays ready-made turns on a simulated fleet: at their starts, as a Poisson process, or as fast as they are
answered."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from loadgen.simulate import Fleet, Record, Result, Turn

Conversation = Sequence[Turn]  # sent one after the other, each after the reply before it


def play(fleet: Fleet, conversations: Sequence[Conversation], starts: Sequence[float]) -> Result:
    """Each conversation begins at its start; a turn follows the reply before it by its think time."""

    def begin(number: int, turn: int) -> None:
        turns = conversations[number]
        following = turn + 1

        def ended() -> None:
            if following < len(turns):
                fleet.at(fleet.now + turns[following].think, begin, number, following)

        fleet.send(turns[turn], f"session-{number}", ended)

    for number, start in enumerate(starts):
        fleet.at(start, begin, number, 0)
    return fleet.run()


class _Pool:
    """Open conversations, `users` at a time; one that ends makes room for the next of the work."""

    def __init__(self, conversations: Sequence[Conversation], users: int) -> None:
        self._new = deque(enumerate(conversations))
        self.ready: list[tuple[int, Conversation, int]] = []  # (number, turns, next turn)
        for _ in range(users):
            self.open()

    @property
    def left(self) -> int:
        """Conversations not opened yet."""
        return len(self._new)

    def open(self) -> None:
        if self._new:
            self.ready.append((*self._new.popleft(), 0))

    def send(self, fleet: Fleet, index: int, then: Callable[[], None] = lambda: None) -> None:
        """Send the turn at `index` of `ready`; `then` is called when its reply is complete."""
        number, turns, turn = self.ready[index]
        self.ready[index] = self.ready[-1]
        self.ready.pop()

        def ended() -> None:
            if turn + 1 < len(turns):
                self.ready.append((number, turns, turn + 1))
            else:
                self.open()
            then()

        fleet.send(turns[turn], f"session-{number}", ended)


def pace(fleet: Fleet, conversations: Sequence[Conversation], rate: float, users: int, seed: int) -> Result:
    """Send requests as a Poisson process of `rate` a second, whatever becomes of those before.

    Each is the next turn of one of `users` open conversations, drawn at random among those whose last
    reply is complete; if none is, a further conversation is opened.
    """
    pool, rng = _Pool(conversations, users), random.Random(seed)
    left = sum(map(len, conversations))

    def arrive() -> None:
        nonlocal left
        if not pool.ready:
            pool.open()
        if pool.ready:
            left -= 1
            pool.send(fleet, int(rng.random() * len(pool.ready)))
        if left:
            fleet.at(fleet.now + rng.expovariate(rate), arrive)

    fleet.at(0.0, arrive)
    return fleet.run()


def backlog(fleet: Fleet, conversations: Sequence[Conversation], users: int) -> float:
    """Requests a second at full stretch: `users` conversations always open, none of them ever thinking.

    Counted from the first quarter of the work on, until there is no further conversation to open.
    """
    pool = _Pool(conversations, users)
    records, total = fleet.result.records, sum(map(len, conversations))
    begun: tuple[int, float] | None = None
    rate = 0.0

    def sent() -> None:
        nonlocal begun, rate
        while pool.ready and pool.left:
            pool.send(fleet, len(pool.ready) - 1, sent)
        if begun is None and len(records) > total / 4:
            begun = len(records), fleet.now
        elif begun and fleet.now > begun[1]:
            rate = (len(records) - begun[0]) / (fleet.now - begun[1])

    fleet.at(0.0, sent)
    fleet.run()
    return rate


def ideal_hit_rate(records: Sequence[Record], block_size: int = 16) -> float:
    """Share of prompt tokens one infinite cache would have had, seeing these requests as sent.

    A request's blocks count from the moment it is sent, its reply's from the moment it ends.
    """
    sent = [(r.sent, 0, n) for n, r in enumerate(records)] + [(r.end, 1, n) for n, r in enumerate(records)]
    seen: set[int] = set()
    hit = total = 0
    for _, ended, number in sorted(sent):
        turn = records[number].turn
        if ended:
            seen.update(turn.all_hashes)
            continue
        held = next((n for n, h in enumerate(turn.hashes) if h not in seen), len(turn.hashes))
        hit += min(held, (turn.tokens - 1) // block_size) * block_size
        total += turn.tokens
        seen.update(turn.hashes)
    return hit / total if total else 0.0

"""How many tokens an answer will have: learned from those that ended, one running mean for each kind of request.

A request is of three kinds at once, from the widest to the narrowest: its model's, those whose prompts begin with the
same block (an agent's instructions, a tenant's system prompt), and its session's, where clients tell sessions. Each
kind's mean starts from that of the wider one, which counts as `_PRIOR` answers (Bühlmann's credibility: n / (n + k)),
so one answer hardly moves it and thirty are believed. `max_tokens` bounds what comes out.

A cost needs two figures of an answer that has not ended: its mean, and what is left of one that is met at a random
moment, E[X^2] / 2 E[X] (renewal theory's mean residual life). The latter is more than half the mean by how much lengths
differ: short and long answers are met in proportion to how long they take. So the spread of what is not known is in it.
"""

from __future__ import annotations

from typing import NamedTuple

from .vocabulary import Demand

FIRST = 200.0  # tokens, until an answer has ended
_PRIOR = 4.0  # answers that a wider kind's mean counts as
_WINDOWS = (256.0, 64.0, 16.0)  # answers over which each kind's means run
_KINDS = 4096  # that are kept of each, those least recently heard of are forgotten first


class Expected(NamedTuple):
    """Tokens of an answer, and of what is left of one while it comes."""

    mean: float
    residual: int


class _Kind:
    __slots__ = ("count", "mean", "square")

    def __init__(self) -> None:
        self.count = self.mean = self.square = 0.0

    def learn(self, tokens: float, window: float) -> None:
        self.count = min(self.count + 1.0, window)
        self.mean += (tokens - self.mean) / self.count
        self.square += (tokens * tokens - self.square) / self.count


class Outputs:
    """`expected` reads, `learn` is told of each complete answer."""

    def __init__(self) -> None:
        self._kinds: tuple[dict[object, _Kind], ...] = ({}, {}, {})

    def expected(self, demand: Demand) -> Expected:
        mean, square = FIRST, 2 * FIRST * FIRST
        for kinds, key in zip(self._kinds, _keys(demand)):
            kind = kinds.get(key)
            if kind is not None:
                trust = kind.count / (kind.count + _PRIOR)
                mean += trust * (kind.mean - mean)
                square += trust * (kind.square - square)
        most = demand.max_tokens
        if most is not None:
            most = max(1, most)  # of a prompt alone (`echo` with `max_tokens: 0`) an engine still makes one token
            mean = min(mean, float(most))
        residual = max(1, round(square / (2.0 * mean)))
        return Expected(mean, residual if most is None or residual < most else most)

    def learn(self, demand: Demand, tokens: int) -> None:
        for kinds, key, window in zip(self._kinds, _keys(demand), _WINDOWS):
            if key is None:
                continue
            kind = kinds.pop(key, None) or _Kind()
            kind.learn(max(1, tokens), window)
            kinds[key] = kind  # at the end: the least recently heard of is forgotten first
            if len(kinds) > _KINDS:
                del kinds[next(iter(kinds))]


def _keys(demand: Demand) -> tuple[object, object, object]:
    space, root, session = demand.space, demand.root, demand.session
    return space, (space, root) if root else None, (space, session) if session is not None else None

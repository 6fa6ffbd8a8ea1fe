"""How many tokens an answer will have: learned from those that ended, one running mean for each kind of request.

A request is of three kinds at once, from the widest to the narrowest: its model's, those whose prompts begin with the
same block (an agent's instructions, a tenant's system prompt), and its session's, where clients tell sessions. Each
kind's mean starts from that of the wider one, which counts as `PRIOR` answers (Bühlmann's credibility: n / (n + k)),
so one answer hardly moves it and thirty are believed. `max_tokens` bounds what comes out. A request that writes no
tokens (`Demand.writes`) is expected to have none, and teaches nothing.

When the first byte of an answer is expected (`due`) follows from what its placement predicts by the load that it met,
and for an answer that comes in one piece from all of its decode steps besides. From then on its replica is late
(`costs.late_seconds`).

A cost needs two figures of an answer that has not ended: its mean, and what is left of one that is met at a random
moment, E[X^2] / 2 E[X] (renewal theory's mean residual life). The latter is more than half the mean by how much lengths
differ: short and long answers are met in proportion to how long they take. So the spread of what is not known is in it.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import NamedTuple, TypeVar

from .costs import Lower
from .ledger import FAR, UNTIMED
from .vocabulary import Candidate, Demand, Pull

FIRST = 200.0  # tokens, until an answer has ended
LEAST_OUTPUT = 8  # tokens; of a shorter answer nobody knows the time from one to the next
PRIOR = 4.0  # answers that a wider kind's mean counts as
_WINDOWS = (256.0, 64.0, 16.0)  # answers over which each kind's means run
_KINDS = 4096  # that are kept of each
_CHANCES = 8
# Seconds of a decode step until so many streams were seen: answers in one piece tell nothing of it, and it may be
# twenty times the prior's
_SLOWEST, _LEARNED = 0.1, 20


class Expected(NamedTuple):
    """Tokens of an answer, and of what is left of one while it comes."""

    mean: float
    residual: int


class Basis(NamedTuple):
    """What an expected length was learned from."""

    # the narrowest that an answer was of: "session", "prefix" or "model"; "prior": there was none; "none": no tokens
    kind: str
    answers: int  # of that kind, which its running mean is of
    mean: float  # tokens, before `max_tokens` bounds them
    spread: float  # their standard deviation: by how much an answer's length differs from it
    without: float  # the mean without that kind's answers, which counts as `PRIOR` of them


class _Kind:
    __slots__ = ("count", "mean", "square", "heard")

    def __init__(self) -> None:
        self.count = self.mean = self.square = 0.0
        self.heard = False  # since it was last looked at whether to forget it

    def learn(self, tokens: float, window: float) -> None:
        count = self.count
        if count < window:
            count = self.count = count + 1.0
        self.mean += (tokens - self.mean) / count
        self.square += (tokens * tokens - self.square) / count
        self.heard = True


class Outputs:
    """`expected` reads, `learn` is told of each complete answer."""

    def __init__(self) -> None:
        self._spaces: dict[int, _Kind] = {}
        self._roots: dict[int, _Kind] = {}  # by the first block's hash, which covers the model
        self._sessions: dict[tuple[int, str], _Kind] = {}  # by space

    def expected(self, demand: Demand) -> Expected:
        if not demand.writes:
            return Expected(0.0, 0)
        mean, square = FIRST, 2 * FIRST * FIRST
        session = demand.session
        for kind in (
            self._spaces.get(demand.space),
            self._roots.get(demand.root),
            self._sessions.get((demand.space, session)) if session is not None else None,
        ):
            if kind is not None:
                trust = kind.count / (kind.count + PRIOR)
                mean += trust * (kind.mean - mean)
                square += trust * (kind.square - square)
        most = demand.max_tokens
        if most is not None:
            if most < 1:  # of a prompt alone (`echo` with `max_tokens: 0`) an engine still makes one token
                most = 1
            if mean > most:
                mean = float(most)
        residual = round(square / (2.0 * mean)) or 1
        return Expected(mean, residual if most is None or residual < most else most)

    def basis(self, demand: Demand) -> Basis:
        """What `expected` is based on."""
        if not demand.writes:
            return Basis("none", 0, 0.0, 0.0, 0.0)
        mean, residual = self.expected(replace(demand, max_tokens=None))
        spread = sqrt(max(0.0, 2.0 * mean * residual - mean * mean))
        session = self._sessions.get((demand.space, demand.session)) if demand.session is not None else None
        kinds = {"session": session, "prefix": self._roots.get(demand.root), "model": self._spaces.get(demand.space)}
        for name, kind in kinds.items():
            if kind is not None:
                trust = kind.count / (kind.count + PRIOR)
                return Basis(name, round(kind.count), mean, spread, (mean - trust * kind.mean) / (1.0 - trust))
        return Basis("prior", 0, mean, spread, mean)

    def learn(self, demand: Demand, tokens: int) -> None:
        if not demand.writes:
            return
        tokens = tokens or 1
        _of(self._spaces, demand.space).learn(tokens, _WINDOWS[0])
        if demand.root:
            _of(self._roots, demand.root).learn(tokens, _WINDOWS[1])
        if demand.session is not None:
            _of(self._sessions, (demand.space, demand.session)).learn(tokens, _WINDOWS[2])


Key = TypeVar("Key")


def _of(kinds: dict[Key, _Kind], key: Key) -> _Kind:
    """The kind of this key, a new one if there is none yet. The oldest that has not been heard of of late is forgotten
    then, or the one after _CHANCES that have been: a busy kind stays, and none is moved at each answer."""
    kind = kinds.get(key)
    if kind is None:
        if len(kinds) >= _KINDS:
            for _ in range(_CHANCES):
                oldest = next(iter(kinds))
                if not kinds[oldest].heard:
                    break
                kinds[oldest] = kept = kinds.pop(oldest)
                kept.heard = False
            del kinds[next(iter(kinds))]
        kind = kinds[key] = _Kind()
    return kind


def due(
    candidate: Candidate,
    demand: Demand,
    uncached: int,
    lower: Lower = (),
    pull: Pull | None = None,
    ttft: float | None = None,
) -> float:
    """Return the time by the clock of `demand.now`, at which it is placed there; FAR where that is not known. `ttft`:
    the seconds to its first token, where the rule that chose the candidate has predicted them."""
    now = demand.now
    if now == UNTIMED:
        return FAR
    if ttft is None:
        ttft = candidate.costs.ttft_seconds(candidate.load, uncached, demand.tokens - uncached, now)
        if lower:
            ttft += candidate.costs.group.fetch.seconds(lower) + (pull.seconds if pull is not None else 0.0)
    return now + ttft if demand.streams else now + ttft + answer_seconds(candidate, demand)


def answer_seconds(candidate: Candidate, demand: Demand) -> float:
    """Return how long its answer may well take, with the streams there now.

    Twice what is left of one in the middle, more than the mean, is exceeded by one in 20 of exponentially distributed
    lengths, and by one in 30 of lognormal ones (sigma 1).
    """
    output, load, costs = demand.output + 2.0 * demand.residual, candidate.load, candidate.costs
    if (most := demand.max_tokens) is not None and most < output:
        output = most
    step = costs.stream_step(load.decoding + 1, load.context_tokens + demand.tokens + output)
    if step < _SLOWEST and costs.group.step.count < _LEARNED:
        step = _SLOWEST
    return output * step

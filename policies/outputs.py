"""Expected answer lengths in tokens, learned from complete answers: one running mean for each kind of request.

A request is of three kinds at once, from the widest to the narrowest: requests to its model; requests with the same
first block (an agent's instructions, a tenant's system prompt); and requests of its session, where clients send
sessions. Each kind's mean starts from the wider kind's, which counts as `PRIOR` answers (Bühlmann's credibility: n / (n
+ k)): one answer hardly moves it, thirty are believed. `max_tokens` bounds the expectation. A request that writes no
tokens (`Demand.writes`) has no length, and teaches nothing.

The time at which the first byte of an answer is expected (`due`) follows from its placement's predicted TTFT; for an
answer in one piece, all its decode steps are added. After that time its replica counts as late (`Load.due`).

A cost needs two figures of an answer that has not ended: its mean length, and the *residual*, what remains of an answer
observed at a random moment, E[X^2] / 2 E[X] (renewal theory's mean residual life). The more lengths vary, the more the
residual exceeds half the mean, since long answers are observed in proportion to how long they take. So it includes the
spread of unknown lengths.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import NamedTuple, TypeVar

from .costs import Lower
from .ledger import FAR, UNTIMED
from .vocabulary import Candidate, Demand, Pull

FIRST = 200.0  # tokens expected before any answer has ended
LEAST_OUTPUT = 8  # tokens; shorter answers are too short to measure the time per token
PRIOR = 4.0  # answers that a wider kind's mean counts as
_WINDOWS = (256.0, 64.0, 16.0)  # answers over which the means of models, prefixes and sessions run
_KINDS = 4096  # most models, prefixes and sessions that are kept, of each
_CHANCES = 8  # most kinds passed over in search of one to remove
# Least assumed seconds of a decode step until _LEARNED streams were seen: answers in one piece do not show how long a
# step takes, and it may be twenty times the prior's
_SLOWEST, _LEARNED = 0.1, 20


class Expected(NamedTuple):
    """The expected tokens of an answer (`mean`), and those still to come at a random moment of it (`residual`)."""

    mean: float
    residual: int


class Basis(NamedTuple):
    """The evidence behind an expected length."""

    # the narrowest kind with answers: "session", "prefix" or "model"; "prior": there were no answers; "none": the
    # request writes no tokens
    kind: str
    answers: int  # answers of that kind, at most its window
    mean: float  # expected tokens, before `max_tokens` bounds them
    spread: float  # standard deviation of the lengths, in tokens
    without: float  # the mean of the wider kind, from which that kind's mean starts


class _Kind:
    __slots__ = ("count", "mean", "square", "heard")

    def __init__(self) -> None:
        self.count = self.mean = self.square = 0.0
        self.heard = False  # whether it has learned since it was last considered for removal

    def learn(self, tokens: float, window: float) -> None:
        count = self.count
        if count < window:
            count = self.count = count + 1.0
        self.mean += (tokens - self.mean) / count
        self.square += (tokens * tokens - self.square) / count
        self.heard = True


class Outputs:
    """Expected answer lengths: `expected` reads them, `learn` takes each complete answer."""

    def __init__(self) -> None:
        self._spaces: dict[int, _Kind] = {}
        self._roots: dict[int, _Kind] = {}  # by the first block's hash, which covers the model
        self._sessions: dict[tuple[int, str], _Kind] = {}  # by space

    def expected(self, demand: Demand) -> Expected:
        """Return the expected length of the answer, bounded by `max_tokens`."""
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
            if most < 1:  # an engine still makes one token for `echo` with `max_tokens: 0`
                most = 1
            if mean > most:
                mean = float(most)
        residual = round(square / (2.0 * mean)) or 1
        return Expected(mean, residual if most is None or residual < most else most)

    def basis(self, demand: Demand) -> Basis:
        """Return the evidence that `expected` is based on."""
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
        """Learn from a complete answer of `tokens`."""
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
    """Return the kind of this key, adding it if needed.

    If there are too many, the oldest kind that has not learned lately is removed, but at most _CHANCES others are
    passed over: a busy kind stays, and none has to be moved at each answer.
    """
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
    """Return when the first byte of an answer is expected, by the clock of `demand.now`; FAR if there is no clock.

    `uncached`: prompt tokens to compute there; `lower`, `pull`: what is fetched from slower tiers and a peer; `ttft`:
    predicted seconds to the first token, if the policy has computed them.
    """
    now = demand.now
    if now == UNTIMED:
        return FAR
    if ttft is None:
        ttft = candidate.costs.ttft_seconds(candidate.load, uncached, demand.tokens - uncached, now)
        if lower:
            ttft += candidate.costs.group.fetch.seconds(lower) + (pull.seconds if pull is not None else 0.0)
    return now + ttft if demand.streams else now + ttft + answer_seconds(candidate, demand)


def answer_seconds(candidate: Candidate, demand: Demand) -> float:
    """Return how many seconds the answer may well take, with the present streams.

    Its length is taken as the mean plus twice the residual: one in 20 of exponentially distributed lengths is longer,
    and one in 30 of lognormal ones (sigma 1).
    """
    output, load, costs = demand.output + 2.0 * demand.residual, candidate.load, candidate.costs
    if (most := demand.max_tokens) is not None and most < output:
        output = most
    step = costs.stream_step(load.decoding + 1, load.context_tokens + demand.tokens + output)
    if step < _SLOWEST and costs.group.step.count < _LEARNED:
        step = _SLOWEST
    return output * step

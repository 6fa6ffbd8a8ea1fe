"""Expected answer lengths in tokens, learned from complete answers: one running mean for each kind of request.

A request is of three kinds at once, from the widest to the narrowest: requests to its model; requests with the same
first block (an agent's instructions, a tenant's system prompt); and requests of its session, where clients send
sessions. Each kind's mean starts from the wider kind's, which counts as `PRIOR` answers (Bühlmann's credibility: n / (n
+ k)): one answer hardly moves it, thirty are believed. `max_tokens` bounds the expectation. A request that writes no
tokens (`Demand.writes`) has no length, and teaches nothing.

The time at which the first byte of an answer is expected (`due`) follows from the request's predicted TTFT. For an
answer in one piece, all its decode steps are added. After that time the replica counts as late (`Load.due`).

A policy's cost needs two figures of an answer that has not ended: its mean length, and the *residual*. The residual is
what remains of an answer observed at a random moment, E[X^2] / 2 E[X] (renewal theory's mean residual life). The more
lengths vary, the more the residual exceeds half the mean, since long answers are observed in proportion to how long
they take. In this way the residual includes the spread of unknown lengths.
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
PRIOR = 4.0  # how many answers the wider kind's mean counts as
_WINDOWS = (256.0, 64.0, 16.0)  # how many latest answers the means of models, prefixes and sessions cover
_KINDS = 4096  # the most models, the most prefixes and the most sessions that are kept
_CHANCES = 8  # the most kinds that are passed over in search of one to remove
# A decode step is assumed to take at least _SLOWEST seconds until _LEARNED streams were seen. Answers in one piece do
# not show how long a step takes, and it may be twenty times as long as the prior says.
_SLOWEST, _LEARNED = 0.1, 20


class Expected(NamedTuple):
    """The expected length of an answer, in tokens.

    `mean`: the expected total; `residual`: how many tokens are expected to be still to come at a random moment of it.
    """

    mean: float
    residual: int


class Basis(NamedTuple):
    """The evidence behind the expected length of an answer."""

    # The narrowest kind of request that has had answers: "session", "prefix" or "model"; "prior": no kind has had any;
    # "none": the request writes no tokens.
    kind: str
    answers: int  # how many answers of that kind there were, at most as many as its mean covers
    mean: float  # expected tokens, before `max_tokens` bounds them
    spread: float  # standard deviation of the lengths, in tokens
    without: float  # expected tokens without this kind's own answers, from the wider kinds alone


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
    """The expected lengths of answers: `expected` returns them, and `learn` is called with each complete answer."""

    def __init__(self) -> None:
        self._spaces: dict[int, _Kind] = {}  # by space (the number that stands for a served model's tokenizer)
        self._roots: dict[int, _Kind] = {}  # by the hash of the prompt's first block, which covers the model
        self._sessions: dict[tuple[int, str], _Kind] = {}  # by space and session

    def expected(self, demand: Demand) -> Expected:
        """Return the expected length of the answer to a request in tokens, bounded by its `max_tokens`."""
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
        """Return the evidence for the length that `expected` returns for a request."""
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
        """Learn from the complete answer to a request, which had this many `tokens`."""
        if not demand.writes:
            return
        tokens = tokens or 1
        (self._spaces.get(demand.space) or _of(self._spaces, demand.space)).learn(tokens, _WINDOWS[0])
        if demand.root:
            (self._roots.get(demand.root) or _of(self._roots, demand.root)).learn(tokens, _WINDOWS[1])
        if demand.session is not None:
            _of(self._sessions, (demand.space, demand.session)).learn(tokens, _WINDOWS[2])


Key = TypeVar("Key")


def _of(kinds: dict[Key, _Kind], key: Key) -> _Kind:
    """Return the running mean of answer lengths under this key; add an empty one if there is none.

    If there are too many, one is removed: the oldest that has learned nothing since the last search passed over it. A
    search passes over at most 8 others (_CHANCES). In this way busy ones stay, and none has to be moved at each answer.
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

    `uncached`: prompt tokens that the candidate computes; `lower`, `pull`: what it fetches from slower memory tiers and
    from another replica; `ttft`: predicted seconds to the first token, if the policy has computed them.
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
    """Return how many seconds a long answer to the request may take on the candidate, next to the present streams.

    Its length is assumed to be the mean plus twice the residual, or `max_tokens` if that is less. One in 20 of
    exponentially distributed lengths is longer, and one in 30 of lognormal ones (sigma 1).
    """
    output, load, costs = demand.output + 2.0 * demand.residual, candidate.load, candidate.costs
    if (most := demand.max_tokens) is not None and most < output:
        output = most
    step = costs.stream_step(load.decoding + 1, load.context_tokens + demand.tokens + output)
    if step < _SLOWEST and costs.group.step.count < _LEARNED:
        step = _SLOWEST
    return output * step

"""The plan of a measurement, made from the engine's limits and its speed in a few probes; performs no I/O.

Every round has the same questions in another order, so that a machine that is busier or warmer for a while does not
affect only one kind. Sizes grow by factors of two or more up to the engine's context and a quarter of its cache, as
long as a question takes less than a share of the time: many rounds are worth more than long prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from . import samples
from .fit import Fit

SMALLEST = 64
LONGEST = 0.02  # share of the total time, for one question
FEW, MOST = 8, 64  # requests at once: on any engine, and on one that is fast enough
STEPS = 32  # decode steps to observe with all requests decoding


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's limits; `told` has the source of each: reported by the engine, seen or assumed."""

    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    told: dict[str, str]

    @property
    def longest(self) -> int:
        """The longest prompt, in tokens, that leaves room for its output and takes at most a quarter of the cache."""
        return min(self.max_model_len * 7 // 8, self.num_blocks * self.block_size // 4)


@dataclass(frozen=True, slots=True)
class Question:
    """One measurement to make.

    `tokens`: length of a prompt; `extra`: new tokens after it; `count`: requests at once; `output`: tokens of each.
    """

    region: str
    tokens: int
    extra: int = 0
    count: int = 1
    output: int = 1

    @property
    def requests(self) -> int:
        """The number of requests, including those that fill the cache first."""
        return self.count if self.region == samples.NEW else 2 * self.count

    @property
    def prompt_tokens(self) -> int:
        return self.tokens * self.requests + self.extra

    @property
    def output_tokens(self) -> int:
        return self.count * (self.output - 1) + self.requests  # one for each prompt that only fills the cache

    def expected(self, fit: Fit, limits: Limits) -> float:
        """Return roughly how many seconds the question will take."""
        budget, whole = limits.max_num_batched_tokens, self.tokens + self.extra
        took = self.count * fit.seconds(samples.prompt(samples.NEW, 0, self.tokens, 0, budget).parts)
        if self.region in (samples.DECODE, samples.BURST):
            took += fit.seconds(samples.burst(0, self.count, self.tokens, self.tokens - 1, budget).parts)
        elif self.region != samples.NEW:
            took += fit.seconds(samples.prompt(self.region, 0, whole, self.tokens - 1, budget).parts)
        return took + self.output * fit.seconds(samples.decode(0, self.count, self.count * self.tokens).parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """The questions of each round, the number of rounds, and the expected seconds of one."""

    questions: tuple[Question, ...]
    rounds: int
    round_seconds: float

    def sent(self, what: str) -> int:
        """Return the total of `requests`, `prompt_tokens` or `output_tokens`."""
        return self.rounds * sum(getattr(question, what) for question in self.questions)


def make(limits: Limits, fit: Fit, seconds: float) -> Plan:
    """Return a plan of two to ten rounds that takes about `seconds`."""
    affordable = [question for question in _questions(limits)
                  if question.expected(fit, limits) <= LONGEST * seconds
                  or (question.tokens <= 4 * SMALLEST and question.count <= FEW)]  # fmt: skip
    each = sum(question.expected(fit, limits) for question in affordable)
    return Plan(tuple(affordable), max(2, min(10, int(seconds / each))), each)


def sizes(most: int, factor: int = 2) -> list[int]:
    """Return sizes that grow by `factor`, with `most` as the last one."""
    grown = list(takewhile(lambda size: size * 1.4 < most, (SMALLEST * factor**n for n in range(40))))
    return [*grown, most]


def _questions(limits: Limits) -> Iterator[Question]:
    longest, cache = limits.longest, limits.num_blocks * limits.block_size // 2
    for size in sizes(longest):
        yield Question(samples.NEW, size)
        yield Question(samples.TEXT, size)
    for size in sizes(longest, 4):
        for extra in (16, max(32, size // 4)):
            if size + extra < limits.max_model_len:
                yield Question(samples.CACHED, size, extra)
    for count in (2**n for n in range(MOST.bit_length()) if 2**n <= limits.max_num_seqs):
        output = STEPS + 2 * count  # they start one after the other
        for size in sizes(longest // 2, 8):
            if count * (size + output) <= cache and size + output < limits.max_model_len:
                yield Question(samples.DECODE, size, count=count, output=output)
        if count >= 4:
            yield Question(samples.BURST, SMALLEST, count=count)

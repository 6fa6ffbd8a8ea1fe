"""What will be sent, said before it is: pure, from what the engine tells and from how fast a few probes were.

Every round asks the same kinds of questions in an order of its own, so that a machine that gets busier or warmer for
a while does not speak about one of them only. Sizes grow by a factor of two or four up to what the engine's context and
a quarter of its cache hold, and as long as a question stays below a share of the time: many rounds say more than long
prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from . import samples
from .fit import Fit

SMALLEST = 64
LONGEST = 0.02  # of the time there is, for one question
FEW, MOST = 8, 64  # requests at once: however slow the engine is, and if there is time
STEPS = 32  # decode steps looked at, with all requests decoding


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's. `told` says where each comes from: "told" by it, "seen" or "assumed"."""

    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    told: dict[str, str]

    @property
    def longest(self) -> int:
        """Tokens of one prompt that leave room for its output, and for others: a quarter of the cache."""
        return min(self.max_model_len * 7 // 8, self.num_blocks * self.block_size // 4)


@dataclass(frozen=True, slots=True)
class Question:
    """One thing to ask. `tokens` a prompt, `extra` new ones on top of it, `count` requests at once, `output` tokens
    each."""

    region: str
    tokens: int
    extra: int = 0
    count: int = 1
    output: int = 1

    @property
    def requests(self) -> int:
        """Also those that put the prompts into the cache."""
        return self.count if self.region == samples.NEW else 2 * self.count

    @property
    def prompt_tokens(self) -> int:
        return self.tokens * self.requests + self.extra

    @property
    def output_tokens(self) -> int:
        return self.count * (self.output - 1) + self.requests  # one for each prompt that only fills the cache

    def expected(self, fit: Fit, limits: Limits) -> float:
        """Seconds it will take, about."""
        budget, whole = limits.max_num_batched_tokens, self.tokens + self.extra
        took = self.count * fit.seconds(samples.prompt(samples.NEW, 0, self.tokens, 0, budget).parts)
        if self.region in (samples.DECODE, samples.BURST):
            took += fit.seconds(samples.burst(0, self.count, self.tokens, self.tokens - 1, budget).parts)
        elif self.region != samples.NEW:
            took += fit.seconds(samples.prompt(self.region, 0, whole, self.tokens - 1, budget).parts)
        return took + self.output * fit.seconds(samples.decode(0, self.count, self.count * self.tokens).parts)


@dataclass(frozen=True, slots=True)
class Plan:
    questions: tuple[Question, ...]
    rounds: int
    round_seconds: float

    def sent(self, what: str) -> int:
        """How many `requests`, `prompt_tokens` or `output_tokens`."""
        return self.rounds * sum(getattr(question, what) for question in self.questions)


def make(limits: Limits, fit: Fit, seconds: float) -> Plan:
    """At least two rounds, at most ten, in about `seconds`."""
    affordable = [question for question in _questions(limits)
                  if question.expected(fit, limits) <= LONGEST * seconds
                  or (question.tokens <= 4 * SMALLEST and question.count <= FEW)]  # fmt: skip
    each = sum(question.expected(fit, limits) for question in affordable)
    return Plan(tuple(affordable), max(2, min(10, int(seconds / each))), each)


def sizes(most: int, factor: int = 2) -> list[int]:
    """Ends at `most`, which is rarely a power of two."""
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

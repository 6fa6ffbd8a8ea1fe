"""Generated loads: which prefixes are shared, how often, and how conversations proceed.

Each load imitates one class of users. Its messages are spans (`conversations.Span`: tokens without text), so prompts
share exactly the tokens that they should: spans of one name have equal tokens. A load is called as `chat(rng, requests,
turns=3)`. Its keyword arguments are the flags of the same names, and its attribute `takes` has their defaults. Lengths
are tokens. `range_ratio` r draws each length uniformly from (1 - r) to (1 + r) times the given one. `zipf` s makes the
k-th most popular item 1/k^s as popular as the first (0: all equally). The result of a tool is sent as a user's message,
which every chat template accepts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import accumulate, count
from types import SimpleNamespace

from loadgen.workload.conversations import Conversation, Message, Span, Turn, span


def shaped(**takes: object) -> Callable[[Callable], Callable]:
    """Return a decorator that turns a function of (rng, requests, shape) into one of (rng, requests, **flags).

    `takes`: the flags with their defaults; the new function has them as an attribute and raises TypeError for others.
    The attributes of `shape` are the values of all flags.
    """

    def decorate(make: Callable) -> Callable:
        def load(rng: random.Random, requests: int | None, **flags: object):
            if unknown := flags.keys() - takes.keys():
                raise TypeError(f"{make.__name__} does not take {', '.join(sorted(unknown))}")
            return make(rng, requests, SimpleNamespace(**takes | flags))

        load.__doc__, load.takes = make.__doc__, takes
        return load

    return decorate


def say(role: str, *spans: Span) -> Message:
    return {"role": role, "content": spans}


class _Maker:
    """The random draws that all loads share: spans with new names, lengths, popular choices, and conversations."""

    def __init__(self, rng: random.Random, shape: SimpleNamespace):
        self.rng, self.shape, self.names = rng, shape, count()

    def length(self, mean: int) -> int:
        ratio = self.shape.range_ratio
        return self.rng.randint(max(1, math.ceil(mean * (1 - ratio))), max(1, math.floor(mean * (1 + ratio))))

    def span(self, mean: int) -> Span:
        return span(next(self.names), self.length(mean) if mean else 0)

    def prefixes(self) -> Callable[[], Span]:
        """Return a function that draws one of `num_prefixes` spans, such as system prompts, by popularity (`zipf`)."""
        spans = [self.span(self.shape.prefix_len) for _ in range(self.shape.num_prefixes)]
        weights = list(accumulate(1 / rank**self.shape.zipf for rank in range(1, len(spans) + 1)))
        return lambda: self.rng.choices(spans, cum_weights=weights)[0]

    def tailed(self, mean: float) -> float:
        """Draw from a log-normal distribution with this mean and sigma `output_sigma`, cut off at 16 times the mean."""
        sigma = self.shape.output_sigma
        return min(16 * mean, mean * math.exp(self.rng.gauss(-sigma * sigma / 2, sigma))) if mean else 0.0

    def talk(self, opening: list[Message], turns: int, think: float = 0.0) -> list[Turn]:
        """Return `turns` turns, each with a question and its reply; the first also has the messages `opening` in front.

        `think`: mean seconds between a reply and the next turn.
        """
        made = []
        for _ in range(turns):
            reply = self.span(self.shape.output_len)
            question = say("user", self.span(self.shape.suffix_len))
            pause = self.rng.expovariate(1 / think) if think else 0.0
            made.append(Turn([question], reply.length, say("assistant", reply), pause))
        made[0].messages[:0] = opening
        return made

    def turns(self, requests: int) -> Iterator[int]:
        """Yield the number of turns of one conversation after the other, until they add up to `requests`.

        Each is drawn from half to one and a half times the mean, the flag `turns`.
        """
        mean = self.shape.turns
        while requests > 0:
            length = min(requests, self.rng.randint(max(1, mean // 2), mean + mean // 2))
            requests -= length
            yield length


@shaped(num_prefixes=10, prefix_len=256, suffix_len=256, output_len=128, zipf=0.0, range_ratio=0.0)
def prefix_repetition(rng: random.Random, requests: int, shape: SimpleNamespace) -> list[Conversation]:
    """Generate single requests that begin with shared system prompts."""
    make = _Maker(rng, shape)
    prefix = make.prefixes()
    return [Conversation(f"request-{number}", make.talk([say("system", prefix())], 1)) for number in range(requests)]


@shaped(suffix_len=1024, output_len=128, range_ratio=0.0)
def random_tokens(rng: random.Random, requests: int, shape: SimpleNamespace) -> list[Conversation]:
    """Generate requests that share nothing, the worst case for a prefix cache."""
    make = _Maker(rng, shape)
    return [Conversation(f"request-{number}", make.talk([], 1)) for number in range(requests)]


@shaped(
    num_prefixes=10, prefix_len=500, turns=5, suffix_len=100, output_len=200, think_time=5.0, zipf=1.0, range_ratio=0.5
)
def chat(rng: random.Random, requests: int, shape: SimpleNamespace) -> list[Conversation]:
    """Generate conversations of several turns with think times; each begins with one of a few system prompts."""
    make = _Maker(rng, shape)
    prefix = make.prefixes()
    return [
        Conversation(f"chat-{number}", make.talk([say("system", prefix())], length, shape.think_time))
        for number, length in enumerate(make.turns(requests))
    ]


@shaped(
    num_prefixes=500, prefix_len=600, documents_per_prompt=4, suffix_len=50, output_len=150, zipf=1.0, range_ratio=0.3
)
def rag(rng: random.Random, requests: int, shape: SimpleNamespace) -> list[Conversation]:
    """Generate questions, each preceded by passages from a collection.

    Passages are in the order of their retrieval, so two prompts share the instructions (200 tokens), and then the
    passages up to the first that differs.
    """
    make = _Maker(rng, shape)
    instructions, passage = span(next(make.names), 200), make.prefixes()
    conversations = []
    for number in range(requests):
        found: dict[int, Span] = {}
        while len(found) < min(shape.documents_per_prompt, shape.num_prefixes):
            one = passage()
            found.setdefault(one.ids[0], one)
        question = say("user", *found.values(), make.span(shape.suffix_len))
        turn = Turn([say("system", instructions), question], make.length(shape.output_len))
        conversations.append(Conversation(f"question-{number}", [turn]))
    return conversations


@shaped(num_prefixes=4, prefix_len=3000, turns=10, suffix_len=300, output_len=80, think_time=1.0, forks=3, zipf=1.0,
        range_ratio=0.5)  # fmt: skip
def agents(rng: random.Random, requests: int, shape: SimpleNamespace) -> list[Conversation]:
    """Generate agents that call a tool, read its result, and so on; half of them start sub-agents once.

    Lengths: `prefix_len` of the instructions and tools of one kind of agent, `suffix_len` of a task or a tool's result,
    `output_len` of a call. `think_time`: mean seconds that a tool takes. `forks`: the number of sub-agents, which start
    at once and each continue the conversation so far.
    """
    make = _Maker(rng, shape)
    kind = make.prefixes()
    conversations: list[Conversation] = []
    while requests > 0:
        name = f"agent-{len(conversations)}"
        steps = make.talk([say("system", kind())], next(make.turns(requests)), shape.think_time)
        requests -= len(steps)
        if shape.forks and rng.random() < 0.5:
            branches = []
            for branch in range(shape.forks):
                if length := min(requests, max(1, len(steps) // 2)):
                    branches.append(Conversation(f"{name}.{branch}", make.talk([], length, shape.think_time)))
                requests -= length
            rng.choice(steps).forks = tuple(branches)
        conversations.append(Conversation(name, steps))
    return conversations


@shaped(num_prefixes=1, prefix_len=1000, turns=40, suffix_len=250, output_len=200, output_sigma=1.0, think_time=2.0, best_of=4,
        zipf=0.0, range_ratio=0.5)  # fmt: skip
def rollouts(rng: random.Random, requests: int, shape: SimpleNamespace) -> list[Conversation]:
    """Generate long agent trajectories as reinforcement learning samples them: `best_of` per task, 20 to 60 turns.

    Lengths: `prefix_len` of instructions and tools, `suffix_len` of a task or a tool's result. Replies have log-normal
    lengths with mean `output_len` and `output_sigma` as the standard deviation of the logarithm, at most 16 times the
    mean. The pauses for a tool are drawn likewise, with a mean of `think_time` seconds. The trajectories of one task
    follow each other in the list, so that with `--users` they begin together. With `best_of` 1 the load is that of
    coding agents.
    """
    make = _Maker(rng, shape)
    kind = make.prefixes()
    conversations: list[Conversation] = []
    lengths = make.turns(requests)
    while length := next(lengths, 0):
        opening = [say("system", kind()), say("user", make.span(shape.suffix_len))]
        for sample in range(shape.best_of):
            made = []
            for number in range(length):  # each turn but the first has, after a pause, a tool's result
                reply = span(next(make.names), max(1, round(make.tailed(shape.output_len))))
                messages = [say("user", make.span(shape.suffix_len))] if number else opening
                pause = make.tailed(shape.think_time) if number else 0.0
                made.append(Turn(list(messages), reply.length, say("assistant", reply), pause))
            conversations.append(Conversation(f"task-{len(conversations) // shape.best_of}-{sample}", made))
            if sample + 1 < shape.best_of and not (length := next(lengths, 0)):
                break
    return conversations

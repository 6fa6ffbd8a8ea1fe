"""Generated loads: which prefixes are shared, how often, and how conversations proceed.

Each function imitates one class of users, in spans (`conversations`), so that sharing is exact to the token: equal
names are equal tokens. Lengths are tokens. Keyword arguments are the flags of the same names, with this load's
defaults; `range_ratio` r draws each length uniformly from (1 - r) to (1 + r) times it, and `zipf` s makes the k-th most
popular item 1/k^s as popular as the first (0: all equally). The result of a tool is sent as a user's message, which
every chat template accepts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import accumulate, count

from loadgen.workload.conversations import Conversation, Message, Span, Turn, span


def say(role: str, *spans: Span) -> Message:
    return {"role": role, "content": spans}


class _Maker:
    """The draws shared by all loads below: fresh names, varying lengths and popular choices."""

    def __init__(self, rng: random.Random, range_ratio: float, zipf: float = 0.0):
        self.rng, self.ratio, self.zipf = rng, range_ratio, zipf
        self.names = count()

    def length(self, mean: int) -> int:
        return self.rng.randint(max(1, math.ceil(mean * (1 - self.ratio))), max(1, math.floor(mean * (1 + self.ratio))))

    def span(self, mean: int) -> Span:
        return span(next(self.names), self.length(mean) if mean else 0)

    def shelf(self, number: int, mean: int) -> Callable[[], Span]:
        """Return a function that draws one of `number` spans by popularity."""
        spans = [self.span(mean) for _ in range(number)]
        weights = list(accumulate(1 / rank**self.zipf for rank in range(1, number + 1)))
        return lambda: self.rng.choices(spans, cum_weights=weights)[0]

    def think(self, mean: float) -> float:
        return self.rng.expovariate(1 / mean) if mean else 0.0

    def tailed_seconds(self, mean: float, sigma: float) -> float:
        """Draw from a log-normal distribution with this mean, cut at 16 times the mean."""
        return min(16 * mean, mean * math.exp(self.rng.gauss(-sigma * sigma / 2, sigma))) if mean else 0.0

    def tailed(self, mean: int, sigma: float) -> int:
        return max(1, round(self.tailed_seconds(mean, sigma)))

    def talk(self, opening: list[Message], turns: int, question: int, answer: int, think: float) -> list[Turn]:
        """Return turns that each add a message and are answered; the first also begins with `opening`."""
        made = []
        for _ in range(turns):
            reply = self.span(answer)
            made.append(
                Turn([say("user", self.span(question))], reply.length, say("assistant", reply), self.think(think))
            )
        made[0].messages[:0] = opening
        return made

    def turns(self, requests: int, mean: int) -> Iterator[int]:
        """Yield numbers of turns, each from half to one and a half times `mean`, that add up to `requests`."""
        while requests > 0:
            length = min(requests, self.rng.randint(max(1, mean // 2), mean + mean // 2))
            requests -= length
            yield length


def prefix_repetition(
    rng: random.Random,
    requests: int,
    *,
    num_prefixes: int = 10,
    prefix_len: int = 256,
    suffix_len: int = 256,
    output_len: int = 128,
    zipf: float = 0.0,
    range_ratio: float = 0.0,
) -> list[Conversation]:
    """Generate single requests that begin with shared system prompts."""
    make = _Maker(rng, range_ratio, zipf)
    prefix = make.shelf(num_prefixes, prefix_len)
    return [
        Conversation(f"request-{number}", make.talk([say("system", prefix())], 1, suffix_len, output_len, 0.0))
        for number in range(requests)
    ]


def random_tokens(
    rng: random.Random, requests: int, *, suffix_len: int = 1024, output_len: int = 128, range_ratio: float = 0.0
) -> list[Conversation]:
    """Generate requests that share nothing, the worst case for a prefix cache."""
    make = _Maker(rng, range_ratio)
    return [
        Conversation(f"request-{number}", make.talk([], 1, suffix_len, output_len, 0.0)) for number in range(requests)
    ]


def chat(
    rng: random.Random,
    requests: int,
    *,
    num_prefixes: int = 10,
    prefix_len: int = 500,
    turns: int = 5,
    suffix_len: int = 100,
    output_len: int = 200,
    think_time: float = 5.0,
    zipf: float = 1.0,
    range_ratio: float = 0.5,
) -> list[Conversation]:
    """Generate conversations of several turns with think times, behind the system prompts of some applications."""
    make = _Maker(rng, range_ratio, zipf)
    prefix = make.shelf(num_prefixes, prefix_len)
    return [
        Conversation(f"chat-{number}", make.talk([say("system", prefix())], length, suffix_len, output_len, think_time))
        for number, length in enumerate(make.turns(requests, turns))
    ]


def rag(
    rng: random.Random,
    requests: int,
    *,
    num_prefixes: int = 500,
    prefix_len: int = 600,
    documents_per_prompt: int = 4,
    suffix_len: int = 50,
    output_len: int = 150,
    zipf: float = 1.0,
    range_ratio: float = 0.3,
) -> list[Conversation]:
    """Generate questions, each preceded by passages from a collection.

    Passages are in the order of their retrieval, so two prompts share their beginning: the instructions (200 tokens)
    and the best passages as far as these are the same.
    """
    make = _Maker(rng, range_ratio, zipf)
    instructions, passage = span(next(make.names), 200), make.shelf(num_prefixes, prefix_len)
    conversations = []
    for number in range(requests):
        found: dict[int, Span] = {}
        while len(found) < min(documents_per_prompt, num_prefixes):
            one = passage()
            found.setdefault(one.ids[0], one)
        question = say("user", *found.values(), make.span(suffix_len))
        turn = Turn([say("system", instructions), question], make.length(output_len))
        conversations.append(Conversation(f"question-{number}", [turn]))
    return conversations


def agents(
    rng: random.Random,
    requests: int,
    *,
    num_prefixes: int = 4,
    prefix_len: int = 3000,
    turns: int = 10,
    suffix_len: int = 300,
    output_len: int = 80,
    think_time: float = 1.0,
    forks: int = 3,
    zipf: float = 1.0,
    range_ratio: float = 0.5,
) -> list[Conversation]:
    """Generate agents that call a tool, read its result, and so on; every other one forks once.

    `prefix_len`: instructions and tools of one kind of agent; `suffix_len`: a task or a tool's result; `output_len`: a
    call; `think_time`: duration of a tool. A fork starts `forks` sub-agents at once, which continue the conversation so
    far.
    """
    make = _Maker(rng, range_ratio, zipf)
    kind = make.shelf(num_prefixes, prefix_len)
    conversations: list[Conversation] = []
    while requests > 0:
        name = f"agent-{len(conversations)}"
        steps = make.talk(
            [say("system", kind())], next(make.turns(requests, turns)), suffix_len, output_len, think_time
        )
        requests -= len(steps)
        if forks and rng.random() < 0.5:
            branches = []
            for branch in range(forks):
                length = min(requests, max(1, len(steps) // 2))
                if length:
                    branches.append(
                        Conversation(f"{name}.{branch}", make.talk([], length, suffix_len, output_len, think_time))
                    )
                requests -= length
            rng.choice(steps).forks = tuple(branches)
        conversations.append(Conversation(name, steps))
    return conversations


def rollouts(
    rng: random.Random,
    requests: int,
    *,
    num_prefixes: int = 1,
    prefix_len: int = 1000,
    turns: int = 40,
    suffix_len: int = 250,
    output_len: int = 200,
    output_sigma: float = 1.0,
    think_time: float = 2.0,
    best_of: int = 4,
    zipf: float = 0.0,
    range_ratio: float = 0.5,
) -> list[Conversation]:
    """Generate long agent trajectories as reinforcement learning samples them: `best_of` per task, 20 to 60 turns.

    `prefix_len`: instructions and tools; `suffix_len`: a task or a tool's result. Lengths of replies are log-normal
    with mean `output_len` and `output_sigma` as the standard deviation of the logarithm, at most 16 times the mean; so
    are the pauses for a tool, with mean `think_time`. The samples of a task are adjacent, so that with `--users` they
    begin together. With `best_of` 1 these are coding agents.
    """
    make = _Maker(rng, range_ratio, zipf)
    kind = make.shelf(num_prefixes, prefix_len)
    conversations: list[Conversation] = []
    lengths = make.turns(requests, turns)
    while length := next(lengths, 0):
        opening = [say("system", kind()), say("user", make.span(suffix_len))]
        for sample in range(best_of):
            name = f"task-{len(conversations) // best_of}-{sample}"
            conversations.append(
                Conversation(name, _trajectory(make, opening, length, suffix_len, output_len, output_sigma, think_time))
            )
            if sample + 1 < best_of and not (length := next(lengths, 0)):
                break
    return conversations


def _trajectory(
    make: _Maker,
    opening: list[Message],
    length: int,
    result: int,
    answer: int,
    sigma: float,
    think: float,
) -> list[Turn]:
    """Return turns of which the first has the `opening`, and each further one a tool's result after its pause."""
    made = []
    for number in range(length):
        reply = span(next(make.names), make.tailed(answer, sigma))
        messages = [say("user", make.span(result))] if number else opening
        pause = make.tailed_seconds(think, sigma) if number else 0.0
        made.append(Turn(list(messages), reply.length, say("assistant", reply), pause))
    return made

"""What is asked: conversations, each a list of turns.

A turn names the messages it adds, so the prompt of turn k is everything before it plus these. What a message says is
text, or spans of tokens that stand for text nobody has (a trace's, a generator's): these become token ids or words
(`synthetic`) when a request is about to be sent, and a simulation needs neither. All randomness comes from the seed:
the same seed asks the same questions of every target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from loadgen.options import BadInput

Message = dict[str, object]  # as OpenAI has it; "content" may also be a tuple of Spans


FILES = "a trace, a file of conversations or a text"  # what loads are made of


class BadWorkload(BadInput):
    """A file or text that no load can be made of; the message names the file, the line and the reason."""


@dataclass(frozen=True, slots=True)
class Span:
    """`length` tokens named by ids: each id stands for `block` of them, the last for what is left.

    The same id stands for the same tokens wherever it comes; different ids share none.
    """

    ids: Sequence[int]
    length: int
    block: int


def span(name: int, length: int) -> Span:
    """`length` tokens with one name: a system prompt, a document, a reply."""
    return Span((name,), length, max(1, length))


@dataclass(slots=True)
class Turn:
    messages: list[Message]  # what this turn adds to the conversation
    max_tokens: int  # tokens of the reply, which is always that long
    reply: Message | None = None  # what the file says was answered
    think: float = 0.0  # seconds between the last reply and this turn
    forks: tuple[Conversation, ...] = ()  # begin when this turn is answered, and go on from there on their own
    # In a simulation: the `max_tokens` that the client sends, a bound on the reply and not its length; None: none
    limit: int | None = None


@dataclass(slots=True)
class Conversation:
    id: str
    turns: list[Turn]
    extra: dict[str, object] = field(default_factory=dict)  # fields for every request, e.g. tools

    @property
    def requests(self) -> int:
        return sum(1 + sum(fork.requests for fork in turn.forks) for turn in self.turns)


@dataclass(slots=True)
class Workload:
    """A whole load: what `drive` sends on the wall clock and what a simulation plays on a virtual one."""

    conversations: list[Conversation]
    starts: list[float]  # seconds from the beginning of the run, one for each conversation, ascending
    notes: list[str] = field(default_factory=list)  # what is worth knowing of its file: what was left out, and why

    @property
    def requests(self) -> int:
        return sum(conversation.requests for conversation in self.conversations)

    def share(self, index: int, of: int) -> Workload:
        """Every `of`-th conversation, for one process of several."""
        return Workload(self.conversations[index::of], self.starts[index::of])


@dataclass(frozen=True, slots=True)
class Offer:
    """What a schedule asks of a server, whatever the server does."""

    rate: float | None  # requests a second; None: all begin at once, or users send when they like
    seconds: float  # from the first start to the last
    later: int  # requests that wait for a reply first: later turns, and forks
    think: float  # seconds, mean over those


def offer(conversations: Sequence[Conversation], starts: Sequence[float]) -> Offer:
    """What these starts ask for. A rate counts the gaps between starts, so one start has none."""
    requests = sum(conversation.requests for conversation in conversations)
    long = starts[-1] - starts[0] if starts else 0.0
    thinks = [pause for conversation in conversations for pause in _pauses(conversation, True)]
    return Offer(
        requests * (len(starts) - 1) / len(starts) / long if long > 0 else None,
        long,
        len(thinks),
        sum(thinks) / len(thinks) if thinks else 0.0,
    )


def at_rate(work: Workload, rate: float) -> Workload:
    """The same load with its starts moved together or apart, so that it asks `rate` requests a second.

    Its conversations must not all begin at once.
    """
    factor = offer(work.conversations, work.starts).rate / rate
    return replace(work, starts=[start * factor for start in work.starts])


def _pauses(conversation: Conversation, first: bool) -> Iterator[float]:
    """The seconds between a reply and each request that waits for it."""
    for turn in conversation.turns:
        if not first:
            yield turn.think
        first = False
        for fork in turn.forks:
            yield from _pauses(fork, False)


def is_text(conversations: Sequence[Conversation]) -> bool:
    """Whether a load's prompts are texts, which every seed asks alike, and not names for tokens that a seed draws."""
    return isinstance(conversations[0].turns[0].messages[-1].get("content"), str)


def spans_of(messages: Sequence[Message]) -> Iterator[Span]:
    """The spans that messages say, in order; text is passed over."""
    for message in messages:
        if isinstance(content := message.get("content"), tuple):
            yield from content

"""The content of a load: conversations, each a list of turns.

A turn has the messages that it adds to its conversation; the prompt of its request is all messages so far. A message
has text or, where a trace or a generator has none, spans: lengths in tokens with ids that say what is shared. Spans
become token ids or words (`synthetic`) just before a request is sent; a simulation needs no words. All randomness comes
from the seed, so every target gets the same requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from loadgen.options import BadInput

Message = dict[str, object]  # an OpenAI message; "content" may also be a tuple of Spans


FILES = "a trace, a file of conversations or a text"  # the kinds of files, for error messages


class BadWorkload(BadInput):
    """A file or text that cannot be used as a load; the message names the file, the line and the reason."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a prompt without text: `length` tokens in blocks of `block` tokens, each named by an id.

    The last block has the rest of the tokens. Blocks with equal ids have equal tokens in all prompts; blocks with
    different ids share none.
    """

    ids: Sequence[int]
    length: int
    block: int


def span(name: int, length: int) -> Span:
    """Return a span that is one block of `length` tokens with the id `name`, such as a system prompt or a reply."""
    return Span((name,), length, max(1, length))


@dataclass(slots=True)
class Turn:
    """A turn of a conversation: the messages it adds, and its reply."""

    messages: list[Message]
    max_tokens: int  # tokens of the reply, which is always that long
    reply: Message | None = None  # the reply in the load's file; None: only the engine's
    think: float = 0.0  # seconds between the previous reply and this turn
    forks: tuple[Conversation, ...] = ()  # conversations that continue from this turn's reply, independently
    # In a simulation: the `max_tokens` that the client sends, which bounds the reply's length; None: not sent
    limit: int | None = None


@dataclass(slots=True)
class Conversation:
    """A conversation: its turns, and fields that are sent with each of its requests.

    `requests` counts its requests and those of the conversations that fork off from its turns.
    """

    id: str
    turns: list[Turn]
    extra: dict[str, object] = field(default_factory=dict)  # fields for every request, e.g. tools

    @property
    def requests(self) -> int:
        return sum(1 + sum(fork.requests for fork in turn.forks) for turn in self.turns)


@dataclass(slots=True)
class Workload:
    """A whole load, which `drive` sends and `simulate` plays in virtual time."""

    conversations: list[Conversation]
    starts: list[float]  # seconds from the beginning of the run, one for each conversation, ascending
    notes: list[str] = field(default_factory=list)  # for the user, on the file: what was left out, and why

    @property
    def requests(self) -> int:
        return sum(conversation.requests for conversation in self.conversations)


@dataclass(frozen=True, slots=True)
class Offer:
    """The load that a schedule offers to a server, however fast the server answers: its rate, duration and pauses."""

    rate: float | None  # requests per second; None: all begin at once, or closed loop
    seconds: float  # from the first start to the last
    later: int  # requests that wait for a reply: later turns and forks
    think: float  # mean seconds between the reply and these requests


def offer(conversations: Sequence[Conversation], starts: Sequence[float]) -> Offer:
    """Return the load that these start times offer.

    The rate is computed from the gaps between the starts, so it is None if all conversations begin at once.
    """
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
    """Return the same load with its start times scaled so that it offers `rate` requests per second.

    The load must offer a rate, so its conversations must not all begin at once.
    """
    factor = offer(work.conversations, work.starts).rate / rate
    return replace(work, starts=[start * factor for start in work.starts])


def _pauses(conversation: Conversation, first: bool) -> Iterator[float]:
    """Yield the seconds between a reply and each request that waits for it: later turns and forks.

    `first`: whether the conversation's first turn waits for no reply, because the conversation is no fork.
    """
    for turn in conversation.turns:
        if not first:
            yield turn.think
        first = False
        for fork in turn.forks:
            yield from _pauses(fork, False)


def is_text(conversations: Sequence[Conversation]) -> bool:
    """Return whether the prompts are texts, which another seed does not change, and not spans of made-up tokens."""
    return isinstance(conversations[0].turns[0].messages[-1].get("content"), str)


def spans_of(messages: Sequence[Message]) -> Iterator[Span]:
    """Yield the spans (tokens without text) of the messages in order; messages with text are skipped."""
    for message in messages:
        if isinstance(content := message.get("content"), tuple):
            yield from content

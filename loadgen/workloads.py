"""What is asked: conversations, each a list of turns; and two loads about real text.

A turn names the messages it adds, so the prompt of turn k is everything before it plus these. What a message says is
text, or spans of tokens that stand for text nobody has (a trace's, a generator's): these become token ids or words
(`synthetic`) when a request is about to be sent, and a simulation needs neither. All randomness comes from the seed: the
same seed asks the same questions of every target.
Lengths of real text are given in tokens and made in characters at CHARS_PER_TOKEN, since the generator works
against any server and so has no tokenizer; the report shows the lengths the server counted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from loadgen.sources import Document

CHARS_PER_TOKEN = 4
Message = dict[str, object]  # as OpenAI has it; "content" may also be a tuple of Spans


class BadWorkload(ValueError):
    """A workload file that can't be used; the message names the file, the line and the reason."""


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
    max_tokens: int
    reply: Message | None = None  # what the file says was answered
    think: float = 0.0  # seconds between the last reply and this turn
    forks: tuple[Conversation, ...] = ()  # begin when this turn is answered, and go on from there on their own


@dataclass(slots=True)
class Conversation:
    id: str
    turns: list[Turn]
    extra: dict[str, object] = field(default_factory=dict)  # fields for every request, e.g. tools
    with_last: bool = False  # begins at the very moment the conversation before it begins

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


def spans_of(messages: Sequence[Message]) -> Iterator[Span]:
    """The spans that messages say, in order; text is passed over."""
    for message in messages:
        if isinstance(content := message.get("content"), tuple):
            yield from content


# Preamble and questions are long and varied enough to read as a support assistant's.
_GUIDE = (
    "You are a patient guide to the text below. Answer from the text alone. Quote names exactly as they are "
    "written there. When the text does not hold the answer, say so plainly and name the section that comes "
    "nearest. Prefer short sentences, one example where an example helps, and no filler. If a question rests on "
    "a misunderstanding, clear that up first. Never invent a parameter, a default or an exception."
)
_QUESTIONS = (
    "What is {topic} for, and when would I reach for it?",
    "Explain {topic} to somebody who has never used it.",
    "Show the smallest useful example of {topic}.",
    "Which mistakes do people make with {topic}?",
    "What happens at the edges: empty input, wrong types, errors, for {topic}?",
    "How does {topic} differ from {other}?",
    "Would you use {topic} or {other} for a long-running service, and why?",
    "Summarise what the text says about {topic} in three sentences.",
)


def shared_prefix(documents: list[Document], requests: int, prefixes: int, suffix_tokens: int,
                  output_tokens: int, rng: random.Random) -> list[Conversation]:
    """Single questions: each of `prefixes` system prompts is shared, each question is its own.

    Prefixes are drawn evenly; the question is filled up with text to `suffix_tokens`.
    """
    shared = [_system(documents[index % len(documents)], index) for index in range(prefixes)]
    conversations = []
    for number in range(requests):
        index = rng.randrange(prefixes)
        question = _question(documents[index % len(documents)], rng)
        filler = _excerpt(rng.choice(documents).text, suffix_tokens * CHARS_PER_TOKEN - len(question), rng)
        user = {"role": "user", "content": f"{question}\n\n(Note {number}) {filler}".rstrip()}
        conversations.append(Conversation(f"single-{number}", [Turn([shared[index], user], output_tokens)]))
    return conversations


def multi_turn(documents: list[Document], requests: int, turns: int, think: float, output_tokens: int,
               rng: random.Random) -> list[Conversation]:
    """Conversations of about `turns` turns about one document each; documents come up evenly.

    The number of turns is drawn from half to one and a half times `turns`, the length of a reply
    from half to one and a half times `output_tokens`, think times are exponential.
    """
    order: list[int] = []
    conversations, left = [], requests
    while left > 0:
        if not order:
            order = rng.sample(range(len(documents)), len(documents))
        index = order.pop()
        length = min(left, rng.randint(max(1, turns // 2), turns + turns // 2))
        left -= length
        asked = [Turn([{"role": "user", "content": _question(documents[index], rng)}],
                      max(1, rng.randint(output_tokens // 2, output_tokens * 3 // 2)),
                      think=rng.expovariate(1 / think) if think else 0.0) for _ in range(length)]
        asked[0].messages.insert(0, _system(documents[index], index))
        conversations.append(Conversation(f"{documents[index].title}-{len(conversations)}", asked))
    return conversations


def _system(document: Document, index: int) -> Message:
    return {"role": "system", "content": f"{_GUIDE}\n\n[Text {index + 1}: {document.title}]\n\n{document.text}"}


def _question(document: Document, rng: random.Random) -> str:
    return rng.choice(_QUESTIONS).format(topic=rng.choice(document.topics), other=rng.choice(document.topics))


def _excerpt(text: str, length: int, rng: random.Random) -> str:
    if length <= 0:
        return ""
    start = rng.randrange(max(1, len(text) - length))
    return text[start:start + length]

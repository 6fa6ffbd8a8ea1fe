"""What is asked: conversations, each a list of turns, from a generator or from a file.

A turn names the messages it adds, so the prompt of turn k is everything before it plus these. All
randomness comes from the seed: the same seed asks the same questions of every target.
Lengths are given in tokens and made in characters at CHARS_PER_TOKEN, since the generator works
against any server and so has no tokenizer; the report shows the lengths the server counted.
"""

from __future__ import annotations

import gzip
import random
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from loadgen.sources import Document

CHARS_PER_TOKEN = 4
Message = dict[str, object]


class BadWorkload(ValueError):
    """A workload file that can't be used; the message names the file, the line and the reason."""


@dataclass(slots=True)
class Turn:
    messages: list[Message]  # what this turn adds to the conversation
    max_tokens: int
    reply: Message | None = None  # what the file says was answered
    think: float = 0.0  # seconds between the last reply and this turn


@dataclass(slots=True)
class Conversation:
    id: str
    turns: list[Turn]
    extra: dict[str, object] = field(default_factory=dict)  # fields for every request, e.g. tools


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


def conversation_file(path: Path, requests: int | None, output_tokens: int | None, think: float,
                      rng: random.Random) -> list[Conversation]:
    """OpenAI messages as JSONL (.gz too): one `{"messages": [...]}` or one `[...]` a line.

    Every assistant message becomes one turn; what stands before it since the last one is what the
    turn adds. A conversation that ends with the user gets one more turn. `tools` of a line go with
    its requests. Replies are as long as the file's unless `output_tokens` says otherwise.
    Conversations are taken in an order drawn from `rng`, again from the start if `requests` needs more.
    Raises BadWorkload with the place.
    """
    read = [_parse_line(path, number, line, output_tokens) for number, line in enumerate(_lines(path), 1) if line.strip()]
    if not any(conversation.turns for conversation in read):
        raise BadWorkload(f"{path}: no conversation in it has a message to answer")
    read = [conversation for conversation in read if conversation.turns]
    rng.shuffle(read)
    wanted = requests if requests is not None else sum(len(conversation.turns) for conversation in read)
    conversations, index = [], 0
    while wanted > 0:
        source = read[index % len(read)]
        again = index // len(read)
        turns = [Turn(turn.messages, turn.max_tokens, turn.reply, rng.expovariate(1 / think) if think else 0.0)
                 for turn in source.turns[:wanted]]
        conversations.append(Conversation(f"{source.id}+{again}" if again else source.id, turns, source.extra))
        wanted -= len(turns)
        index += 1
    return conversations


def _lines(path: Path) -> list[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return file.readlines()
    except (OSError, EOFError) as error:
        raise BadWorkload(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _parse_line(path: Path, number: int, line: bytes, output_tokens: int | None) -> Conversation:
    def bad(why: str) -> BadWorkload:
        return BadWorkload(f"{path}, line {number}: {why}")

    try:
        item = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise bad(f"not JSON: {error}") from None
    if isinstance(item, list):
        item = {"messages": item}
    messages = item.get("messages") if isinstance(item, dict) else None
    if not isinstance(messages, list):
        raise bad('expected {"messages": [...]} with OpenAI messages')
    turns, added = [], []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad('every message is an object with a "role"')
        if message["role"] == "assistant" and added:
            turns.append(Turn(added, output_tokens or _length(message), message))
            added = []
        else:
            added.append(message)
    if added and added[-1]["role"] != "assistant" and any(message["role"] == "user" for message in added):
        turns.append(Turn(added, output_tokens or 128))
    extra = {"tools": item["tools"]} if item.get("tools") else {}
    return Conversation(str(item.get("id", f"line-{number}")), turns, extra)


def _length(message: Message) -> int:
    written = message.get("content") if isinstance(message.get("content"), str) else ""
    calls = orjson.dumps(message["tool_calls"]).decode() if message.get("tool_calls") else ""
    return max(1, (len(written) + len(calls)) // CHARS_PER_TOKEN)

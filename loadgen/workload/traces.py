"""Readers of request files: public traces, which have times, and conversations, which have texts.

Traces have lengths and, by `hash_ids`, shared prefixes, but no words. Each line becomes a request of one span
(`conversations.Span`: tokens without text). A request of Mooncake's traces takes 1.1 kB, so a million lines fit in
memory. Token ids or words are made when a request is due.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from array import array
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import orjson

from loadgen.workload.conversations import FILES, BadWorkload, Conversation, Message, Span, Turn, Workload
from loadgen.workload.files import BadLine, Reader
from loadgen.workload.texts import CHARS_PER_TOKEN

_NOBODY_ELSES = 1 << 63  # added to a line's number, it names tokens for which the trace has no hash id
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_SHAREGPT_ROLES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")}
_FORMS = '{"messages": [...]} with OpenAI messages, {"conversations": [...]} or {"prompt": "..."}'
Timed = tuple[float, Conversation]  # seconds on the trace's own clock


def guess(path: Path) -> str | None:
    """Return the name in `datasets` of a file's format, guessed from its first line; None for a text.

    Raises BadWorkload if the file cannot be read.
    """
    first = Reader(path).first_line()
    try:
        item = orjson.loads(first)
    except orjson.JSONDecodeError:
        if first.startswith(_AZURE[0].encode()):
            return "azure"
        return "conversations" if first.startswith((b"{", b"[")) or ".jsonl" in path.suffixes else None
    for key, name in (("chat_id", "bailian"), ("hash_ids", "mooncake")):
        if isinstance(item, dict) and key in item:
            return name
    return "conversations"


def _is_array(first: bytes) -> bool:
    """Return whether a file that begins with this line is one JSON array of conversations, not one per line."""
    try:
        item = orjson.loads(first)
    except orjson.JSONDecodeError:
        return first.startswith(b"[")
    return isinstance(item, list) and any(isinstance(one, dict) and "role" not in one for one in item[:1])


def hash_trace(reader: Reader, block: int, unit: float, output_len: int | None) -> Iterator[Timed]:
    """Yield the requests, with their times, of JSONL lines with hash ids, as in Mooncake's and Bailian's traces.

    A line has `timestamp` (in units of `unit` seconds), `input_length`, `output_length` and `hash_ids`, each of which
    stands for `block` tokens. A partial last block may have a hash id or none; blocks without one are not shared. Each
    request becomes a conversation of one turn. If lines have `chat_id` and `parent_chat_id`, all requests of a chat
    have the chat id of its first request. `output_len`: tokens of every reply, instead of the trace's.
    """
    roots: dict[str, str] = {}

    def parse(item: object, number: int) -> Timed:
        at, length = _number(item, "timestamp"), _tokens(item, "input_length", 1)
        output, name = _tokens(item, "output_length", 0), f"line-{number}"
        if "chat_id" in item:
            chat = str(item["chat_id"])
            name = roots[chat] = roots.get(str(item.get("parent_chat_id")), chat)
        span = Span(_hash_ids(item.get("hash_ids"), length, block, number), length, block)
        return at * unit, _single(name, span, output_len or output)

    return reader.entries(parse)


def _hash_ids(ids: object, length: int, block: int, number: int) -> array:
    """Return an id for each block of a prompt: the trace's `ids`, and unique ids for blocks that have none.

    `length`: tokens of the prompt; `block`: tokens of a block; `number`: number of the line, from which unique ids are
    made. Raises BadLine if the number of ids does not fit the length.
    """
    whole, rest = divmod(length, block)
    if not ids:
        whole, ids = 0, []  # without ids nothing is shared
    elif not isinstance(ids, list) or len(ids) not in (whole, whole + bool(rest)):
        there = f"{len(ids)} entries" if isinstance(ids, list) else "no list"
        raise BadLine(f'"hash_ids" has {there}, but {length} tokens are {whole + bool(rest)} blocks of {block}')
    alone = range(len(ids), -(-length // block))  # blocks without an id get names that no other request has
    names = [_NOBODY_ELSES + (number << 20) + place for place in alone]
    try:
        return array("I" if max(ids, default=0) < 1 << 32 and not names else "Q", [*ids, *names])
    except (TypeError, OverflowError):
        raise BadLine('"hash_ids" holds something that is no whole number') from None


def azure_trace(reader: Reader, output_len: int | None) -> Iterator[Timed]:
    """Yield the requests, with their times, of CSV lines with TIMESTAMP, ContextTokens and GeneratedTokens.

    The requests share no tokens. `output_len`: tokens of every reply, instead of the trace's.
    """
    columns: list[int] = []

    def parse(line: bytes, number: int) -> Timed | None:
        cells = next(csv.reader([line.decode("utf-8", "replace")]))
        if not columns:
            if any(name not in cells for name in _AZURE):
                raise BadWorkload(f"{reader.path}, line {number}: expected the columns {', '.join(_AZURE)}")
            columns.extend(cells.index(name) for name in _AZURE)
            return None
        if len(cells) <= max(columns):
            raise BadLine(f"{len(cells)} columns where {max(columns) + 1} are needed")
        time, prompt, output = (cells[column] for column in columns)
        try:
            when = datetime.fromisoformat(time)
        except ValueError:
            raise BadLine(f"{time!r} is no time") from None
        if not prompt.isdecimal() or not output.isdecimal() or not int(prompt):
            raise BadLine(f"{prompt!r} and {output!r} are no lengths")
        span = Span((_NOBODY_ELSES + number,), int(prompt), int(prompt))
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        return when.timestamp(), _single(f"line-{number}", span, output_len or int(output))

    return reader.rows(parse)


def _single(name: str, prompt: Span, output: int) -> Conversation:
    return Conversation(name, [Turn([{"role": "user", "content": (prompt,)}], max(1, output))])


def replay(
    timed: Iterable[Timed],
    reader: Reader,
    requests: int | None,
    rng: random.Random,
    *,
    start: float = 0.0,
    seconds: float = math.inf,
    speed: float = 1.0,
    jitter: float = 0.0,
) -> Workload:
    """Return the requests of a part of a trace, sent at the times that the trace gives.

    `start`, `seconds`: the part, in seconds of the trace from its first request; `speed`: how many times as fast to
    send it; `requests`: the most requests to take, or None for all. `jitter`: each request is delayed at random by up
    to as many seconds of the trace, for traces with a coarse clock. Reading stops at the first line after the part, so
    lines must be in order of time. Raises BadWorkload if there is no request in the part.
    """
    first, taken = None, []
    for at, conversation in timed:
        first = at if first is None else first
        if at - first < start:
            continue
        if at - first - start >= seconds:
            break
        taken.append(((at - first - start + (rng.random() * jitter if jitter else 0.0)) / speed, conversation))
        if len(taken) == requests:
            break
    if not taken:
        raise BadWorkload("; ".join((f"{reader.path}: no request in that part of it", *reader.notes())))
    taken.sort(key=lambda one: one[0])
    notes = reader.notes() + ([] if jitter else _coarse([at * speed for at, _ in taken]))
    return Workload([conversation for _, conversation in taken], [at for at, _ in taken], notes)


def _coarse(times: list[float]) -> list[str]:
    """Return advice, in a list, if the trace's clock is so coarse that most requests have the same time as others.

    `times`: seconds at which the requests were sent, by the trace. The list is empty if the clock is fine enough.
    """
    distinct = sorted(set(times))
    if len(distinct) * 3 > len(times) or len(distinct) < 2:
        return []
    step = statistics.mode(round(later - earlier, 3) for earlier, later in pairwise(distinct))
    different = f"{len(times):,} requests have {len(distinct):,} different times"
    return [f"{different}: --trace-jitter {step:g} spreads them over the steps"]


def conversation_file(
    path: Path,
    requests: int | None,
    output_tokens: int | None,
    think: float,
    rng: random.Random,
    *,
    reader: Reader | None = None,
    shuffle: bool = True,
) -> list[Conversation]:
    """Read conversations from a file (.gz too) with one per line, or all in one JSON array.

    A conversation has one of the forms that `_conversation` lists: OpenAI's, ShareGPT's, or a single prompt. Every
    assistant message ends a turn, to which the messages before it belong; a conversation that ends with the user gets
    one more turn. `tools` of an entry go into its requests.

    `requests`: number of turns to return, or None for one pass over the file; if the file has fewer, its conversations
    are repeated. `output_tokens`: length of every reply, or None for those of the file. `think`: mean seconds between a
    reply and the next turn. With `shuffle` the order is drawn from `rng`. No more conversations are kept in memory than
    needed. Raises BadWorkload with the place of an error.
    """
    reader = reader or Reader(path)
    read = reader.array if _is_array(reader.first_line()) else reader.entries
    found = (one for one in read(lambda item, number: _conversation(item, number, output_tokens)) if one.turns)
    held = _enough(found, requests, rng if shuffle else None)
    if not held:
        why = f"{path}: no conversation in it has a message to answer; name {FILES}"
        raise BadWorkload("; ".join((why, *reader.notes())))
    wanted = requests if requests is not None else sum(len(conversation.turns) for conversation in held)
    conversations, index = [], 0
    while wanted > 0:
        source, again = held[index % len(held)], index // len(held)
        turns = [
            Turn(turn.messages, turn.max_tokens, turn.reply, rng.expovariate(1 / think) if think else 0.0)
            for turn in source.turns[:wanted]
        ]
        conversations.append(Conversation(f"{source.id}+{again}" if again else source.id, turns, source.extra))
        wanted -= len(turns)
        index += 1
    return conversations


def _enough(found: Iterator[Conversation], requests: int | None, rng: random.Random | None) -> list[Conversation]:
    """Return enough conversations for `requests` turns (None: all): the first ones, or with `rng` a random sample."""
    held: list[Conversation] = []
    turns = 0
    for number, conversation in enumerate(found):
        if requests is None or number < requests:
            held.append(conversation)
        elif (place := rng.randrange(number + 1)) < requests:
            held[place] = conversation
        turns += len(conversation.turns)
        if rng is None and requests is not None and turns >= requests:
            break
    if rng is not None:
        rng.shuffle(held)
    return held


def _conversation(item: object, number: int, output_tokens: int | None) -> Conversation:
    """Return the conversation in one entry of a file; `number`: the entry's, from 1. Raises BadLine.

    The entry has one of three forms. OpenAI messages: `{"messages": [...]}` with optional `id` and `tools`, or `[...]`.
    ShareGPT's: `{"conversations": [{"from": "human", "value": ...}, ...]}`, of which all turns are used, not only the
    first pair. Or one prompt: `{"prompt": "...", "output_tokens": 10}` as in `vllm bench serve`, 256 tokens by default.
    """
    if isinstance(item, list):
        item = {"messages": item}
    if not isinstance(item, dict):
        raise BadLine(f"expected {_FORMS}")
    name, tools = str(item.get("id", f"line-{number}")), item.get("tools")
    if isinstance(prompt := item.get("prompt"), str):
        length = output_tokens or (_tokens(item, "output_tokens", 1) if item.get("output_tokens") is not None else 256)
        return Conversation(name, [Turn([{"role": "user", "content": prompt}], length)])
    messages = item.get("messages")
    if isinstance(said := item.get("conversations", item.get("conversation")), list):
        messages = [_from_sharegpt(message) for message in said]
    if not isinstance(messages, list):
        raise BadLine(f"expected {_FORMS}")
    return Conversation(name, _turns(messages, output_tokens), {"tools": tools} if tools else {})


def _from_sharegpt(message: object) -> Message:
    who, said = (message.get("from"), message.get("value")) if isinstance(message, dict) else (None, None)
    if not isinstance(who, str) or not isinstance(said, str):
        raise BadLine('every message is an object with "from" and "value"')
    return {"role": _SHAREGPT_ROLES.get(who, who), "content": said}


def _turns(messages: list[object], output_tokens: int | None) -> list[Turn]:
    """Return the turns of a conversation: each ends with an assistant message, and has the messages before it."""
    turns, added = [], []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadLine('every message is an object with a "role"')
        if message["role"] == "assistant" and added:
            turns.append(Turn(added, output_tokens or _length(message), message))
            added = []
        else:
            added.append(message)
    if added and added[-1]["role"] != "assistant" and any(message["role"] == "user" for message in added):
        turns.append(Turn(added, output_tokens or 128))
    return turns


def _length(message: Message) -> int:
    written = message.get("content") if isinstance(message.get("content"), str) else ""
    calls = orjson.dumps(message["tool_calls"]).decode() if message.get("tool_calls") else ""
    return max(1, (len(written) + len(calls)) // CHARS_PER_TOKEN)


def _number(item: object, key: str) -> float:
    value = item.get(key) if isinstance(item, dict) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadLine(f'"{key}" is missing' if value is None else f'"{key}" is {value!r} and no number')
    return value


def _tokens(item: object, key: str, least: int) -> int:
    value = _number(item, key)
    if value != int(value) or value < least:
        raise BadLine(f'"{key}" is {value!r} and no number of tokens')
    return int(value)

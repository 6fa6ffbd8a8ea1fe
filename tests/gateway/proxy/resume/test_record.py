"""Streams that break off at any byte, and the rest that is joined to them: the client's text is the whole one, each
event is whole, and counts speak of the client's request."""

import json
import tracemalloc
from array import array

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.chunks import Chunks, framed
from gateway.http.upstream import Head, UpstreamError
from gateway.prompt import Prompt
from gateway.prompt.api.resumable import terms_of
from gateway.proxy.resume.record import IDS, REPEAT, StreamRecord

from ..replies import chunk

HEAD = Head(b"HTTP/1.1 200 OK\r\n\r\n", [(b"transfer-encoding", b"chunked")], False, True)
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "messages": "/v1/messages", "responses": "/v1/responses"}  # fmt: skip
PROMPT = [7, 8, 9]
TEXT = "Grüße, 你好 🌍! "


class Engine:
    """Writes this text byte by byte, a token each, in pieces of so many tokens; a character is shown once it is
    complete. Each engine has names of its own."""

    def __init__(self, label: str, text: str, sizes: list[int], name: str):
        self.label, self.tokens, self.sizes, self.name = label, text.encode(), sizes, name
        self.number = -1

    def event(self, data: dict) -> bytes:
        if self.label == "responses":
            self.number += 1
            data["sequence_number"] = self.number
        head = b"event: %b\n" % data["type"].encode() if "type" in data else b""
        return chunk(head + b"data: " + orjson.dumps(data) + b"\n\n")

    def stream(self, ids: list[int] = PROMPT, asked: bool = True) -> bytes:
        """From the prompt's ids, or from more."""
        written, out, told, shown = len(ids) - len(PROMPT), [self.opens(ids, asked)], len(ids) - len(PROMPT), 0
        # what is written already is shown by the one who wrote it
        base, at = self.tokens[:written].decode(errors="ignore"), written
        shown, sizes = len(base), [*self.sizes]
        while at < len(self.tokens):
            step = sizes.pop(0) if sizes else 1
            end = min(at + step, len(self.tokens))
            known = self.tokens[:end].decode(errors="ignore")
            last, first = end == len(self.tokens), at == written
            out.append(self.text(known[shown:], [*self.tokens[at:end]], last, ids, first, asked))
            shown, at = len(known), end
        out.append(self.closes(len(ids), len(self.tokens) - written, base))
        assert told == written
        return b"".join(out) + b"0\r\n\r\n"

    def opens(self, ids, asked) -> bytes:
        if self.label == "chat":
            choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            return self.event({**self.frame([choice]), **({"prompt_token_ids": ids} if asked else {})})
        if self.label == "messages":
            message = {"id": self.name, "usage": {"input_tokens": len(ids), "output_tokens": 0}}
            return self.event({"type": "message_start", "message": message}) + self.event(
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            )
        if self.label == "responses":
            item = {"id": "item " + self.name, "type": "message"}
            return (
                self.event({"type": "response.created", "response": {"id": self.name, "created_at": 1, "store": True, "output": []}})
                + self.event({"type": "response.output_item.added", "output_index": 0, "item": item})
                + self.event({"type": "response.content_part.added", "item_id": item["id"], "part": {"type": "output_text", "text": ""}})
            )  # fmt: skip
        return b""

    def frame(self, choices) -> dict:
        return {"id": self.name, "created": self.name, "model": "m", "choices": choices}

    def text(self, text, tokens, last, ids, first, asked) -> bytes:
        if self.label in ("chat", "completions"):
            said = {"delta": {"content": text}} if self.label == "chat" else {"text": text}
            told = {"token_ids": tokens} if asked else {}
            if asked and first and self.label == "completions":
                told["prompt_token_ids"] = ids
            choice = {"index": 0, **said, "logprobs": None, "finish_reason": "length" if last else None, **told}
            return self.event(self.frame([choice]))
        if not text:
            return b""
        if self.label == "messages":
            delta = {"type": "text_delta", "text": text}
            return self.event({"type": "content_block_delta", "index": 0, "delta": delta})
        told = {"item_id": "item " + self.name, "delta": text, "logprobs": []}
        return self.event({"type": "response.output_text.delta", **told})

    def closes(self, prompt, written, before) -> bytes:
        whole = self.tokens.decode()[len(before) :]
        if self.label in ("chat", "completions"):
            usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
            return self.event({**self.frame([]), "usage": usage}) + chunk(b"data: [DONE]\n\n")
        if self.label == "messages":
            return (
                self.event({"type": "content_block_stop", "index": 0})
                + self.event({"type": "message_delta", "delta": {"stop_reason": "max_tokens"},
                              "usage": {"input_tokens": prompt, "output_tokens": written}})
                + self.event({"type": "message_stop"})
            )  # fmt: skip
        part = {"type": "output_text", "text": whole}
        item = {"id": "item " + self.name, "type": "message", "content": [part]}
        usage = {"input_tokens": prompt, "output_tokens": written, "total_tokens": prompt + written}
        response = {"id": self.name, "created_at": 1, "status": "incomplete", "output": [item], "usage": usage}
        response["store"] = True
        return (
            self.event({"type": "response.output_text.done", "item_id": item["id"], "text": whole})
            + self.event({"type": "response.output_item.done", "output_index": 0, "item": item})
            + self.event({"type": "response.completed", "response": response})
        )


def record(label: str, text: str, **fields) -> StreamRecord:
    limit, most = "max_output_tokens" if label == "responses" else "max_tokens", len(text.encode())
    body = orjson.dumps({"model": "m", "stream": True, "temperature": 0, limit: most, **fields})
    prompt = Prompt(PATHS[label], "m", stream=True, tokens=len(PROMPT), max_tokens=most, include_usage=True)
    made = StreamRecord(None, terms_of(prompt, body), label, prompt)
    made.begin(HEAD, 0, body, True)
    return made


def taken(one: StreamRecord, data: bytes, cuts: list[int]) -> bytes:
    """In reads of these sizes."""
    out, at = b"", 0
    for size in [*cuts, len(data)]:
        written, error = one.take(data[at : at + size])
        assert error is None, error
        out, at = out + written, at + size
    return out


def read(label: str, body: bytes) -> tuple[str, set, dict, list]:
    """A client's view: the text, the ids, the usage, and the kinds of events in their order (texts once)."""
    at, raw = 0, b""
    while at < len(body):
        size, _, _ = body[at : at + 12].partition(b"\r\n")
        start = at + len(size) + 2
        raw += body[start : start + int(size, 16)]
        assert body[start + int(size, 16) :][:2] == b"\r\n", "a chunk is not whole"
        at = start + int(size, 16) + 2
    assert raw.endswith(b"\n\n") or not raw
    text, names, usage, kinds, numbers = "", set(), {}, [], []
    for event in raw.split(b"\n\n")[:-1]:
        line = event[event.find(b"data:") + 5 :].strip()
        if line == b"[DONE]":
            kinds.append("done")
            continue
        data = json.loads(line)
        assert b'token_ids":[' not in line
        usage = data.get("usage") or data.get("response", {}).get("usage") or usage
        names |= {str(data[name]) for name in ("id", "created", "item_id") if name in data}
        names |= {data["response"]["id"]} if "response" in data else set()
        if "sequence_number" in data:
            numbers.append(data["sequence_number"])
        if label in ("chat", "completions"):
            kind = "usage" if not data["choices"] else "text"
            for choice in data["choices"]:
                text += choice["delta"]["content"] if label == "chat" else choice["text"]
                kind = "role" if "role" in choice.get("delta", {}) else choice["finish_reason"] or kind
        else:
            kind = data["type"]
            text += data["delta"]["text"] if kind == "content_block_delta" else ""
            text += data["delta"] if kind == "response.output_text.delta" else ""
        if kinds[-1:] != [kind]:
            kinds.append(kind)
    assert numbers == list(range(len(numbers)))
    return text, names, usage, kinds


SIZES = st.lists(st.integers(1, 5), max_size=12)
READS = st.lists(st.integers(1, 200), max_size=8)


def broken(label: str, way: str | None, **fields) -> tuple[StreamRecord, bytes]:
    """A stream that broke off in the middle, and whose rest is read now (unless `way` is None), and what its client
    got."""
    one = record(label, TEXT, **fields)
    stream = Engine(label, TEXT, [], "a").stream(asked=way != REPEAT)
    body = taken(one, stream[: len(stream) // 2], [])
    if way is not None:
        go_on(one, way)
        one.read_from(HEAD)
    return one, body


def go_on(one: StreamRecord, way: str) -> list[int]:
    """Return the ids that the next engine is given."""
    one.way = way
    one.break_off("closed", 0)
    if way == IDS:
        return array("I", one.go_by_ids()).tolist()
    one.go_by_repetition()
    return PROMPT


@pytest.mark.parametrize(
    ("label", "way"),
    [("chat", IDS), ("completions", IDS), *((label, REPEAT) for label in PATHS)],
)
@given(
    sizes=st.tuples(SIZES, SIZES, SIZES), where=st.tuples(st.floats(0, 1), st.floats(0, 1)), reads=READS, times=st.integers(1, 2)
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_breaks_at_any_byte_leave_no_trace(label, way, sizes, where, reads, times):
    text = TEXT * 2
    asked = way == IDS
    whole = Engine(label, text, sizes[0], "a").stream(asked=asked)
    expected = read(label, taken(record(label, text), whole, []))
    one = record(label, text)
    body = taken(one, whole[: int(where[0] * len(whole))], reads)
    for time in range(times):
        if one.complete:
            break
        if way == IDS and (not one.prompt_ids or one.has_all_text):  # nothing was written, or all
            if one.has_all_text:
                one.break_off("closed", 0)
                body += framed(one.closing_events(), HEAD)
            break
        ids = go_on(one, way)
        one.read_from(HEAD)
        rest = Engine(label, text, sizes[time + 1], "b").stream(ids)
        last = time == times - 1
        body += taken(one, rest if last else rest[: int(where[1] * len(rest))], reads)
    if not one.complete:  # as it was before anything was written, or with the last event alone missing
        return
    found = read(label, body)
    assert found[::2] == expected[::2] and found[3] == expected[3]
    assert len(found[1]) == len(expected[1]), "names of two streams"


@pytest.mark.parametrize("label", ["chat", "completions"])
def test_an_engine_that_does_not_take_ids_is_found_out_before_its_client_has_a_word(label):
    one, _ = broken(label, IDS)
    written, error = one.take(Engine(label, TEXT, [], "b").stream())  # from the prompt, as if nothing was written
    assert isinstance(error, UpstreamError) and error.kind == "differs" and not written


@pytest.mark.parametrize("label", PATHS)
def test_another_text_is_never_joined(label):
    one, _ = broken(label, REPEAT)
    other = TEXT.replace("r", "x", 1)
    written, error = one.take(Engine(label, other, [], "b").stream(asked=False))
    assert isinstance(error, UpstreamError) and error.kind == "differs" and not written


@pytest.mark.parametrize(
    ("event", "label"),
    [
        ({"choices": [{"index": 0, "delta": {"reasoning": "Hm"}, "finish_reason": None}]}, "chat"),
        ({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}, "finish_reason": None}]}, "chat"),
        ({"choices": [{"index": 0, "text": "a", "logprobs": {"tokens": ["a"]}}]}, "completions"),
        ({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking"}}, "messages"),
        ({"type": "response.output_item.added", "output_index": 0, "item": {"type": "reasoning"}}, "responses"),
    ],
)
def test_what_a_parser_has_made_is_passed_on_and_not_gone_on_with(event, label):
    one = record(label, TEXT)
    raw = b"data: " + orjson.dumps(event) + b"\n\n"
    written, error = one.take(chunk(raw))
    assert raw in written and error is None and one.lost == "events"


ODD = [
    {"choices": [{"index": 0, "delta": {"content": "a"}, "text": "a", "token_ids": [-1]}]},
    {"choices": [{"index": 0, "delta": {"content": "a"}, "text": "a", "token_ids": [2**40]}]},
    {"choices": [{"index": 0, "delta": {"content": "a"}, "text": "a", "token_ids": 5}], "prompt_token_ids": "x"},
    {"choices": [{"index": 0, "delta": {"content": 5}, "text": 5}]},
    {"choices": [], "usage": {"completion_tokens": None, "prompt_tokens": 1}},
    {"choices": [{"index": 0, "delta": "a", "text": ["a"]}], "prompt_token_ids": [None]},
    {"type": "message_start", "message": {"usage": None}},
    {"type": "message_delta", "delta": None},
    {"type": "response.completed", "response": {"output": [7]}},
    {"type": "response.output_item.added", "output_index": 0, "item": {"type": "message"}},
]


@pytest.mark.parametrize("label", PATHS)
@pytest.mark.parametrize("way", [None, REPEAT])
@pytest.mark.parametrize("odd", ODD)
def test_no_event_makes_the_gateway_fail(odd, label, way):
    one, _ = broken(label, way)
    raw = b"data: " + orjson.dumps(odd) + b"\n\n"
    written, error = one.take(chunk(raw))
    assert error is None or way is None or error.kind == "differs"


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=4)
ANY = st.recursive(
    LEAVES | st.sampled_from(["abort", "error", "message_stop", [], {}, "x" * 2000]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "type", "text", "usage", "choices", "delta"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def twisted(draw, told):
    """The same with another value in some place."""
    if not isinstance(told, dict | list) or not told or draw(st.integers(0, 4)) == 0:
        return draw(ANY)
    at = draw(st.sampled_from(sorted(told) if isinstance(told, dict) else range(len(told))))
    told[at] = twisted(draw, told[at])
    return told


@pytest.mark.parametrize("label", PATHS)
@pytest.mark.parametrize("way", [None, IDS, REPEAT])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_types_an_engine_writes_its_stream_passes_or_ends(label, way, data):
    """Before a break the client gets all of it, but for an end that nothing was said of; behind one nothing is joined
    that does not follow."""
    if way == IDS and label not in ("chat", "completions"):
        return
    one = record(label, TEXT)
    if way is not None:
        begun = Engine(label, TEXT, [], "a").stream()
        taken(one, begun[: data.draw(st.sampled_from((0, len(begun) // 2))) if way == REPEAT else len(begun) // 2], [])
        ids = go_on(one, way)
        one.read_from(HEAD)
    raw = Chunks().feed(Engine(label, TEXT, [], "b").stream(PROMPT if way is None else ids))
    events = raw.split(b"\n\n")[:-1]
    at = data.draw(st.integers(0, len(events) - 1))
    head, _, told = events[at].rpartition(b"data: ")
    if told != b"[DONE]":
        events[at] = head + b"data: " + orjson.dumps(twisted(data.draw, orjson.loads(told)))
    given = b""
    for raw in events:
        written, error = one.take(chunk(raw + b"\n\n"))
        given += written
        assert way is not None or error is not None or raw[:20] in written
        if error is not None:
            assert error.kind in ("differs", "error answer", "aborted") or (error.kind == "closed" and b"[DONE]" in raw)
            break
    if not one.complete:  # and then again
        one.break_off("closed", 0)
        assert one.size and (one.has_all_text or one.lacks_end or one.go_by_repetition() is None)


@pytest.mark.parametrize("written", [b'"token_ids":[]', b'"token_ids": [1, 2]', b'"prompt_token_ids" :[ 7 ]'])
def test_lists_that_the_client_did_not_ask_for_are_null_however_they_are_written(written):
    raw = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null,%b}]}\n\n' % written
    out, error = record("chat", TEXT).take(chunk(raw))
    assert error is None and b"[" not in out.replace(b'"choices":[', b"") and b"null" in out.rpartition(b"ids")[2]


def test_an_event_has_room_for_a_prompt_of_a_million_ids():
    """In chunks of a proxy's size, as between a gateway and engines it may stand."""
    ids = [*range(100_000, 1_100_000)]
    one = record("chat", TEXT)
    one.prompt.tokens = len(ids)
    whole = Chunks().feed(Engine("chat", TEXT, [], "a").opens(ids, True) + b"0\r\n\r\n")
    for start in range(0, len(whole), 2**16):
        part = whole[start : start + 2**16]
        written, error = one.take(chunk(part))
        assert error is None
    assert one.prompt_ids.tolist() == ids and b"[1" not in written


@pytest.mark.parametrize("size", [1, 1000])
def test_the_budget_counts_what_is_held(size):
    """A stream of many small events, and a body with a large field."""
    tracemalloc.start()
    try:
        one = record("chat", "a", metadata={str(number): "x" for number in range(20 * size)}, temperature=1)
        one.body = b""
        engine = Engine("chat", "a", [], "a")
        taken(one, engine.opens(PROMPT, True), [])
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20 * size):
            one.take(engine.text("a", [97], False, PROMPT, False, True))
        held = tracemalloc.get_traced_memory()[0] - before
        kept = len(one.terms.kept)
        assert one.size - kept >= 0.8 * held and one.size >= kept >= 20 * size * 4
    finally:
        tracemalloc.stop()


def test_bytes_that_end_no_event_count_as_well():
    one = record("chat", TEXT)
    before = one.size
    one.take(b"30000\r\n" + b"x" * 0x30000 + b"\r\n20000\r\n" + b"y" * 0x10000)
    assert one.size >= before + 0x40000


def test_a_response_that_was_gone_on_with_says_that_it_is_not_stored():
    """It has the first replica's id, under which no replica has it."""
    one, body = broken("responses", REPEAT, store=True)
    body += taken(one, Engine("responses", TEXT, [], "b").stream(), [])
    last = body[body.rfind(b"data: ") + 6 : body.rfind(b"\n\n")]
    assert json.loads(last)["response"]["store"] is False

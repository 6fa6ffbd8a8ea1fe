import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.drive.records import Record
from loadgen.drive.sse import Reply

SSE = {b"content-type": b"text/event-stream; charset=utf-8"}
STREAM = (
    b': a comment\r\n\r\ndata: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"Gr\xc3\xbc"}}]}\r\n\r\n'
    b'event: x\ndata: {"choices":[{"index":0,\ndata: "delta":{"content":"\xc3\x9fe"}}]}\n\n'
    b'data:{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":50,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":48}}}\n\n'
    b"data: [DONE]\n\n"
)


def read(parts: list[tuple[bytes, float]], headers=SSE, status=200) -> Record:
    record = Record("c", 0, due=0.0)
    reply = Reply(record)
    reply.begin(status, headers)
    for data, now in parts:
        reply.feed(data, now)
    last = parts[-1][1] if parts else 0.0
    reply.end(last)
    reply.settle(None, last)
    return record


@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_a_stream_reads_the_same_however_it_is_cut(cuts):
    edges = sorted({0, len(STREAM), *cuts})
    record = read([(STREAM[start:end], float(end)) for start, end in itertools.pairwise(edges)])
    assert record.text == "Grüße"
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (50, 2, 48)
    assert record.error is None
    assert len(record.gaps) == 1
    # the time is that of the read which completed the event
    assert record.first == min(edge for edge in edges if edge >= STREAM.index(b"event: x"))


def test_the_chunk_that_names_the_role_is_not_the_first_token(wire):
    role = wire.event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    record = read([(role, 1.0), (wire.delta("a"), 3.0), (wire.delta("b"), 4.5), (wire.DONE, 5.0)])
    assert record.first == 3.0
    assert record.gaps == [1.5]
    assert record.last == 4.5  # [DONE] carries nothing


@pytest.mark.parametrize("part", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}])
def test_reasoning_and_tool_calls_are_output_but_not_text(wire, part):
    record = read([(wire.event(choices=[{"delta": part}]), 2.0), (wire.DONE, 3.0)])
    assert record.first == 2.0
    assert record.text == ""


def test_completions_carry_text_in_the_choice(wire):
    record = read(
        [(wire.event(choices=[{"text": "one"}]), 1.0), (wire.event(choices=[{"text": " two"}]), 2.0), (wire.DONE, 2.0)]
    )
    assert record.text == "one two"


def test_a_stream_without_an_end_is_truncated_and_a_finish_reason_is_an_end(wire):
    assert read([(wire.delta("a"), 1.0)]).error == "truncated"
    assert read([(wire.delta("a"), 1.0), (wire.delta(finish_reason="stop"), 2.0)]).error is None


def test_an_error_event_is_an_error_although_the_status_was_200(wire):
    record = read([(wire.delta("a"), 1.0), (wire.event(error={"message": "engine died", "code": 502}), 2.0)])
    assert record.error == "stream_error"
    assert "engine died" in record.detail


@pytest.mark.parametrize(
    "payload", [b"nonsense", b"[]", b'{"choices":[3]}', b'{"choices":[],"usage":{"prompt_tokens_details":7}}']
)
def test_what_is_no_openai_reply_is_a_protocol_error(payload):
    assert read([(b"data: " + payload + b"\n\n", 1.0)]).error == "protocol"


def test_a_whole_reply(wire):
    body = (
        b'{"choices":[{"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":7,"completion_tokens":1,"prompt_tokens_details":null}}'
    )
    record = read([(body[:20], 1.0), (body[20:], 2.0)], {b"content-type": b"application/json"})
    assert (record.text, record.first, record.last) == ("hello", 2.0, 2.0)
    assert (record.prompt_tokens, record.cached_tokens) == (7, None)


@pytest.mark.parametrize(
    "body, said",
    [
        (b'{"error":{"message":"too long"}}', "too long"),
        (b'{"object":"error","message":"too long"}', "too long"),
        (b'{"error":"too long"}', '{"error":"too long"}'),
        (b'{"detail":"Not Found"}', '{"detail":"Not Found"}'),
        (b"[1]", "[1]"),
        (b"<h1>busy</h1>", "<h1>busy</h1>"),
    ],
)
def test_a_refusal_names_its_status_and_says_why(body, said):
    record = read([(body, 1.0)], {b"content-type": b"application/json"}, 400)
    assert (record.error, record.detail) == ("http_400", said)


def test_hitherto_headers_are_read_and_their_absence_is_fine(wire):
    named = read([(wire.DONE, 1.0)], {**SSE, b"x-hitherto-replica": b"r1", b"x-hitherto-cached-tokens": b"128"})
    assert (named.replica, named.predicted_tokens) == ("r1", 128)
    plain = read([(wire.DONE, 1.0)])
    assert (plain.replica, plain.predicted_tokens) == (None, None)

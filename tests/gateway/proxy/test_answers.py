"""What the first and last bytes of an answer say: an error, no engine's, or an answer of its API."""

import json

import pytest

from gateway.proxy.responses.answers import (
    BOM,
    Sight,
    begins,
    error_status,
    foreign_head,
    has_end,
    has_other_event,
    keeps_alive,
    look,
)
from gateway.proxy.resume.record import Kind, read

from .engine_events import DIED, DONE, ERRORS, NAMES, PINGS, ROLE, TOKEN
from .replies import chunk


@pytest.mark.parametrize(("path", "event", "status"), ERRORS, ids=NAMES)
def test_an_error_is_found_in_every_format_first_and_last_whatever_the_framing(path, event, status):
    for framed in (event, chunk(event), b"40;ext=1\r\n" + event):
        assert error_status(framed, True) == status
        assert error_status(chunk(TOKEN) + framed + chunk(DONE) + b"0\r\n\r\n", True) == status
    assert error_status(chunk(json.dumps({"content": event.decode()}).encode()), True) == 0  # only quoted


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"text":"{\\"error\\": {"}]}',
        b'{"id":"resp_1","status":"completed","error":null}',
        b"",
        b'{"error":null}',
    ],
)
def test_a_good_answer_is_no_error(body):
    assert error_status(body, False) == 0 and error_status(b"data: " + body + b"\n\n" + DONE, True) == 0


def test_an_error_object_with_status_200_is_an_error():
    assert error_status(b'{"error":{"message":"x","type":"BadRequestError","code":400}}', False) == 400
    assert error_status(b'2f\r\n{ "object": "error", "message": "x", "code": 503}', False) == 503
    assert error_status(b'{"error": "no idea"}', False) == 500


def test_what_no_engine_writes_is_told_by_its_type():
    assert foreign_head(200, b"text/html")
    assert foreign_head(404, b"text/html; charset=utf-8")
    assert foreign_head(302, b"text/plain")
    assert not foreign_head(200, b"application/json; charset=utf-8")
    assert not foreign_head(502, b"text/html")
    assert not foreign_head(200, b"")


ANSWERS = {
    "chat": b'{"id":"1","choices":[]}', "completions": b'{ "choices" : []}',
    "responses": b'{"id":"r","output":[]}', "messages": b'{"type":"message","content":[]}',
    "embeddings": b'{"object":"list","data":[{"object":"embedding","embedding":[0.1]}]}', "tokenize": b'{"count":1,"tokens":[1]}', "detokenize": b'{"any":1}',
}  # fmt: skip
JUNK = [
    b"{}", b'{"ok":true}', b'{"status":"ok"}', b'{"error":null}', b'"ok"', b"ok", b"[]", b"<html>", b"  <html>",
    b"6\r\n<html>\r\n", b"", b"0\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n",
]  # fmt: skip


def sight(label, data, streams=False, whole=True, content_type=b"application/json"):
    """As a request takes it."""
    return Sight.ANSWER if begins(label, data, streams) else look(label, data, streams, content_type, whole)


@pytest.mark.parametrize("label", ANSWERS)
def test_an_answer_has_its_apis_shape(label):
    for framed in (ANSWERS[label], chunk(ANSWERS[label]), b" \n" + ANSWERS[label], b'{"error":{"message":"x"}}'):
        assert sight(label, framed) is Sight.ANSWER
    assert sight(label, b'{"choices":[]}') is Sight.ANSWER, "engines give one API's answers for another's"
    assert sight(label, b"\x00\x01{}", content_type=b"application/octet-stream") is Sight.ANSWER
    if label != "detokenize":  # whose answers have no name in common
        for junk in JUNK:
            assert sight(label, junk) is Sight.FOREIGN, junk


def test_an_object_whose_members_are_still_to_come_is_waited_for():
    for part in (b"", b"1f", b"1f\r\n", b"{", b'{"id":"1","mod', b'{"status":"ok"'):
        assert sight("chat", part, whole=False) is Sight.EARLY, part
    assert sight("chat", b'{"instructions":"' + b"x" * 2**18, whole=False) is Sight.ANSWER, "not for ever"
    assert sight("chat", b"ok", content_type=b"") is Sight.ANSWER
    assert sight("chat", b"<html>", content_type=b"") is Sight.FOREIGN


STREAM = b"text/event-stream"


def streamed(label, data, whole=False):
    return sight(label, data, True, whole, STREAM)


def padded(data):
    return b"%010x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("frame", [bytes, chunk, padded], ids=["plain", "chunked", "sizes with zeros"])
def test_a_stream_begins_with_something_of_the_answer(frame):
    def seen(*events, whole=False, label="chat"):
        return streamed(label, b"".join(map(frame, events)), whole)

    assert (
        seen(TOKEN)
        is seen(ROLE, TOKEN)
        is seen(PINGS[0], TOKEN)
        is seen(DIED)
        is seen(ROLE, DIED)
        is seen(b'data: {"choices":[', label="completions")
        is seen(b'data: {"choices":[{"delta":{"content":"')
        is Sight.ANSWER
    )
    assert {seen(ping) for ping in PINGS} | {
        seen(ROLE),
        seen(PINGS[0], ROLE),
        seen(b'data: {"ok":1}\n\n'),
        seen(b"da"),
        seen(DIED[:30]),
        seen(b'data: {"choices":['),
        seen(PINGS[0], b'data: {"choices":['),
        seen(ROLE, DIED[:30]),
    } == {Sight.EARLY}
    assert {seen(event[:1], event[1:]) for event in (DIED, TOKEN)} == {Sight.ANSWER}, "`d` is no size of a chunk"
    assert seen(ROLE, whole=True) is Sight.ANSWER, "whatever it means, it is all there is"
    for silent in ([ping] for ping in PINGS):
        assert seen(*silent, whole=True) is seen(*silent, DONE, whole=True) is Sight.SILENT
    assert seen(whole=True) is seen(DONE) is seen(b"data:[DONE]\n\n") is Sight.SILENT
    assert seen(b'data: {"ok":1}\n\n', whole=True) is Sight.FOREIGN
    assert {seen(first) for first in (b"<html>\n\n", b"error: what\n\n", b"deadbeef!\n\n")} == {Sight.FOREIGN}
    assert seen(PINGS[0] * 50_000) is Sight.BLIND, "not for ever"
    assert all(map(keeps_alive, map(frame, PINGS))) and not keeps_alive(frame(ROLE))


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("frame", [bytes, chunk])
def test_an_announcement_is_told_from_keep_alives_wherever_the_reads_end(frame, line_end):
    announced, *pings = (frame(event.replace(b"\n", line_end)) for event in (ROLE, *PINGS))
    for kept in (b"".join(pings), *pings):
        assert not any(has_other_event(kept[:cut]) for cut in range(len(kept) + 1))
        written = kept + announced + pings[0]
        cuts = [cut for cut in range(len(written) + 1) if has_other_event(written[:cut])]
        assert cuts == [*range(cuts[0], len(written) + 1)], "once it is there, it stays"
        assert len(kept + announced) - 2 <= cuts[0] <= len(kept + announced)


FIRST_EVENTS = {
    "chat": [TOKEN, BOM + TOKEN, b"retry: 3000\n\n" + TOKEN, b"id: 7\n" + TOKEN, b"data\ndata\n\n" + TOKEN, PINGS[0] + ROLE],
    "responses": [b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"}}\n\n'],
    "messages": [b'retry\nevent: message_start\r\ndata: {"type":"message_start"}\r\n\r\n', PINGS[2]],
}  # fmt: skip
EACH_FIRST = [(label, event) for label, events in FIRST_EVENTS.items() for event in events]


@pytest.mark.parametrize(("label", "event"), EACH_FIRST)
def test_a_first_event_is_waited_for_wherever_it_is_cut(label, event):
    for cut in range(len(event)):
        one, other = event[:cut], event[cut:]
        assert streamed(label, one) in (Sight.EARLY, Sight.ANSWER), one
        framed = chunk(one) + chunk(other)  # and each read may end within the framing as well
        for end in range(len(framed) + 1) if cut % 7 < 2 else (len(chunk(one)),):
            found = streamed(label, framed[:end] if one else chunk(other)[:end])
            assert found in (Sight.EARLY, Sight.ANSWER), (framed, end)


@pytest.mark.parametrize("frame", [bytes, chunk], ids=["plain", "chunked"])
@pytest.mark.parametrize("first", [b"dates", b"data2:", b"eventually\n", b"<html", b"x", b"HTTP/1.1"])
def test_what_is_the_beginning_of_no_field_is_no_engines(first, frame):
    assert streamed("chat", frame(first)) is Sight.FOREIGN


@pytest.mark.parametrize("name", [b"data", b"event", b"retry", b"id", b"dat", b"data\n\n"])
def test_a_stream_that_ends_within_its_first_line_has_said_nothing(name):
    found = streamed("chat", name, True)
    assert found is (Sight.FOREIGN if name == b"dat" else Sight.SILENT)


BLANK = [b"\n\n\n", b"\r\n\r\n", b"data:\n\n", b"data: \n\n", b"data:\r\n\r\n"]


@pytest.mark.parametrize("frame", [bytes, chunk], ids=["plain", "chunked"])
@pytest.mark.parametrize("blank", BLANK)
def test_blank_lines_and_empty_events_say_nothing(blank, frame):
    def seen(*events, whole=False):
        return streamed("chat", b"".join(map(frame, events)), whole)

    end = b"" if frame is bytes else b"0\r\n\r\n"
    assert seen(blank) is seen(blank, blank) is Sight.EARLY
    assert seen(blank * 2**17) is Sight.BLIND, "not for ever"
    for silent in ([blank] * 3, [blank, DONE], [PINGS[0], blank, DONE], [blank, PINGS[0]]):
        assert seen(*silent, whole=True) is Sight.SILENT
        assert look("chat", b"".join(map(frame, silent)) + end, True, STREAM, True) is Sight.SILENT
    assert seen(blank, TOKEN) is seen(blank, DIED) is Sight.ANSWER
    assert seen(blank, b'data: {"ok":1}\n\n', whole=True) is Sight.FOREIGN
    assert seen(blank, b"<html>\n\n") is (Sight.EARLY if b"data" in blank else Sight.FOREIGN)


@pytest.mark.parametrize("frame", [bytes, chunk], ids=["plain", "chunked"])
def test_a_stream_may_begin_with_a_byte_order_mark(frame):
    for begun in (frame(BOM), BOM if frame is bytes else b"fff\r\n" + BOM):
        for event in (ROLE, *PINGS):
            assert streamed("chat", begun + event) is Sight.EARLY
        assert streamed("chat", begun + ROLE, True) is Sight.ANSWER
        assert streamed("chat", begun + DONE, True) is Sight.SILENT
        for path, event, status in ERRORS:
            assert error_status(begun + event, True) == status, path
    assert streamed("chat", frame(BOM + b"<html>")) is Sight.FOREIGN
    assert read("chat", BOM + ROLE[:-2]).kind is not Kind.STRANGE


def test_a_blank_event_leaves_a_stream_one_that_can_be_resumed():
    assert {read("chat", raw).kind for raw in (b"", b"\n", b"data:", b"data: ")} == {Kind.BESIDE}


@pytest.mark.parametrize("label", ["chat", "completions", "responses", "messages"])
def test_a_message_with_a_role_and_a_text_is_a_first_token(label):
    for delta in (
        b'{"role":"assistant","content":"x"}',
        b'{"content":"\\"role\\""}',
        b'{"role":"assistant","content":"","reasoning":"x"}',
        b'{"role":"assistant","tool_calls":[{"id":"1"}]}',
    ):
        assert streamed(label, b'data: {"choices":[{"delta":%b}]}\n\n' % delta) is Sight.ANSWER


def test_what_comes_before_the_first_token_of_a_response():
    created = b'event: response.created\ndata: {"response":{"instructions":"\\nevent: response.output_text.delta"}}\n\n'
    progress = b"event: response.in_progress\ndata: {}\n\n"
    item = b'event: response.output_item.added\ndata: {"type":"response.output_item.added"}\n\n'
    started = b'event: message_start\ndata: {"type":"message_start"}\n\n'
    long = created.replace(b'"}}', b"x" * 100_000 + b'"}}')
    for early in (created, created + progress, chunk(created) + chunk(progress), created[:50], long):
        assert streamed("responses", early) is Sight.EARLY
    assert streamed("responses", created + progress + item) is Sight.ANSWER
    assert streamed("messages", started) is streamed("messages", started + PINGS[2]) is Sight.EARLY
    block = b'event: content_block_start\ndata: {"type":"content_block_start"}\n\n'
    assert streamed("messages", started + block) is Sight.ANSWER


def test_text_about_errors_is_none():
    said = json.dumps({"choices": [{"delta": {"content": '"error": {"code": 500}'}}], "error": None}).encode()
    assert error_status(b"data: " + said + b"\n\n", True) == 0
    called = {"output": [{"type": "mcp_call", "error": "no such tool"}]}
    item = json.dumps({"type": "response.completed", "response": called}).encode()
    assert error_status(b"data: " + item + b"\n\n", True) == 0


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize(
    ("label", "last"),
    [
        ("chat", b"data: [DONE]\n\n"),
        ("messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
        ("responses", b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n'),
    ],
)
def test_a_stream_has_its_end_wherever_its_last_event_is_cut_into_chunks(label, last, line_end):
    tail, last = (event.replace(b"\n", line_end) for event in (TOKEN, last))
    for cut in range(1, len(last)):
        assert has_end(label, chunk(tail) + chunk(last[:cut]) + chunk(last[cut:]), True, b"", False), cut
        assert not last[cut:].strip() or not has_end(label, chunk(tail) + chunk(last[:cut]), True, b"", False), cut


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("frame", [bytes, chunk])
@pytest.mark.parametrize(
    ("label", "last"),
    [("chat", b"data: [DONE]\n\n"), ("messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n')],
)
def test_a_comment_behind_the_last_event_of_a_stream_does_not_hide_it(label, last, frame, line_end):
    token, last, comment = (one.replace(b"\n", line_end) for one in (TOKEN, last, b": keep-alive\n\n"))
    for behind in (comment, comment * 2, comment.rstrip()):
        assert has_end(label, frame(token) + frame(last) + frame(behind), True, b"", False)
        assert not has_end(label, frame(token) + frame(behind), True, b"", False)
        assert not has_end(label, frame(last) + frame(comment) + frame(token) + frame(behind), True, b"", False)


@pytest.mark.parametrize("body", [b"null", b'"ok"', b"true", b" 12\n", b'{"a":[]}\r\n', b"[1]"])
def test_json_ends_with_a_bracket_if_it_begins_with_one(body):
    assert has_end("", body, False, b"application/json", True)
    assert has_end("", body, False, b"application/json", False) is body.strip().endswith((b"}", b"]")), "nobody knows"


@pytest.mark.parametrize("body", [b"", b" \n", b"{", b'{"a":[],"b":"x', b"[1,"])
def test_json_that_is_cut_or_empty_has_no_end(body):
    assert not has_end("", body, False, b"application/json", True)
    assert has_end("", body, False, b"text/plain", True)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize(
    ("label", "last"),
    [
        ("responses", b'data: {"type":"response.completed","response":{"output":[]}}'),
        ("responses", b'x","usage":{"input_tokens":1}}}'),
        ("messages", b'data: {"type":"message_stop"}'),
        ("chat", b'data: {"error":{"message":"no","code":500}}'),
    ],
)
def test_the_last_event_of_a_stream_is_followed_by_a_blank_line(label, last, line_end):
    event = last + line_end * 2
    assert has_end(label, event, True, STREAM, False)
    for cut in range(len(event)):
        assert not has_end(label, event[:cut], True, STREAM, False), event[:cut]


TOOLS = b'"tools":[{"type":"function","name":"bill","parameters":{"properties":{"usage": {"type":"object"}}}}]'
CREATED = (
    b'event: response.created\ndata: {"response":{"id":"r",%b,"usage":null},"type":"response.created"}\n\n' % TOOLS
)
WRITTEN = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n'


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("frame", [bytes, chunk])
def test_what_a_client_named_its_tools_properties_does_not_end_its_response(frame, line_end):
    completed = CREATED.replace(b"created", b"completed")
    created, written, last = (frame(one.replace(b"\n", line_end)) for one in (CREATED, WRITTEN, completed))
    assert not has_end("responses", created, True, STREAM, True)
    for cut in range(len(created)):
        assert not has_end("responses", created[cut:] + written, True, STREAM, False)
        assert has_end("responses", created[cut:] + written + last, True, STREAM, False)


def test_done_is_the_end_of_a_stream_where_it_is_a_line_and_the_last_one():
    for end in (b"", b"\n", b"\n\n", b"\r\n\r\n"):
        assert has_end("chat", DONE.rstrip() + end, True, STREAM, True)
        assert has_end("chat", TOKEN + DONE.rstrip() + end, True, STREAM, False)
    written = b'data: {"choices":[{"delta":{"content":"write data: [DONE]"}}]}\n\n'
    for cut in range(len(written) + 1):
        assert not has_end("chat", written[:cut], True, STREAM, True), written[:cut]

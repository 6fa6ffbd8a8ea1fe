"""What the wire answers by itself: to HEAD without a body, and with the request's own id wherever it was read."""

import pytest

from gateway.http.messages import Limits

from .serving import served
from .talk import eventually

ID = b"X-Request-Id: mine-1\r\n"
BROKEN = b"a: b\r\nno header\r\n\r\n"  # the parser tells of a header once the next one begins
LIMITS = Limits(body_bytes=10, header_count=4, head_bytes=200, head_seconds=0.1, body_gap_seconds=0.1)
# Status, and what leads to it behind a request line, Host and an id
REFUSED = {
    "malformed": (400, BROKEN),
    "framing named as hop-by-hop": (400, b"Connection: content-length\r\n\r\n"),
    "too large by its length": (413, b"Content-Length: 11\r\n\r\n"),
    "too large as it comes": (413, b"Transfer-Encoding: chunked\r\n\r\nb\r\n12345678901\r\n"),
    "unknown coding": (501, b"Transfer-Encoding: gzip\r\n\r\n"),
    "unknown expectation": (417, b"Expect: a-miracle\r\n\r\n"),
    "too many headers": (431, b"a: b\r\n" * 4 + b"\r\n"),
    "head too large": (431, b"a: %b\r\n\r\n" % (b"b" * 200)),
    "head that stops coming": (408, b"a: b\r\n"),
    "body that stops coming": (408, b"Content-Length: 10\r\n\r\nabc"),
    "no room": (503, b"Content-Length: 10\r\n\r\n"),
}


def parse(raw: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    head, _, body = raw.partition(b"\r\n\r\n")
    line, *rest = head.split(b"\r\n")
    return int(line.split()[1]), dict(one.split(b": ", 1) for one in rest), body


@pytest.mark.parametrize("id", [ID, b"X-Request-Id:\r\n", b""], ids=["id", "empty id", "no id"])
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("method", [b"HEAD", b"POST"])
async def test_a_refusal_echoes_the_id_and_has_a_body_unless_it_answers_head(case, method, id):
    expected, rest = REFUSED[case]
    async with served(Limits(requests_bytes=5) if case == "no room" else LIMITS) as (talk, _, _):
        await talk.say(b"%b /a HTTP/1.1\r\nHost: x\r\n%b%b" % (method, id or b"b: c\r\n", rest))
        status, headers, body = parse(await talk.rest())
        assert status == expected and headers.get(b"x-request-id") == (b"mine-1" if id == ID else None)
        assert int(headers[b"content-length"]) > 0
        assert len(body) == (0 if method == b"HEAD" else int(headers[b"content-length"]))


async def test_a_fault_of_ours_is_told_of_the_request_that_met_it_and_not_of_one_behind_it():
    async with served() as (talk, echo, _):
        await talk.say(b"HEAD /slow HTTP/1.1\r\nHost: x\r\n%b\r\n" % ID)
        await talk.say(b"POST /a HTTP/1.1\r\nHost: x\r\nX-Request-Id: another\r\nContent-Length: 9\r\n\r\n")
        await eventually(lambda: echo.held and echo.held[0].head_done)
        (client,) = echo.held
        client.failed(echo, ZeroDivisionError("a bug"))
        status, headers, body = parse(await talk.rest())
        assert status == 500 and headers[b"x-request-id"] == b"mine-1" and body == b""


@pytest.mark.parametrize("before", [b"GET", b"HEAD"])
async def test_what_is_no_request_is_answered_with_a_body_whatever_came_before(before):
    async with served() as (talk, _, _):
        await talk.say(b"%b /a HTTP/1.1\r\nHost: x\r\n%b\r\n" % (before, ID))
        await talk.until(b"\r\n\r\n" if before == b"HEAD" else b"GET /a ")
        await talk.say(b"nonsense\r\n\r\n")
        status, headers, body = parse(await talk.rest())
        assert status == 400 and b"x-request-id" not in headers
        assert len(body) == int(headers[b"content-length"]) > 0


async def test_a_refusal_that_waits_for_its_turn_is_that_of_its_own_request():
    async with served(LIMITS) as (talk, echo, _):
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\nX-Request-Id: first\r\n\r\n")
        await talk.say(b"HEAD /a HTTP/1.1\r\nHost: x\r\n%bContent-Length: 11\r\n\r\n" % ID)
        await eventually(lambda: echo.held and echo.held[0].waiting)
        echo.release()
        assert (await talk.response())[2] == b"slow"
        status, headers, body = parse(await talk.rest())
        assert status == 413 and headers[b"x-request-id"] == b"mine-1" and body == b""

"""A head that comes again is not parsed again, and nobody can tell."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.http.downstream import Downstream
from gateway.http.messages import KnownHead, Limits, Request

from .serving import cut, told


def seen(reads):
    """Return all that the handler sees of these requests, and all that the client gets."""
    requests, transport = told(reads)
    fields = ("method", "target", "path", "headers", "body", "http10", "keep_alive")
    return [[getattr(one, field) for field in fields] for one in requests], transport.written


HEADS = (
    b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %s\r\n\r\n",
    b"POST /a?b HTTP/1.1\r\nhost: x\r\ncontent-length: %s\r\nx-request-id: one\r\n\r\n",
    b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: %s\r\nx-request-id: two\r\n\r\n",
    b"\r\nPOST /a HTTP/1.1\r\nhost: x\r\ncontent-length:  %s\r\n\r\n",
    b"POST /a HTTP/1.1\r\nhost: x\r\nx: y\r\ncontent-length: %s\r\nexpect: 100-continue\r\n\r\n",
    b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: %s\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    b"POST /a HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: %s\r\n\r\n",
    b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nx-length: %s\r\n\r\n",
    b"GET /a HTTP/1.1\r\nhost: x\r\nx-length: %s\r\n\r\n",
)
BODIES = (b"", b"x", b"0\r\n\r\n", b"12345678901", b"\r\ncontent-length: 4\r\n\r\nbody", b"POST / HTTP/1.1\r\n\r\n")
LENGTHS = st.sampled_from(
    (b"%d", b"%d", b"%d", b"%d", b"0%d", b"+%d", b"%d ", b"1%d", b"-%d", b"%d\r\ncontent-length: %%d")
)


@st.composite
def reads(draw):
    """Requests of a few heads, mostly one a read; some lie about their length, some come in two reads or two in one."""
    data = []
    for head in draw(st.lists(st.sampled_from(HEADS[: draw(st.integers(1, len(HEADS)))]), min_size=1, max_size=8)):
        body = draw(st.sampled_from(BODIES))
        data.append(head % (draw(LENGTHS) % len(body)) + (body if b"chunked" not in head else b"0\r\n\r\n"))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data) - 1))
        cut = draw(st.integers(0, len(data[at])))
        one = data.pop(at)
        data[at:at] = [one[:cut], one[cut:]] if at + 1 >= len(data) or draw(st.booleans()) else [one + data.pop(at)]
    return [one for one in data if one]


@given(reads())
def test_requests_are_those_that_the_parser_reads(data):
    # In reads of 7 bytes nothing is ever known.
    assert seen(data) == seen(cut(b"".join(data), 7))


def test_a_known_head_is_not_parsed(monkeypatch):
    fed = []
    whole = Downstream._feed
    monkeypatch.setattr(Downstream, "_feed", lambda self, data: (fed.append(data), whole(self, data)))
    head = HEADS[1]
    requests, _ = told(
        [head % b"1" + b"a", head % b"12" + b"b" * 12, head % b"0", HEADS[2] % b"1" + b"c", head % b"1" + b"d"]
    )
    assert [one.body for one in requests] == [b"a", b"b" * 12, b"", b"c", b"d"]
    assert fed == [head % b"1" + b"a", HEADS[2] % b"1" + b"c", head % b"1" + b"d"]


def test_a_body_over_the_limit_is_refused_behind_a_known_head_too():
    head = HEADS[0]
    requests, transport = told([head % b"5" + b"small", head % b"6" + b"larger"], Limits(body_bytes=5))
    assert len(requests) == 1 and b"HTTP/1.1 413" in transport.written


def forwarded(request):
    return request.forwarded(b"", frozenset(), 1)


def test_what_one_request_changes_of_its_headers_is_not_in_the_next():
    data = HEADS[1] % b"1" + b"a"
    first = Request(
        "POST", b"/a?b", [(b"host", b"x"), (b"content-length", b"1"), (b"x-request-id", b"one")], b"a", False, True
    )
    known = KnownHead.of(data, first)
    changed, next_ = known.read(data), known.read(data)
    assert forwarded(changed) == forwarded(first)
    changed.set_headers([(b"traceparent", b"00-1")])
    assert (
        forwarded(changed) == b"POST /a?b HTTP/1.1\r\ntraceparent: 00-1\r\ncontent-length: 1\r\n\r\n"
        and changed.header(b"x-request-id") is None
    )
    assert next_.header(b"x-request-id") == "one" and forwarded(next_) == forwarded(first)
    assert next_.body == b"a"

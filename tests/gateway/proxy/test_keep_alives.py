"""Comments and pings before the first token: the client gets them as they come, and they are no answer."""

import asyncio
import json

import pytest

from gateway.http import chunks
from gateway.proxy.failures import deadlines
from gateway.proxy.responses import answers as looked_at
from gateway.proxy.responses import judge
from gateway.proxy.responses.answers import keep_alives_end
from replicas import State

from ..http.talk import eventually, read_request
from .engine_events import DIED, DONE, PINGS, ROLE, TOKEN
from .replies import EVENT, SSE_HEAD, answers, chunk, post, reply, says, streams
from .stack import stack
from .test_error_answers import body_for

EVENTS = {
    b"/v1/chat/completions": [ROLE, EVENT, DONE],
    b"/v1/messages": [
        b'event: message_start\ndata: {"type":"message_start"}\n\n',
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}\n\n',
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ],
    b"/v1/responses": [
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"}}\n\n',
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_1","output":[]}}\n\n',
    ],
}


async def until(s, talk, mark: bytes) -> bytes:
    """What the client gets to this mark, while the sweep sees that it has waited two seconds."""
    told = asyncio.ensure_future(talk.until(mark))

    def swept() -> bool:
        s.proxy.sweep(max((x.attempt.sent_at for x in s.proxy.exchanges if x.attempt is not None), default=0) + 2)
        return told.done()

    await eventually(swept)
    return await told


def prefilling(s) -> int:
    return s.proxy.router.ledger.total().prefilling


@pytest.mark.parametrize("keep_alives", [PINGS[:1], PINGS[1:], [PINGS[0] + b"\n\n" + PINGS[2], b": \r\n\r\n"]])
@pytest.mark.parametrize("frame", [chunk, bytes], ids=["chunked", "until its connection ends"])
@pytest.mark.parametrize("path", EVENTS)
async def test_they_reach_a_client_as_they_come_and_are_no_first_token(path, frame, keep_alives):
    answer = b"".join(map(frame, EVENTS[path]))
    head = SSE_HEAD if frame is chunk else SSE_HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"")
    go_on = asyncio.Semaphore(0)

    async def script(reader, writer):
        await read_request(reader)
        writer.write(head)
        for ping in keep_alives:
            writer.write(frame(ping)[: len(frame(ping)) // 2])  # what is cut within a comment waits for its end
            await go_on.acquire()
            writer.write(frame(ping)[len(frame(ping)) // 2 :])
            await go_on.acquire()
        writer.write(answer + (b"0\r\n\r\n" if frame is chunk else b""))

    async with stack(script, slo_figures=True) as s:
        (backend,) = s.proxy.backends.values()
        s.proxy.changed()
        talk = await s.say(post(body_for(path), path))
        for number, ping in enumerate(keep_alives):
            go_on.release()
            if not number:
                told = await until(s, talk, b"\r\n\r\n")
                assert b"text/event-stream" in told and b"x-hitherto-replica" in told
            assert (await until(s, talk, ping)).endswith(ping)
            (exchange,) = s.proxy.exchanges
            assert exchange.unanswered and prefilling(s) == 1 and s.metrics.ttft_seconds.count(()) == 0
            go_on.release()
        assert answer in await talk.until(answer)
        await eventually(lambda: s.metrics.requests.total(status="2xx") == 1)
        assert s.faults == []
        assert s.metrics.ttft_seconds.count(()) == s.metrics.replica_ttft_seconds.count(backend.id) == 1
        for figure in (s.metrics.answer_ttft_seconds, s.metrics.answer_e2e_seconds):
            assert [figure.count(key) for key in figure.values] == [1]


@pytest.mark.parametrize("other", [
    None, answers(b"{}", b"400 Bad Request"), answers(b"{}", b"503 Full"), streams(chunk(DIED), end=b"0\r\n\r\n"),
    says(SSE_HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"") + TOKEN),
    says(SSE_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")),
], ids=["alone", "refuses", "full", "fails", "framed otherwise", "compressed"])  # fmt: skip
@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("path", EVENTS)
async def test_a_failure_behind_them_is_told_in_the_stream(path, dies, other):
    """And the client's connection is good for its next request."""
    has_ping = asyncio.Event()

    end = None if dies else chunk(DIED) + b"0\r\n\r\n"
    script = streams(chunk(PINGS[0]), end=end, pause=has_ping.wait)
    async with stack(script, *([] if other is None else [other])) as s:
        for backend in [*s.proxy.backends.values()][1:]:
            backend.replica.state = State.DEGRADED  # so that it is the second one
        s.proxy.changed()
        talk = await s.say(post(body_for(path), path))
        assert b"200 OK" in await until(s, talk, b"\r\n\r\n")
        assert PINGS[0] in await talk.until(PINGS[0])
        has_ping.set()
        body = await talk.until(b"\r\n0\r\n\r\n")
        assert b'"error"' in body and b"HTTP/1.1" not in body and DONE not in body
        await eventually(s.idle)
        assert s.metrics.requests.total() == 1 and not s.metrics.requests.total(status="2xx")
        assert (await talk.ask(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200


async def test_another_replica_answers_behind_them():
    has_ping = asyncio.Event()

    script = streams(chunk(PINGS[0]), end=None, pause=has_ping.wait)
    async with stack(script, streams(chunk(PINGS[1]), chunk(ROLE), chunk(TOKEN))) as s:
        s.becomes([*s.proxy.backends.values()][1].replica, State.DEGRADED)
        talk = await s.say(post(body_for(b"/v1/chat/completions")))
        await until(s, talk, PINGS[0])
        has_ping.set()
        rest = await talk.until(b"\r\n0\r\n\r\n")
        assert rest == b"\r\n" + b"".join(map(chunk, (PINGS[1], ROLE, TOKEN, DONE))) + b"0\r\n\r\n"
        await eventually(lambda: s.metrics.requests.total(status="2xx") == 1)


@pytest.mark.parametrize("stops", [False, True], ids=["it waits too long", "the gateway stops"])
async def test_a_client_that_has_only_comments_is_told_in_the_stream(stops):
    async with stack(says(SSE_HEAD + chunk(PINGS[0])), request_timeout=60.0) as s:
        talk = await s.say(post(body_for(b"/v1/chat/completions")))
        await until(s, talk, PINGS[0])
        (exchange,) = s.proxy.exchanges
        if stops:
            s.proxy.drain()
            assert s.proxy.refuse_unanswered() == 1
        else:
            exchange.begun -= 59
            s.proxy.sweep(exchange.attempt.seen_at + 59)
            assert exchange.unanswered, "it said that it is alive"
            s.proxy.sweep(exchange.attempt.seen_at + 61)
        told = b'"code":"shutting_down"' if stops else b"within 60 s"
        assert told in await talk.until(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/responses", b"/v1/chat/completions"])
async def test_behind_an_announcement_they_come_soon_and_the_first_token_is_seen_when_it_comes(path):
    """Another replica would announce another answer, so the client is not to have it at once."""
    announcement, *rest = EVENTS[path]
    ping = PINGS[0] if path.startswith(b"/v1/chat") else PINGS[2]
    go_on = asyncio.Semaphore(0)
    script = streams(*map(chunk, (announcement + ping, *rest)), end=b"0\r\n\r\n", pause=go_on.acquire)
    async with stack(script, slo_figures=True, request_timeout=600.0, idle_timeout=600.0) as s:
        s.proxy.changed()
        (backend,) = s.proxy.backends.values()
        talk = await s.say(post(body_for(path), path))
        exchange = await s.exchange(lambda attempt: attempt.withheld)
        attempt = exchange.attempt
        s.proxy.sweep(attempt.sent_at + 4)
        assert exchange.unanswered
        s.proxy.sweep(attempt.sent_at + 6)
        assert announcement in await talk.until(ping)
        s.proxy.sweep(attempt.sent_at + 7)
        assert prefilling(s) == 1 and not attempt.first_at
        go_on.release()
        await talk.until(rest[0])
        s.proxy.sweep(attempt.sent_at + 8)
        assert prefilling(s) == 0 and s.metrics.ttft_seconds.count(()) == 1
        for _ in rest:
            go_on.release()
        await eventually(lambda: s.metrics.requests.total(status="2xx") == 1)
        assert backend.candidate.costs.count == 0, "when it came is known to a quarter of a second"
        assert [s.metrics.answer_e2e_seconds.count(key) for key in s.metrics.answer_e2e_seconds.values] == [1]


async def test_a_stream_that_announced_itself_at_length_is_in_the_figures_though_no_sweep_saw_it():
    created = EVENTS[b"/v1/responses"][0].replace(b'"id"', b'"instructions":"%b","id"' % (b"x" * 2**18))
    _, token, last = EVENTS[b"/v1/responses"]
    async with stack(streams(*map(chunk, (created, *[token] * 9, last)), end=b"0\r\n\r\n")) as s:
        assert (await s.ask(post(body_for(b"/v1/responses"), b"/v1/responses")))[0] == 200
        await eventually(lambda: s.metrics.requests.total(status="2xx") == 1)
        assert s.metrics.ttft_seconds.count(()) == 1
        assert not s.metrics.replica_decode_tokens.values, "how long each took is not known"


@pytest.mark.parametrize("frame", [chunk, bytes])
def test_what_is_passed_on_ends_with_a_whole_event_and_a_whole_chunk(frame):
    whole = b"".join(map(frame, PINGS))
    ends = {len(b"".join(map(frame, PINGS[:count]))) for count in range(4)}
    for behind in (b"", frame(ROLE), frame(b'data: {"type":"message_start"}\n\n'), frame(b"event: message_start\n")):
        for cut in range(len(whole + behind) + 1):
            end = keep_alives_end((whole + behind)[:cut], frame is chunk)
            assert end in ends and end <= cut and (cut < len(whole) or end == len(whole))
    if frame is chunk:  # an event in two chunks, and what begins with one in the last of them
        assert keep_alives_end(chunk(b": pi") + chunk(b"ng\n\n"), True) == len(chunk(b": pi") + chunk(b"ng\n\n"))
        assert keep_alives_end(chunk(b":\n\n") + chunk(b": pi") + chunk(b"ng\n\ndata"), True) == len(chunk(b":\n\n"))


class Counted:
    """A pattern that counts the bytes it is let look at."""

    def __init__(self, pattern, counts):
        self._pattern, self._counts = pattern, counts

    def match(self, data, at=0):
        found = self._pattern.match(data, at)
        self._counts.append(found.end() - at if found else 0)
        return found

    def fullmatch(self, data, at, end):
        self._counts.append(end - at)
        return self._pattern.fullmatch(data, at, end)


@pytest.mark.parametrize("rest", [b"", chunk(ROLE)])
@pytest.mark.parametrize("part", [chunk(b":\n\n"), chunk(b":\n") + chunk(b"\n"), chunk(b": a") + chunk(b"b\n")])
def test_each_of_many_small_chunks_is_looked_at_once(monkeypatch, part, rest):
    """However many an engine wrote before the next sweep."""
    looked = []
    for name in ("CHUNK", "_KEEP_ALIVES"):
        monkeypatch.setattr(looked_at, name, Counted(getattr(looked_at, name), looked))
    data = part * 3000 + rest
    whole = len(data) - len(rest)
    assert keep_alives_end(data, True) == (whole if part != chunk(b": a") + chunk(b"b\n") else 0)
    assert sum(looked) <= len(data)


async def test_behind_another_status_than_200_they_are_held_back_with_the_error():
    """Which is told whole, in the client's own format."""
    go_on = asyncio.Event()

    script = says(SSE_HEAD.replace(b"200 OK", b"500 No") + chunk(PINGS[0]), go_on, chunk(DIED) + b"0\r\n\r\n")
    async with stack(script, request_timeout=60.0) as s:
        talk = await s.say(post(body_for(b"/v1/messages"), b"/v1/messages"))
        exchange = await s.exchange(lambda attempt: attempt.withheld)
        for seconds in (2, 6):
            s.proxy.sweep(exchange.attempt.sent_at + seconds)
            assert exchange.opened is None and exchange.unanswered
        go_on.set()
        assert (await talk.response())[0] == 500


async def test_a_comment_cut_in_two_does_not_make_an_answer_of_it():
    """The engine dies behind it: another one answers, and the client's connection is whole."""
    dies = asyncio.Event()

    script = says(SSE_HEAD + chunk(PINGS[0]) + chunk(PINGS[0])[:7], dies, then_hangs=False)
    async with stack(script, streams(chunk(ROLE), chunk(TOKEN)), request_timeout=60.0) as s:
        s.becomes([*s.proxy.backends.values()][1].replica, State.DEGRADED)
        talk = await s.say(post(body_for(b"/v1/chat/completions")))
        await until(s, talk, chunk(PINGS[0]))
        (exchange,) = s.proxy.exchanges
        await eventually(lambda: exchange.attempt.withheld)
        s.proxy.sweep(exchange.attempt.sent_at + 6)
        assert exchange.unanswered
        dies.set()
        rest = await talk.until(b"0\r\n\r\n")
        assert rest == b"".join(map(chunk, (ROLE, TOKEN, DONE))) + b"0\r\n\r\n"


@pytest.mark.parametrize("path", EVENTS)
@pytest.mark.parametrize("size", [1, 7])
async def test_an_announcement_in_tiny_chunks_is_looked_at_as_often_as_it_is_long(monkeypatch, path, size):
    """An engine that trickles has the gateway's other clients wait no longer than its bytes take."""
    announcement, token, _ = EVENTS[path]
    piece = b"".join(chunk(announcement[at : at + size]) for at in range(0, len(announcement), size))
    pieces = [piece] * (50_000 // len(piece))
    sent = b"".join(pieces)
    go_on = asyncio.Semaphore(0)

    read_in_chunks, read_for_errors = [], []
    monkeypatch.setattr(chunks, "CHUNK", Counted(chunks.CHUNK, read_in_chunks))
    monkeypatch.setattr(looked_at, "CHUNK", Counted(looked_at.CHUNK, read_in_chunks))

    def error_status(data, streams, found=looked_at.error_status):
        read_for_errors.append(len(data))
        return found(data, streams)

    monkeypatch.setattr(looked_at, "error_status", error_status)
    monkeypatch.setattr(deadlines, "KEEP_ALIVE_SECONDS", 600.0)  # on a busy machine all of this takes longer than 5 s
    script = streams(*pieces, end=chunk(token), pause=go_on.acquire)
    async with stack(script, request_timeout=600.0, idle_timeout=600.0) as s:
        talk = await s.say(post(body_for(path), path))
        for so_far in range(1, len(pieces) + 1):
            exchange = await s.exchange(lambda attempt, length=so_far * len(piece): len(attempt.withheld) == length)
            s.proxy.sweep(exchange.attempt.sent_at + 2)
            assert exchange.unanswered
            go_on.release()
        told = await talk.until(chunk(token))
        assert told.endswith(sent + chunk(token))
        assert sum(read_in_chunks) <= 2 * len(sent) and sum(read_for_errors) <= 3 * len(sent)
        await talk.close()


async def test_a_whole_answer_in_tiny_reads_is_not_looked_at_for_each(monkeypatch):
    """One that says nothing of an answer for long: each look takes as long as all that is held back."""
    looks = []

    def look(label, data, *rest, found=judge.look):
        looks.append(len(data))
        return found(label, data, *rest)

    monkeypatch.setattr(judge, "look", look)
    go_on = asyncio.Semaphore(0)
    beginning, end = b'{"a":"' + b"x" * 20_000, b'","choices":[{"message":{"role":"assistant","content":"hi"}}]}'

    async def script(reader, writer):
        await read_request(reader)
        whole = reply(beginning + b"x" * 2000 + end)
        writer.write(whole[: -2000 - len(end)])
        for at in range(-2000 - len(end), -len(end), 10):
            await go_on.acquire()
            writer.write(whole[at : at + 10])
        await go_on.acquire()
        writer.write(end)

    async with stack(script) as s:
        talk = await s.say(post({**json.loads(body_for(b"/v1/chat/completions")), "stream": False}))
        for so_far in range(201):
            length = len(beginning) + 10 * so_far
            await s.exchange(lambda attempt, length=length: len(attempt.withheld) == length)
            go_on.release()
        status, _, body = await talk.response()
        assert status == 200 and body == beginning + b"x" * 2000 + end
        assert len(looks) < 10


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/completions"])
async def test_an_error_behind_comments_that_were_passed_on_is_found(path):
    """Even in one read with the first token."""
    go_on = asyncio.Event()

    end = chunk(EVENT) + chunk(DIED) + b"0\r\n\r\n"
    script = streams(chunk(PINGS[0]), end=end, pause=go_on.wait)
    async with stack(script) as s:
        talk = await s.say(post(body_for(path), path))
        await until(s, talk, chunk(PINGS[0]))
        (exchange,) = s.proxy.exchanges
        attempt = exchange.attempt
        go_on.set()
        await talk.until(b"0\r\n\r\n")
        assert attempt.fault == 500

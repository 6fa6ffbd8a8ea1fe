"""What befalls requests, played without sockets: retries, legs, resumed streams, deadlines, clients that leave."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tenants.ending import cost
from replicas import State

from .legs import KEEPS_NOTHING, MOONCAKE, NIXL, WAYS, Way, leg_of
from .play import PIPELINE, Play, Wire, played
from .replies import ANSWER, ENDS, EVENT, SSE_HEAD, chunk, post, reply
from .resume.test_resumer import event

STREAMED = post({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]})


@played
async def test_a_request_goes_from_a_replica_that_fails_to_another_and_its_client_sees_one_answer():
    play = Play(2)
    client = await play.asks(post())
    first = play.replica(0).accept()
    await play.answers(first, reply(b"{}", b"500 Internal Server Error"))
    second = play.replica(1).accept()
    await play.answers(second, reply())
    assert client.sent.count(b"HTTP/1.1 ") == 1 and client.sent.endswith(ANSWER)
    assert not play.left()


@played
async def test_who_refuses_a_connection_is_passed_over_and_the_last_one_named():
    play = Play(2)
    client = await play.asks(post())
    play.replica(0).refuse()
    await play.turn()
    play.replica(1).refuse()
    await play.turn()
    assert client.sent.startswith(b"HTTP/1.1 503 ") and b"no connection" in client.sent
    assert not play.left()


@played
async def test_time_that_passes_ends_what_waits_for_it():
    play = Play(1, request_timeout=60.0)
    client = await play.asks(post())
    wire = play.replica(0).accept()
    await play.pass_time(59.0)
    assert not client.sent and wire.ended is None
    await play.pass_time(2.0)
    assert client.sent.startswith(b"HTTP/1.1 504 ") and wire.ended == "aborted"
    assert not play.left()


@played
async def test_a_client_that_leaves_takes_its_request_from_the_replica():
    play = Play(1)
    for reads in ((), (SSE_HEAD,), (SSE_HEAD, chunk(EVENT))):
        client = await play.asks(STREAMED)
        wire = play.replica(0).accept()
        await play.answers(wire, *reads)
        client.leave()
        await play.turn()
        assert wire.ended == "aborted" and not play.left()


@played
async def test_a_stream_that_breaks_off_never_looks_complete():
    play = Play(2)
    client = await play.asks(STREAMED)
    await play.answers(play.replica(0).accept(), SSE_HEAD, chunk(EVENT))
    play.replica(0).busy[0].leave(ConnectionResetError())
    await play.turn()
    assert client.sent.count(b"data: ") == 2 and b'"error"' in client.sent and b"[DONE]" not in client.sent
    assert not play.left()


@played
async def test_a_connection_is_used_again():
    play = Play(1)
    wire = None
    for _ in range(3):
        client = await play.asks(STREAMED)
        wire = wire or play.replica(0).accept()
        await play.answers(wire, SSE_HEAD, chunk(EVENT), ENDS)
        assert re.search(rb"\r\n\r\n" + re.escape(chunk(EVENT) + ENDS) + rb"\Z", client.sent)
    assert len(play.replica(0).wires) == 1 and not play.left()


@played
async def test_a_stream_that_breaks_off_is_written_on_by_another_replica():
    play = Fate(None, continues=True).play
    client = await play.asks(post(greedy(True), extra=b"x-request-id: q0\r\n"))
    first = play.replica(0).accept()
    Answer(first, None).go_on(4)
    first.leave(ConnectionResetError())
    await play.turn()
    Answer(play.replica(1).accept(), None).go_on(9)
    await play.turn()
    assert re.findall(rb"q0\.(\d)", client.sent) == [b"%d" % number for number in range(WORDS)]
    assert client.sent.endswith(ENDS) and not play.left()


@played
async def test_the_decoder_is_asked_once_the_prompt_is_computed():
    play = Fate(NIXL, continues=False).play
    client = await play.asks(post(greedy(True), extra=b"x-request-id: q0\r\n"))
    prefiller = next(backend.pool for backend in play.backends[:2] if backend.pool.asked)
    assert not any(backend.pool.asked for backend in play.backends[2:])
    Answer(prefiller.accept(), NIXL).go_on(1)
    await play.turn()
    decoder = next(backend.pool for backend in play.backends[2:] if backend.pool.asked)
    Answer(decoder.accept(), NIXL).go_on(9)
    await play.turn()
    assert client.sent.endswith(ENDS) and not play.left()


async def both_legs_at_once():
    """A request in two legs: its play and client, the prefiller, which has not taken the connection yet, and what the
    decoder has to answer."""
    play = Fate(MOONCAKE, continues=False).play
    client = await play.asks(post(greedy(True), extra=b"x-request-id: q0\r\n"))
    prefiller = next(backend.pool for backend in play.backends[:2] if backend.pool.asked)
    decoder = next(backend.pool for backend in play.backends[2:] if backend.pool.asked)
    return play, client, prefiller, Answer(decoder.accept(), MOONCAKE)


@played
async def test_a_first_leg_whose_connection_opens_after_the_answer_has_begun_is_not_sent():
    """Its body is freed by then with the client's."""
    play, client, prefiller, answer = await both_legs_at_once()
    answer.go_on(3)
    late = prefiller.accept()
    answer.go_on(9)
    await play.turn()
    assert client.sent.endswith(ENDS) and late.sent == b"" and late.ended is None
    assert not play.left()


@played
async def test_nor_is_it_sent_after_comments_that_were_relayed_before_the_answer_began():
    play, client, prefiller, answer = await both_legs_at_once()
    answer.go_on(2)
    await play.answers(answer.wire, chunk(b": ping\n\n"))
    await play.pass_time(6.0)
    assert b": ping" in client.sent
    late = prefiller.accept()
    answer.go_on(9)
    await play.turn()
    assert client.sent.endswith(ENDS) and late.sent == b"" and not play.left()


@played
async def test_nor_when_that_answer_came_in_one_read():
    play, client, prefiller, answer = await both_legs_at_once()
    answer.wire.says(b"".join(answer.reads))
    await play.turn()
    assert client.sent.endswith(ENDS) and not play.left()
    late = prefiller.accept()
    await play.turn()
    assert late.sent == b"" and not play.left()


@played
async def test_a_leg_whose_stream_lacked_its_end_alone_is_counted_once():
    play = Fate(NIXL, continues=True).play
    client = await play.asks(post(greedy(True), extra=b"x-request-id: q0\r\n"))
    Answer(next(backend.pool for backend in play.backends[:2] if backend.pool.asked).accept(), NIXL).go_on(1)
    await play.turn()
    decoder = next(backend.pool for backend in play.backends[2:] if backend.pool.asked).accept()
    Answer(decoder, NIXL).go_on(8)
    decoder.leave(ConnectionResetError())
    await play.turn()
    assert client.sent.endswith(ENDS) and not play.left()
    assert play.proxy.metrics.legs.total(leg="decode") == 1


@played
async def test_half_a_field_is_no_event():
    play = Fate(None, continues=True).play
    client = await play.asks(post(greedy(True), extra=b"x-request-id: q0\r\n"))
    first = play.replica(0).accept()
    Answer(first, None).go_on(4)
    await play.answers(first, chunk(b"data:") + b"0\r\n\r\n")
    Answer(play.replica(1).accept(), None).go_on(9)
    await play.turn()
    assert b"data:\n\n" not in client.sent and client.sent.endswith(ENDS)


@played
async def test_what_is_sent_nowhere_again_is_no_retry():
    play = Play(1)
    client = await play.asks(post())
    play.replica(0).refuse()
    await play.turn()
    assert client.sent.startswith(b"HTTP/1.1 503 ")
    assert not play.proxy.metrics.retries.total()


@played
async def test_a_replica_has_its_time_after_one_that_sent_comments():
    play = Play(2, request_timeout=60.0)
    client = await play.asks(STREAMED)
    first = play.replica(0).accept()
    await play.answers(first, SSE_HEAD)
    for _ in range(7):
        await play.pass_time(10.0)
        await play.answers(first, chunk(b": ping\n\n"))
        await play.pass_time(0.3)
    assert client.sent.count(b": ping") == 7
    first.leave(ConnectionResetError())
    await play.turn()
    second = play.replica(1).accept()
    await play.pass_time(50.0)
    await play.answers(second, SSE_HEAD, chunk(EVENT), ENDS)
    assert client.sent.endswith(ENDS) and not play.left()


@played
async def test_who_was_asked_late_is_not_blamed_for_the_time_before():
    play = Play(2, request_timeout=60.0)
    client = await play.asks(post())
    first = play.replica(0).accept()
    await play.pass_time(59.5)
    first.leave(ConnectionResetError())
    await play.turn()
    second = play.replica(1).accept()
    await play.pass_time(1.0)
    assert client.sent.startswith(b"HTTP/1.1 504 ") and b"no replica sent a byte" in client.sent
    assert second.ended == "aborted" and not play.proxy.metrics.upstream_errors.total(replica=play.backends[1].id)


@played
async def test_a_client_that_has_stopped_reading_stops_the_next_replica_too():
    play = Play(2)
    client = await play.asks(STREAMED)
    first = play.replica(0).accept()
    await play.answers(first, SSE_HEAD, chunk(b": ping\n\n"))
    await play.pass_time(2.0)
    client.protocol.pause_writing()
    first.leave(ConnectionResetError())
    await play.turn()
    second = play.replica(1).accept()
    await play.answers(second, SSE_HEAD, chunk(EVENT))
    assert second.protocol.paused
    client.protocol.resume_writing()
    assert not second.protocol.paused


@pytest.mark.parametrize("after", ["connects", "refuses", "fails"])
@played
async def test_a_tenant_pays_for_a_stream_that_nobody_writes_on(after):
    costs = []
    play = Play(2, continue_streams="exact", usage_log=lambda exchange, _, usage: costs.append(cost(exchange, usage)))
    client = await play.asks(post(greedy(True), extra=b"x-request-id: q0\r\n"))
    first = play.replica(0).accept()
    Answer(first, None).go_on(5)  # three words
    first.leave(ConnectionResetError())
    await play.turn()
    if after == "connects":
        client.leave()
    elif after == "refuses":
        play.replica(1).refuse()
    else:
        await play.answers(play.replica(1).accept(), reply(ERROR, b"500 Internal Server Error"))
    await play.turn()
    assert costs == [(len(PROMPT_IDS), 0, 3)]


@played
async def test_from_comments_no_time_to_the_first_token_is_learned():
    play = Play(2, continue_streams="exact")
    await play.asks(post(greedy(True), extra=b"x-request-id: q0\r\n"))
    first = play.replica(0).accept()
    Answer(first, None).go_on(5)
    first.leave(ConnectionResetError())
    await play.turn()
    answer = Answer(play.replica(1).accept(), None)
    answer.go_on(1)
    await play.answers(answer.wire, chunk(b": ping\n\n"))
    await play.pass_time(6.0)
    assert play.proxy.router.ledger.total().decoding == 0
    answer.go_on(2)
    await play.pass_time(1.0)
    assert play.proxy.router.ledger.total().decoding == 1


@pytest.mark.parametrize("continues", ["exact", "never"])
@played
async def test_what_is_left_unread_is_passed_on_as_it_came(continues):
    play = Play(1, continue_streams=continues)
    client = await play.asks(post(greedy(True), extra=b"x-request-id: q0\r\n"))
    wire = play.replica(0).accept()
    Answer(wire, None).go_on(3)
    calls = b'data: {"id":"1","choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\n\n'
    torn = b'data: {"id":"1","choices":[{"token_ids":[7,8]'
    await play.answers(wire, chunk(calls), chunk(torn), b"0\r\n\r\n")
    if continues == "exact":  # it asked for these ids itself
        torn = torn.replace(b"[7,8]", b"null")
    assert client.sent.endswith(chunk(torn) + b"0\r\n\r\n")


@played
async def test_a_client_that_does_not_read_comments_is_no_fault_of_the_replica():
    play = Play(1, request_timeout=60.0)
    client = await play.asks(STREAMED)
    first = play.replica(0).accept()
    await play.answers(first, SSE_HEAD, chunk(b": ping\n\n"))
    await play.pass_time(2.0)
    client.protocol.pause_writing()
    await play.pass_time(61.0)
    assert client.ended and first.ended == "aborted" and not play.proxy.metrics.upstream_errors.total()


@played
async def test_a_repetition_at_the_same_replica_does_not_take_the_blame_from_it():
    play = Play(1, request_timeout=60.0)
    await play.asks(post())
    wire = play.replica(0).accept()
    await play.answers(wire, reply())
    client = await play.asks(post())
    await play.pass_time(31.0)
    wire.leave(ConnectionResetError())  # an idle one, as far as can be seen: the request is sent once more
    await play.turn()
    play.replica(0).accept()
    await play.pass_time(29.5)
    assert client.sent.startswith(b"HTTP/1.1 504 ") and play.proxy.metrics.upstream_errors.total(kind="timeout") == 1


@played
async def test_a_second_leg_that_was_given_up_with_the_first_one_costs_nothing():
    costs = []
    play = Play(5, usage_log=lambda exchange, _, usage: costs.append(cost(exchange, usage)))
    for number, backend in enumerate(play.backends):
        backend.replica.moves_by, backend.replica.bootstrap = "mooncake", 9000 + number
        backend.replica.role = ("prefill", "prefill", "decode", "decode", "both")[number]
        backend.replica.engine_ids, backend.pace = {0: f"engine-{number}"}, 0.01
    play.proxy.changed()
    client = await play.asks(post({**greedy(False), "max_tokens": 5000}, extra=b"x-request-id: q0\r\n"))
    first, _ = [backend.pool.accept() for backend in play.backends if backend.pool.asked]
    await play.pass_time(8.0)
    first.leave(ConnectionResetError())
    await play.turn()
    client.leave()
    await play.turn()
    assert costs == [(0, 0, 0)] and not play.left()


# --- whatever happens

WORDS = 6  # of each answer
ERROR = b'{"error":{"message":"no","code":500}}'
MISFORTUNES = [
    *(reply(ERROR, status) for status in (b"500 Internal Server Error", b"503 Busy", b"400 Bad Request", b"404 Not Found", b"200 OK")),
    b"HTTP/1.1 200 OK\r\nContent-Le", b"no HTTP at all\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}",
    SSE_HEAD + b"ff\r\ntorn", SSE_HEAD + b"zz\r\n", SSE_HEAD + b"0\r\n\r\n", SSE_HEAD + chunk(b": ping\n\n"),
    SSE_HEAD + chunk(b"data: " + ERROR + b"\n\n"),
]  # fmt: skip
INTERRUPTIONS = [
    ENDS, b"ff\r\ntorn", b"zz\r\n", b"0\r\n\r\n", chunk(b"data: " + ERROR + b"\n\n") + b"0\r\n\r\n", chunk(b": ping\n\n"),
]  # fmt: skip


def greedy(stream: bool) -> dict:
    return {
        "model": "m",
        "stream": stream,
        "temperature": 0,
        "max_tokens": WORDS,
        "messages": [{"role": "user", "content": "hi there " * 20}],
    }


PROMPT_IDS = [
    *memoryview(PIPELINE.prepare("/v1/chat/completions", json.dumps(greedy(True)).encode()).token_ids).cast("I")
]


class Answer:
    """What an engine still has to send to a request that came on a wire."""

    def __init__(self, wire, way: Way | None):
        head, _, body = wire.sent.rpartition(b"\r\n\r\n")
        self.wire, asked, wire.sent = wire, json.loads(body), b""
        self.name = re.search(rb"x-request-id: (\S+)", head)[1].decode()
        self.begun, self.streams, self.misfortunes = False, asked["stream"], [*MISFORTUNES]
        # Without ids, an end that gives no reason is taken for the end.
        self.interruptions = INTERRUPTIONS[not asked.get("return_token_ids") :]
        if way is not None and leg_of(asked) == "prefill":
            computed = way.computed.replace(b'"prompt_tokens":95', b'"prompt_tokens":%d' % len(PROMPT_IDS))
            self.reads = [reply(computed)]
            self.misfortunes += [reply(computed[:-3]), reply(computed.replace(b"length", b"stop")), reply(computed.replace(b"length", b"abort")),
                                 reply(KEEPS_NOTHING)]  # fmt: skip
        elif asked["stream"]:
            self.reads = [SSE_HEAD, *self._events(asked), ENDS]
        else:
            text = " ".join(f"{self.name}.{number}" for number in range(WORDS))
            whole = reply(ANSWER.replace(b'"hi"', b'"%b"' % text.encode()))
            self.reads = [whole[:40], whole[40:150], whole[150:]]

    def _events(self, asked):
        """Each word is one token, whose id is its number."""
        prompt = len(PROMPT_IDS)
        given = (asked.get("kv_transfer_params") or {}).get("prompt_token_ids")
        written = 0 if given is None else len(given) - prompt
        assert asked["max_tokens"] == WORDS - written
        tells = asked.get("return_token_ids")
        yield event("1", (given or PROMPT_IDS) if tells else None)
        for number in range(written, WORDS):
            reason = "length" if number == WORDS - 1 else None
            yield event("1", [number] if tells else None, f"{self.name}.{number} ", finish_reason=reason)

    def fail(self, number: int) -> None:
        """Send something else than the answer, or than the rest of a stream that was begun."""
        if not self.begun:
            self.wire.says(self.misfortunes[number % len(self.misfortunes)])
        elif self.streams and self.reads:
            self.wire.says(self.interruptions[number % len(self.interruptions)])
        else:
            self.wire.leave()
        self.begun, self.reads = True, []

    def go_on(self, reads: int) -> None:
        self.begun |= bool(self.reads)
        for _ in range(min(reads, len(self.reads))):
            self.wire.says(self.reads.pop(0))


class Fate:
    """A play in which each step is drawn."""

    def __init__(self, way: Way | None, continues: bool):
        self.way, self.continues = way, continues
        self.play = play = Play(5 if way else 3, continue_streams="exact" if continues else "never")
        self.answers: dict[Wire, Answer] = {}
        self.asked: dict[Wire, tuple[str, bool]] = {}
        if way is not None:
            roles = ("prefill", "prefill", "decode", "decode", "both")
            for number, (backend, role) in enumerate(zip(play.backends, roles, strict=True)):
                backend.replica.moves_by, backend.replica.bootstrap, backend.replica.role = (
                    way.moves_by,
                    9000 + number,
                    role,
                )
                backend.replica.engine_ids = {0: f"engine-{number}"}
            play.proxy.changed()

    def busy(self) -> list[Answer]:
        wires = [wire for backend in self.play.backends for wire in backend.pool.busy]
        for wire in wires:
            if wire.sent:
                self.answers[wire] = Answer(wire, self.way)
        return [self.answers[wire] for wire in wires]

    async def step(self, kind: str, number: int) -> None:
        play = self.play
        opening = [backend.pool for backend in play.backends if backend.pool.asked]
        waiting = [wire for wire in self.asked if wire.ended is None and wire.protocol.exchange is not None]
        if kind == "asks" and len(waiting) < 6:
            client, stream = play.client(), bool(number % 3)
            self.asked[client] = f"q{len(self.asked)}", stream
            client.says(post(greedy(stream), extra=b"x-request-id: %b\r\n" % self.asked[client][0].encode()))
        elif kind in ("accepts", "refuses") and opening:
            pool = opening[number % len(opening)]
            pool.accept() if kind == "accepts" else pool.refuse()
        elif kind in ("goes on", "ends", "leaves", "fails") and (busy := self.busy()):
            answer = busy[number % len(busy)]
            if kind == "goes on":
                answer.go_on(1 + number % 2)
            elif kind == "ends":
                answer.go_on(len(answer.reads))
            elif kind == "leaves":
                answer.wire.leave(ConnectionResetError() if number % 2 else None)
            else:
                answer.fail(number)
        elif kind == "client leaves" and waiting:
            waiting[number % len(waiting)].leave()
        elif kind == "client stalls" and waiting:
            protocol = waiting[number % len(waiting)].protocol
            (protocol.resume_writing if protocol.writing_paused else protocol.pause_writing)()
        elif kind == "time":
            await play.pass_time((0.3, 0.3, 2.0, 6.0, 12.0, 35.0)[number % 6])
        elif kind == "replica":
            replica = play.backends[number % len(play.backends)].replica
            replica.state = (State.READY, State.DEGRADED, State.FAILED, State.LEAVING)[number // 8 % 4]
            play.proxy.changed()
        await play.turn()

    async def end(self) -> None:
        """Nothing fails any more, and all that is under way ends."""
        for backend in self.play.backends:
            backend.replica.state = State.READY
        self.play.proxy.changed()
        for wire in self.asked:
            if wire.ended is None and wire.protocol.writing_paused:
                wire.protocol.resume_writing()
        for _ in range(8):
            for _ in range(8):
                for backend in self.play.backends:
                    while backend.pool.asked:
                        backend.pool.accept()
                for answer in self.busy():
                    answer.go_on(len(answer.reads))
                await self.play.turn()
            await self.play.pass_time(100.0)

    def judge(self) -> None:
        """Each client has one answer that is whole, or sees that it is not. No answer has words of another's."""
        assert not self.play.left()
        for wire, (name, stream) in self.asked.items():
            words = set(re.findall(rb"(q\d+)\.\d", wire.sent))
            assert words <= {name.encode()}
            if wire.ended == "left":
                continue
            assert wire.sent.count(b"HTTP/1.1 ") == 1 or (wire.ended == "aborted" and not wire.sent)
            if wire.sent.startswith(b"HTTP/1.1 200 "):
                said = [int(word) for word in re.findall(rb"q\d+\.(\d)", wire.sent)]
                broken = wire.ended == "aborted" or b'"error"' in wire.sent
                if not stream:
                    assert broken or said[:WORDS] == [*range(WORDS)]
                elif b"[DONE]" in wire.sent and self.continues:
                    assert said == [*range(WORDS)] and wire.sent.endswith(b"0\r\n\r\n") and not broken
                else:  # an engine that ends its stream early, as HTTP has it, is found out only where streams are recorded
                    ended = wire.sent.endswith(b"0\r\n\r\n") and not self.continues
                    assert said == [*range(len(said))] and (broken or ended)
            else:
                assert wire.ended == "aborted" or b'"error"' in wire.sent


KINDS = ["asks", "asks", "accepts", "accepts", "accepts", "goes on", "goes on", "goes on", "ends", "ends", "leaves", "fails", "refuses",
         "client leaves", "client stalls", "time", "replica"]  # fmt: skip
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 31)), max_size=60)


@played
async def fated(steps, way, continues):
    fate = Fate(way, continues)
    for kind, number in steps:
        await fate.step(kind, number)
    await fate.end()
    fate.judge()


@pytest.mark.parametrize("continues", [False, True], ids=["", "resumed"])
@pytest.mark.parametrize("way", [None, *WAYS], ids=["whole", *(way.moves_by for way in WAYS)])
@given(steps=STEPS)
def test_whatever_happens_each_client_has_one_answer_and_nothing_is_left(way, continues, steps):
    fated(steps, way, continues)

"""Requests whose two legs are sent at once, between real sockets: what each replica is sent, what one leg's end does to
the other. The engines follow scripts, and neither needs the other: what goes through rooms is tested with simulated
engines (`tests/gateway/test_rooms.py`)."""

import asyncio
import json
import random
from contextlib import asynccontextmanager, suppress

import pytest

from gateway.proxy import settling
from gateway.proxy.disagg import legs
from gateway.proxy.states import Leg
from replicas import State

from ..http.talk import eventually, read_request
from .replies import ANSWER, EVENT, LONG, SSE_HEAD, chunk, post, reply
from .stack import stack
from .test_legs import asks, crowd, give_roles

USED = {"prompt_tokens": 95, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
COMPUTED = json.dumps({"choices": [CHOICE], "usage": USED}, separators=(",", ":")).encode()
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
STREAMED = LONG.replace(b"{", b'{"stream": true, ', 1)


class Side:
    """A replica: its n-th request is dealt with by the n-th act, the others by the last one. `left`: how many requests
    the gateway did not want any more, by closing the connection."""

    def __init__(self, *acts):
        self.acts, self.bodies, self.heads, self.left = acts, [], [], 0

    async def __call__(self, reader, writer):
        while True:
            head, body = await read_request(reader)
            self.heads.append(head)
            self.bodies.append(json.loads(body))
            act = self.acts[min(len(self.bodies), len(self.acts)) - 1]
            if await act(self, reader, writer) is False:
                return

    async def gone(self, reader):
        with suppress(ConnectionError):
            assert await reader.read() == b""
        self.left += 1
        return False


def says(raw, closes=False):
    async def act(side, reader, writer):
        writer.write(raw)
        await writer.drain()
        return not closes

    return act


def after(event, raw):
    async def act(side, reader, writer):
        await event.wait()
        writer.write(raw)

    return act


async def waits(side, reader, writer):
    return await side.gone(reader)


def begins(raw):
    async def act(side, reader, writer):
        writer.write(raw)
        return await side.gone(reader)

    return act


computes, answers = says(reply(COMPUTED)), says(reply(ANSWER))
streams = says(SSE_HEAD + chunk(EVENT) + DONE)


@asynccontextmanager
async def fleet(*sides, roles=("prefill", "decode"), **options):
    """A stack of replicas with these roles that send both legs at once."""
    async with stack(*sides, **options) as s:
        for number, backend in enumerate(s.proxy.backends.values()):
            backend.replica.moves_by, backend.replica.bootstrap = "mooncake", 9000 + number
            backend.replica.engine_ids = {0: f"engine-{number}"}
        give_roles(s, *roles)
        yield s


def room_of(body):
    """By what the two legs of a request find each other."""
    return (body.get("kv_transfer_params") or {}).get("transfer_id")


def sent(s, leg):
    return any(a.leg is leg and a.sent_at for x in s.proxy.exchanges for a in x.attempts)


# --- what is sent


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_both_legs_are_under_way_before_either_is_answered(stream):
    go = asyncio.Event()
    second = SSE_HEAD + chunk(EVENT) + DONE if stream else reply(ANSWER)
    p, d = Side(after(go, reply(COMPUTED))), Side(after(go, second))
    async with fleet(p, d, cached_tokens_header=True) as s:
        prefiller, decoder = s.proxy.backends.values()
        talk = await s.say(post(STREAMED if stream else LONG))
        await eventually(lambda: p.bodies and d.bodies)
        load = s.proxy.router.ledger.load
        assert load(prefiller.id).prefill_tokens > 50 and load(decoder.id).decoding == 1
        go.set()
        status, headers, body = await talk.response()
        assert (status, headers["x-hitherto-replica"]) == (200, decoder.id)
        assert body == (EVENT + b"data: [DONE]\n\n" if stream else ANSWER)
        await eventually(s.idle)
        assert s.metrics.legs.values == {("prefill", "complete"): 1, ("decode", "complete"): 1}
        assert s.metrics.predictions.values == {(prefiller.id, "equal"): 1}, (
            "what was cached is the prefiller's to tell"
        )
        assert s.metrics.transfer_seconds.count(decoder.id) == stream
        (hashes,) = {tuple(s.proxy.models.routes.prepare("/v1/chat/completions", LONG, None, ()).hashes)}
        held = s.proxy.router.map.match(list(hashes), 0.0).held
        assert held[prefiller.slot] == held[decoder.slot] == len(hashes) > 1


async def test_what_engines_are_told_that_meet():
    p, d = Side(computes), Side(answers)
    body = json.loads(LONG) | {"max_tokens": 9, "stop": ["x"]}
    async with fleet(p, d) as s:
        assert (await asks(s, json.dumps(body).encode()))[0] == 200
        (first,), (second,) = p.bodies, d.bodies
        kept, fetched = first.pop("kv_transfer_params"), second.pop("kv_transfer_params")
        name = kept.pop("transfer_id")
        assert kept == {"do_remote_decode": True, "do_remote_prefill": False}
        assert fetched == {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name,
                           "remote_bootstrap_addr": "http://127.0.0.1:9000", "remote_engine_id": "engine-0"}  # fmt: skip
        assert second == body
        # else its blocks would never be sent: one that ends by itself is not heard of again
        assert first == json.loads(LONG) | {"max_tokens": 1, "stream": False, "ignore_eos": True}


async def test_a_prefiller_that_nobody_can_find_computes_nothing_for_others():
    p, d = Side(computes), Side(answers)
    async with fleet(p, d) as s:
        next(iter(s.proxy.backends.values())).replica.engine_ids = {}
        assert (await asks(s))[0] == 200
        assert not p.bodies and room_of(d.bodies[0]) is None


async def test_replicas_are_paired_only_within_one_way():
    sides = [Side(computes), Side(computes), Side(answers), Side(answers)]
    async with fleet(*sides, roles=("prefill", "prefill", "decode", "decode")) as s:
        for backend in [*s.proxy.backends.values()][1::2]:
            backend.replica.moves_by = "nixl"
        s.proxy.changed()
        for number in range(8):
            assert (await asks(s, LONG.replace(b"hi", b"%d" % number)))[0] == 200
        prefiller, in_turn, decoder, other = sides
        rooms = [room_of(one) for one in prefiller.bodies]
        assert rooms and rooms == [room for one in decoder.bodies if (room := room_of(one))]
        assert in_turn.bodies and not any(map(room_of, in_turn.bodies + other.bodies))


# --- faults of the first leg

FIRST_FAULTS = {
    "dies before its answer": says(b"", closes=True),
    "dies within its body": says(reply(COMPUTED)[:-9], closes=True),
    "says what is no HTTP": says(b"SSH-2.0-OpenSSH\r\n", closes=True),
    "500": says(reply(b"{}", b"500 Internal Server Error")),
    "a stream": says(SSE_HEAD + chunk(EVENT) + DONE),
    "an error behind a 200": says(reply(b'{"error":{"message":"x","code":500}}')),
    "the engine was asked to stop": says(reply(COMPUTED.replace(b'"length"', b'"abort"'))),
}


@pytest.mark.parametrize("fault", FIRST_FAULTS)
async def test_a_first_leg_that_fails_takes_the_second_with_it(fault):
    bad, good, d = Side(FIRST_FAULTS[fault]), Side(computes), Side(waits, answers)
    async with fleet(bad, good, d, roles=("prefill", "prefill", "decode")) as s:
        assert (await asks(s))[0::2] == (200, ANSWER)
        await eventually(lambda: d.left == 1)
        assert len(bad.bodies) == len(good.bodies) == 1 and len(d.bodies) == 2
        assert room_of(bad.bodies[0]) == room_of(d.bodies[0]) != room_of(d.bodies[1]) == room_of(good.bodies[0])
        assert s.metrics.retries.total() == 1
        assert s.metrics.legs.values == {("prefill", "failed"): 1, ("decode", "abandoned"): 1,
                                         ("prefill", "complete"): 1, ("decode", "complete"): 1}  # fmt: skip


@pytest.mark.parametrize("fault", ["500", "dies before its answer"])
async def test_a_first_leg_that_fails_where_nobody_else_computes_prompts(fault):
    p, d = Side(FIRST_FAULTS[fault]), Side(waits, answers)
    async with fleet(p, d) as s:
        assert (await asks(s))[0::2] == (200, ANSWER) and room_of(d.bodies[1]) is None
        await eventually(lambda: d.left == len(p.bodies))


async def test_a_decoder_whose_death_the_prefiller_tells_first_is_left_and_the_prefiller_is_not():
    p, dead, good = Side(says(reply(b"{}", b"500 Internal Server Error")), computes), Side(waits), Side(answers)
    async with fleet(p, dead, good, roles=("prefill", "decode", "decode")) as s:
        prefiller, lost, _ = s.proxy.backends
        assert (await asks(s))[0::2] == (200, ANSWER)
        assert room_of(good.bodies[0]) == room_of(p.bodies[1]) != room_of(p.bodies[0]) == room_of(dead.bodies[0])
        assert s.proxy.router.transfers.paused(prefiller, lost, 0.0)


async def test_a_prompt_whose_answer_ends_with_its_first_token_is_said_whole():
    """The blocks of such a one are not sent, and the other engine would wait for minutes."""
    p, d = Side(says(reply(COMPUTED.replace(b'"length"', b'"stop"')))), Side(waits, answers)
    async with fleet(p, d) as s:
        assert (await asks(s))[0::2] == (200, ANSWER)
        await eventually(lambda: d.left == 1)
        assert room_of(d.bodies[1]) is None and s.metrics.legs.total(outcome="not kept") == 1
        assert not next(iter(s.proxy.backends.values())).keeps_nothing


async def test_a_kept_connection_to_the_prefiller_that_died_of_old_age_costs_the_second_leg_nothing():
    async def answers_once_computed(side, reader, writer):
        await eventually(lambda: len(p.bodies) == (1, 3)[len(side.bodies) - 1])
        writer.write(reply(ANSWER))

    p, d = Side(computes, says(b"", closes=True), computes), Side(answers_once_computed)
    async with fleet(p, d) as s:
        assert (await asks(s))[0] == 200
        await eventually(s.idle)
        assert (await asks(s, LONG.replace(b"hi", b"ho")))[0] == 200
        await eventually(s.idle)
        assert len(p.bodies) == 3 and len(d.bodies) == 2 and p.bodies[1] == p.bodies[2]
        assert s.metrics.retries.values == {("reconnect",): 1} and not s.faults
        assert s.metrics.legs.values == {("prefill", "complete"): 2, ("decode", "complete"): 2}


async def test_a_prefiller_that_is_lost_is_left():
    p, good, d = Side(waits), Side(computes), Side(waits, answers)
    async with fleet(p, good, d, roles=("prefill", "prefill", "decode"), request_timeout=60.0) as s:
        talk = await s.say(post(LONG))
        await eventually(lambda: p.bodies and d.bodies)
        s.becomes(next(iter(s.proxy.backends.values())).replica, State.FAILED)
        assert (await talk.response())[0] == 200
        await eventually(lambda: (p.left, d.left) == (1, 1))


# --- the first leg's answer comes late


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_may_be_complete_before_that_of_its_first_leg(stream):
    go = asyncio.Event()
    p, d = Side(after(go, reply(COMPUTED))), Side(streams if stream else answers)
    async with fleet(p, d) as s:
        prefiller, decoder = s.proxy.backends
        assert (await asks(s, STREAMED if stream else LONG))[0] == 200
        await eventually(lambda: s.metrics.legs.total(leg="decode", outcome="complete") == 1)
        load = s.proxy.router.ledger.load
        assert (load(prefiller).requests, load(decoder).requests) == (1, 0) and not s.proxy.exchanges
        go.set()
        await eventually(s.idle)
        assert p.left == 0 and s.metrics.legs.total(leg="prefill", outcome="complete") == 1
        assert s.metrics.predictions.values == {(prefiller, "equal"): 1}


async def test_a_first_leg_that_is_never_answered_is_dropped_some_time_after_the_second_was(monkeypatch):
    monkeypatch.setattr(settling, "TRAILS_SECONDS", 0.1)
    p, d = Side(waits), Side(answers)
    async with fleet(p, d) as s:
        assert (await asks(s))[0] == 200
        await eventually(s.idle)
        await eventually(lambda: p.left == 1)
        assert s.metrics.legs.total(leg="prefill", outcome="abandoned") == 1


async def test_a_first_leg_that_fails_once_the_answer_has_begun_costs_nothing():
    dies, goes_on = asyncio.Event(), asyncio.Event()

    async def dead(side, reader, writer):
        await dies.wait()
        return False

    async def slow(side, reader, writer):
        writer.write(SSE_HEAD + chunk(EVENT))
        await goes_on.wait()
        writer.write(DONE)

    p, d = Side(dead), Side(slow)
    async with fleet(p, d) as s:
        talk = await s.say(post(STREAMED))
        await talk.until(EVENT)
        dies.set()
        await eventually(lambda: s.metrics.legs.total(leg="prefill", outcome="failed") == 1)
        goes_on.set()
        await talk.until(b"[DONE]")
        await eventually(s.idle)
        assert s.metrics.legs.total(leg="decode", outcome="complete") == 1 and not s.metrics.retries.total()


# --- faults of the second leg

SECOND_FAULTS = {
    "dies before its answer": (says(b"", closes=True), False),
    "dies within its head": (says(SSE_HEAD[:20], closes=True), False),
    "dies before its first event": (says(SSE_HEAD, closes=True), False),
    "503": (says(reply(b"{}", b"503 Service Unavailable")), False),
    "500, as of a failed transfer": (says(reply(b"{}", b"500 Internal Server Error")), True),
    "an error behind a 200": (says(reply(b'{"error":{"message":"x","code":500}}')), True),
}


@pytest.mark.parametrize("fault", SECOND_FAULTS)
async def test_a_second_leg_that_fails_before_its_first_byte_takes_the_first_with_it(fault):
    script, of_transfer = SECOND_FAULTS[fault]
    p, bad, good = Side(waits, computes), Side(script), Side(answers)
    async with fleet(p, bad, good, roles=("prefill", "decode", "decode")) as s:
        prefiller, failed, _ = s.proxy.backends
        assert (await asks(s))[0::2] == (200, ANSWER)
        await eventually(lambda: p.left == 1)
        assert (room_of(good.bodies[0]) is None) is of_transfer and len(p.bodies) == (1 if of_transfer else 2)
        if not of_transfer:
            assert room_of(good.bodies[0]) == room_of(p.bodies[1]) != room_of(p.bodies[0]) == room_of(bad.bodies[0])
        assert s.proxy.router.transfers.paused(prefiller, failed, 0.0) is of_transfer
        assert s.metrics.legs.values[("prefill", "abandoned")] == s.metrics.legs.values[("decode", "failed")] == 1


async def test_a_kept_connection_to_the_decoder_that_died_of_old_age_costs_the_first_leg_nothing():
    go = asyncio.Event()
    p, d = Side(computes, after(go, reply(COMPUTED))), Side(answers, says(b"", closes=True), answers)
    async with fleet(p, d) as s:
        assert (await asks(s))[0] == 200
        await eventually(s.idle)
        assert (await asks(s, LONG.replace(b"hi", b"ho")))[0] == 200
        go.set()
        await eventually(s.idle)
        assert len(p.bodies) == 2 and len(d.bodies) == 3 and d.bodies[1] == d.bodies[2] and not s.faults


async def test_legs_that_stall_are_given_up(monkeypatch):
    monkeypatch.setattr(legs, "STALLS_SECONDS", 0.3)
    monkeypatch.setattr(legs, "STALLS_TIMES", 1.0)
    p, stalled, good = Side(waits, computes), Side(waits), Side(answers)
    async with fleet(p, stalled, good, roles=("prefill", "decode", "decode"), request_timeout=60.0) as s:
        assert (await asks(s))[0::2] == (200, ANSWER)
        await eventually(lambda: (p.left, stalled.left) == (1, 1))
        assert s.metrics.retries.values == {("transfer stalled",): 1}


async def test_a_decoder_has_its_time_from_when_the_prompt_was_computed(monkeypatch):
    """However long that took: while its prompt is computed it can say nothing."""
    monkeypatch.setattr(legs, "STALLS_SECONDS", 0.6)
    monkeypatch.setattr(legs, "STALLS_TIMES", 1.0)
    computed, written = asyncio.Event(), asyncio.Event()
    p, d = Side(after(computed, reply(COMPUTED))), Side(after(written, reply(ANSWER)))
    async with fleet(p, d, request_timeout=60.0) as s:
        talk = await s.say(post(LONG))
        await eventually(lambda: s.proxy.exchanges and sent(s, Leg.DECODE))
        (exchange,) = s.proxy.exchanges
        exchange.legs.computing = 60.0
        await asyncio.sleep(0.8)
        computed.set()
        await eventually(lambda: exchange.legs.first is None)
        s.proxy.sweep(exchange.legs.computed_at + 0.5)
        assert not s.metrics.retries.total()
        written.set()
        assert (await talk.response())[0] == 200


async def test_a_stream_that_breaks_off_is_cut_as_any_and_ends_the_first_leg():
    p, d = Side(waits), Side(says(SSE_HEAD + chunk(EVENT), closes=True))
    async with fleet(p, d) as s:
        _, _, body = await asks(s, STREAMED)
        assert b"the answer broke off" in body
        await eventually(lambda: p.left == 1)


# --- clients that leave, and time that runs out


def begun(s):
    return any(x.attempts and x.attempts[-1].pieces for x in s.proxy.exchanges)


def half(s):
    return any(a.withheld for x in s.proxy.exchanges for a in x.attempts)


def computed(s):
    return s.metrics.legs.total(leg="prefill", outcome="complete")


HALF, BEGINS = begins(reply(COMPUTED)[:-9]), begins(SSE_HEAD + chunk(EVENT))
MOMENTS = {
    "both have it": (waits, waits, lambda s, p, d: p.bodies and d.bodies),
    "half of the first answer is there": (HALF, waits, lambda s, p, d: d.bodies and half(s)),
    "the prompt is computed": (computes, waits, lambda s, p, d: d.bodies and computed(s)),
    "the answer has begun, the first has not ended": (waits, BEGINS, lambda s, p, d: p.bodies and begun(s)),
    "the answer has begun": (computes, BEGINS, lambda s, p, d: computed(s) and begun(s)),
}


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_client_that_leaves(moment):
    first, second, reached = MOMENTS[moment]
    p, d = Side(first), Side(second)
    async with fleet(p, d) as s:
        talk = await s.say(post(STREAMED))
        await eventually(lambda: reached(s, p, d))
        await talk.close()
        await eventually(s.idle)
        await eventually(lambda: (p.left, d.left) == (int(first is not computes), 1))
        assert s.metrics.client_aborts.total() == 1
        assert s.metrics.legs.total(outcome="abandoned") == 1 + p.left


async def test_a_client_that_leaves_while_both_are_being_connected():
    p, d = Side(computes), Side(answers)
    async with fleet(p, d) as s:
        for backend in s.proxy.backends.values():
            backend.pool.connect = lambda *asked: None
        talk = await s.say(post(LONG))
        await eventually(lambda: any(len(x.attempts) == 2 for x in s.proxy.exchanges))
        await talk.close()
        await eventually(s.idle)
        assert not p.bodies and not d.bodies


async def test_a_request_that_takes_too_long():
    p, d = Side(waits), Side(waits)
    async with fleet(p, d, request_timeout=0.3) as s:
        assert (await asks(s))[0] == 504
        await eventually(lambda: (p.left, d.left) == (1, 1))


# --- whatever happens


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_nothing_stays_reserved_or_connected(seed, monkeypatch):
    """Sixty requests: replicas that fail at random at every step, clients that leave at random."""
    monkeypatch.setattr(settling, "TRAILS_SECONDS", 0.2)
    dice = random.Random(seed)

    async def whatever(side, reader, writer):
        await asyncio.sleep(dice.choice((0, 0, 0.002, 0.01)))
        luck, first = dice.random(), side.acts[-1] is prefills
        if luck < 0.08:
            return False
        if luck < 0.16:
            writer.write(reply(b"{}", dice.choice((b"500 Internal Server Error", b"503 Busy", b"400 Bad Request"))))
        elif luck < 0.2:
            return await side.gone(reader)
        elif first:
            writer.write(
                reply(dice.choice((COMPUTED, COMPUTED, COMPUTED, COMPUTED[:-3], COMPUTED.replace(b"length", b"stop"))))
            )
        else:
            writer.write(SSE_HEAD + chunk(EVENT))
            if luck < 0.27:
                return False
            writer.write(DONE)

    async def prefills(side, reader, writer):
        return await whatever(side, reader, writer)

    sides = [Side(prefills), Side(prefills), Side(whatever), Side(whatever), Side(whatever)]
    async with fleet(*sides, roles=("prefill", "prefill", "decode", "decode", "decode")) as s:
        s.proxy.router.transfers.failed = lambda *pair: None  # else the first failure would end all legs
        s.proxy.deadlines._idle_timeout = 1.0
        await crowd(s, dice)
        assert s.metrics.legs.total(leg="decode", outcome="complete") > 0
        assert not any(x.legs for x in s.proxy.exchanges)

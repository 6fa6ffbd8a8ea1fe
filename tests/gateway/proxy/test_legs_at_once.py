"""Requests whose two legs are sent at once, between real sockets: what one leg's end does to the other. The engines
follow scripts, and neither needs the other: what goes through rooms is tested with simulated engines
(`tests/gateway/test_rooms.py`)."""

import asyncio
import json
from functools import partial

import pytest

from gateway.proxy import settling
from gateway.proxy.disagg import legs
from gateway.proxy.states import Leg

from ..http.talk import eventually
from .legs import (
    BEGUN,
    COMPUTED,
    MOONCAKE,
    STREAMED,
    Side,
    answers,
    asks,
    closes,
    disaggregated,
    room_of,
    says,
    sent,
    streams,
    waits,
)
from .replies import ANSWER, ENDS, EVENT, LONG, post, reply

fleet = partial(disaggregated, way=MOONCAKE)
computes = MOONCAKE.computes()


async def test_both_legs_are_under_way_before_either_is_answered():
    go = asyncio.Event()
    p, d = Side(says(go, reply(COMPUTED))), Side(says(go, reply()))
    async with fleet(p, d) as s:
        talk = await s.say(post(LONG))
        await eventually(lambda: p.bodies and d.bodies)
        prefiller, decoder = map(s.proxy.router.ledger.load, s.proxy.backends)
        assert prefiller.prefill_tokens > 50 and decoder.decoding == 1
        go.set()
        assert (await talk.response())[0::2] == (200, ANSWER)


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

    p, d = Side(computes, closes, computes), Side(answers_once_computed)
    async with fleet(p, d) as s:
        assert (await asks(s))[0] == 200
        await eventually(s.idle)
        assert (await asks(s, LONG.replace(b"hi", b"ho")))[0] == 200
        await eventually(s.idle)
        assert len(p.bodies) == 3 and len(d.bodies) == 2 and p.bodies[1] == p.bodies[2]
        assert s.metrics.retries.values == {("reconnect",): 1} and not s.faults
        assert s.metrics.legs.values == {("prefill", "complete"): 2, ("decode", "complete"): 2}


async def test_a_kept_connection_to_the_decoder_that_died_of_old_age_costs_the_first_leg_nothing():
    go = asyncio.Event()
    p, d = Side(computes, says(go, reply(COMPUTED))), Side(answers, closes, answers)
    async with fleet(p, d) as s:
        assert (await asks(s))[0] == 200
        await eventually(s.idle)
        assert (await asks(s, LONG.replace(b"hi", b"ho")))[0] == 200
        go.set()
        await eventually(s.idle)
        assert len(p.bodies) == 2 and len(d.bodies) == 3 and d.bodies[1] == d.bodies[2] and not s.faults


@pytest.mark.parametrize(("body", "act"), [(LONG, answers), (STREAMED, streams)], ids=["whole", "streamed"])
async def test_an_answer_may_be_complete_before_that_of_its_first_leg(body, act):
    go = asyncio.Event()
    p, d = Side(says(go, reply(COMPUTED))), Side(act)
    async with fleet(p, d) as s:
        prefiller, decoder = s.proxy.backends
        assert (await asks(s, body))[0] == 200
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


async def test_a_decoder_has_its_time_from_when_the_prompt_was_computed(monkeypatch):
    """However long that took: while its prompt is computed it can say nothing."""
    monkeypatch.setattr(legs, "STALLS_SECONDS", 0.6)
    monkeypatch.setattr(legs, "STALLS_TIMES", 1.0)
    computed, written = asyncio.Event(), asyncio.Event()
    p, d = Side(says(computed, reply(COMPUTED))), Side(says(written, reply(ANSWER)))
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


async def test_a_first_leg_that_fails_once_the_answer_has_begun_costs_nothing():
    dies, goes_on = asyncio.Event(), asyncio.Event()
    async with fleet(Side(says(dies, then="close")), Side(says(BEGUN, goes_on, ENDS))) as s:
        talk = await s.say(post(STREAMED))
        await talk.until(EVENT)
        dies.set()
        await eventually(lambda: s.metrics.legs.total(leg="prefill", outcome="failed") == 1)
        goes_on.set()
        await talk.until(b"[DONE]")
        await eventually(s.idle)
        assert s.metrics.legs.total(leg="decode", outcome="complete") == 1 and not s.metrics.retries.total()

"""Admission where replicas have roles, between real sockets: who waits for a pair, and what is said."""

import json
from contextlib import asynccontextmanager

import pytest

from gateway.proxy.admission.overload import Overload
from policies import Classes, QosClass, Rules, Slo

from ..http.talk import eventually, read_request
from .legs import HANDED, give_roles, leg_of
from .replies import ENDS, EVENT, SSE_HEAD, answers, chunk, post, reply
from .stack import stack
from .test_queue import USAGE, Engine, waiting


class LegEngine(Engine):
    """Notes whom it was sent, and which leg. It answers those that it `holds` (all, if that is None) once it is told
    to, first legs with parameters and others with a stream."""

    def __init__(self, holds=()):
        super().__init__()
        self.holds, self.bodies = holds, []

    async def __call__(self, reader, writer):
        while True:
            body = json.loads((await read_request(reader))[1])
            name, leg = body["messages"][0]["content"].split()[0], leg_of(body)
            self.seen.append((name, leg))
            self.bodies.append(body)
            if self.holds is None or name in self.holds:
                await self._event(name).wait()
            writer.write(reply(HANDED) if leg == "prefill" else SSE_HEAD + chunk(EVENT) + chunk(USAGE) + ENDS)


def ask(name, *headers, **more):
    content = name + " and so on" * 40
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": 900}
    return post(body | more, extra=b"".join([header + b"\r\n" for header in headers]))


@asynccontextmanager
async def pool(*engines, roles=("prefill", "decode"), when_full=("wait",), slo=Slo(30.0), spill=(), **given):
    """`given`: of the rules. A replica that computes a prompt has no room."""
    rules = Rules(when_full, **{"engine_wait": 0.0, "max_tokens_floor": 7} | given)
    overload = Overload(Classes((QosClass("all", slo=slo),)), rules, None)
    async with stack(*engines, overload=overload) as s:
        for index in spill:
            [*s.proxy.backends.values()][index].replica.spill = True
        give_roles(s, *roles)
        yield s, s.proxy.placing.queue
        await eventually(s.idle)
        assert not s.proxy.placing.queue._tickets and s.proxy.placing.queue._space.requests == 0


def waits(queue):
    return sum(waiting(queue).values())


def counted(s):
    return {key[::2]: count for key, count in s.metrics.admission.values.items()}


@asynccontextmanager
async def all_busy(**given):
    """A prompt in two legs is being computed, and one that is whole on the decoder."""
    prefiller, decoder = LegEngine(None), LegEngine(["whole"])
    more = given.pop("engines", ())
    async with pool(prefiller, decoder, *more, **given) as (s, queue):
        first = await s.say(ask("legs"))
        await eventually(lambda: prefiller.seen == [("legs", "prefill")])
        second = await s.say(ask("whole", logprobs=True, n=2))
        await eventually(lambda: decoder.seen == [("whole", "whole")])
        yield s, queue, prefiller, decoder
        prefiller.answer("legs")
        decoder.answer("whole")
        for one in (first, second):
            assert (await one.response())[0] == 200


async def test_who_waits_for_a_pair_is_placed_anew_when_the_prefiller_is_free():
    async with all_busy() as (s, queue, prefiller, decoder):
        third = await s.say(ask("third"))
        await eventually(lambda: waits(queue) == 1)
        assert [name for name, _ in prefiller.seen + decoder.seen] == ["legs", "whole"]
        decoder.answer("whole")
        prefiller.answer("legs")
        await eventually(lambda: ("third", "prefill") in prefiller.seen)
        prefiller.answer("third")
        status, headers, _ = await third.response()
        assert (status, headers["x-hitherto-replica"]) == (200, [*s.proxy.backends][1])
        assert ("third", "decode") in decoder.seen
        assert counted(s) == {("admitted", "room"): 2, ("queued", "full"): 1, ("admitted", "turn"): 1}
        assert s.metrics.queue_seconds.count("all") == 1


async def test_what_was_predicted_of_both_legs_is_compared_with_what_the_client_got():
    prefiller, decoder = LegEngine(None), LegEngine()
    async with pool(prefiller, decoder) as (s, queue):
        one = await s.say(ask("one"))
        await eventually(lambda: prefiller.seen != [])
        ((_, ticket),) = queue._tickets.values()
        assert ticket.costs is [*s.proxy.backends.values()][1].candidate.costs and ticket.ttft > 0.01
        prefiller.answer("one")
        assert (await one.response())[0] == 200
        await eventually(s.idle)
        assert s.metrics.slo_requests.total(outcome="met") == 1
        assert s.metrics.predicted_ttft_seconds.total() == pytest.approx(ticket.ttft)
        assert 0 < s.metrics.delivered_ttft_seconds.total() < 5


@pytest.mark.parametrize("when_full, decision, status", [("reject", "refused", 429), ("observe", "observed", 200)])
async def test_who_no_pair_answers_in_time_is_refused_or_counted_in_shadow_mode(when_full, decision, status):
    async with all_busy(when_full=(when_full,), slo=Slo(1e-4)) as (s, _, prefiller, decoder):
        third = await s.say(ask("third"))
        if status == 200:
            await eventually(lambda: ("third", "prefill") in prefiller.seen or ("third", "whole") in decoder.seen)
            prefiller.answer("third")
        got, headers, body = await third.response()
        assert got == status and counted(s)[decision, "ttft"] == 1
        if status == 429:
            assert 1 <= int(headers["retry-after"]) <= 600 and json.loads(body)["error"]["code"] == "overloaded"


async def test_a_limit_of_a_requests_own_counts_for_both_legs():
    async with all_busy(when_full=("reject",)) as (s, *_):
        third = await s.say(ask("third", b"x-hitherto-slo: ttft=1ms"))
        assert (await third.response())[0] == 429 and counted(s)["refused", "ttft"] == 1


async def test_a_degraded_request_goes_in_two_legs_with_a_short_answer():
    async with all_busy(when_full=("degrade",)) as (s, _, prefiller, decoder):
        third = await s.say(ask("third"))
        await eventually(lambda: ("third", "prefill") in prefiller.seen)
        prefiller.answer("legs")
        prefiller.answer("third")
        status, headers, _ = await third.response()
        assert (status, headers["x-hitherto-degraded"]) == (200, "max_tokens=7")
        assert ("third", "decode") in decoder.seen and decoder.bodies[-1]["max_tokens"] == 7


async def test_a_spilled_request_is_answered_by_the_slow_pool_alone():
    slow = LegEngine()
    given = {"engines": (slow,), "roles": ("prefill", "decode", "both"), "spill": (2,)}
    async with all_busy(when_full=("spill",), slo=Slo(1e-4), **given) as (s, _, prefiller, decoder):
        third = await s.say(ask("third"))
        status, headers, _ = await third.response()
        assert (status, headers["x-hitherto-degraded"]) == (200, "slow pool") and slow.seen == [("third", "whole")]


async def test_a_leg_that_fails_is_followed_by_another_without_waiting_again():
    refused, decoder = [], LegEngine()
    refusing = answers(b'{"error": {"message": "no"}}', b"500 Internal Server Error", seen=refused)
    async with pool(refusing, decoder) as (s, _):
        one = await s.say(ask("one"))
        assert (await one.response())[0] == 200
        assert refused and decoder.seen == [("one", "whole")] and counted(s) == {("admitted", "room"): 1}


async def test_a_body_that_can_be_that_of_no_leg_is_judged_whole():
    """It brings parameters of its own: another gateway's leg."""
    async with all_busy() as (s, queue, prefiller, decoder):
        prefiller.answer("legs")
        await eventually(lambda: ("legs", "decode") in decoder.seen)
        third = await s.say(ask("third", kv_transfer_params={"do_remote_prefill": False}))
        await eventually(lambda: waits(queue) == 1)
        decoder.answer("whole")
        assert (await third.response())[0] == 200
        assert ("third", "whole") in decoder.seen and ("third", "prefill") not in prefiller.seen


async def test_who_leaves_while_it_waits_for_a_pair_leaves_nothing():
    async with all_busy() as (s, queue, *_):
        third = await s.say(ask("third"))
        await eventually(lambda: waits(queue) == 1)
        await third.close()
        await eventually(lambda: waits(queue) == 0)
        assert counted(s)["left", "client"] == 1

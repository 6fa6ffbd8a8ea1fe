"""Less than was asked for, between real sockets: a capped answer, or one from the slow pool, and what says so."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from gateway.proxy.admission.capping import capped
from gateway.proxy.admission.overload import Overload
from policies import Classes, Demand, QosClass, Rules, Slo
from policies.outputs import Outputs

from ..http.talk import eventually, read_request
from .replies import ASKS, CHAT, COMPLETIONS, ENDS, EVENT, MESSAGES, RESPONSES, SSE_HEAD, chunk, post
from .stack import stack

LIMIT = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\n'


class Engine:
    """Notes the bodies it is sent, and answers once it is told to; with `usage`, it says that it wrote all that it was
    asked for."""

    def __init__(self, usage=False):
        self.bodies, self.go, self.drops, self.usage = [], asyncio.Event(), False, usage

    async def __call__(self, reader, writer):
        while True:
            _, body = await read_request(reader)
            self.bodies.append(asked := json.loads(body))
            if self.drops:
                writer.transport.abort()
                return
            await self.go.wait()
            usage = USAGE % asked.get("max_tokens", 0) if self.usage else b""
            writer.write(SSE_HEAD + chunk(EVENT) + chunk(usage) * self.usage + ENDS)


@asynccontextmanager
async def busy(*steps, slow=None, slo=Slo(30.0), engine=None, first=5):
    """An engine with a request under way of `first` tokens, so that it has no room, and one of a slow pool."""
    engine = engine or Engine()
    rules = Rules(steps, engine_wait=0.0, max_wait=0.05, max_tokens_floor=7)
    overload = Overload(Classes((QosClass("all", slo=slo),)), rules, None)
    async with stack(engine, *([slow] if slow else []), overload=overload) as s:
        if slow:
            [*s.proxy.backends.values()][-1].replica.spill = True
            s.proxy.changed()
        limit, first = first, await s.talk()
        await first.say(post({**ASKS[CHAT], "max_tokens": limit}))
        await eventually(lambda: len(engine.bodies) == 1)
        yield s, engine
        for one in (engine, slow):
            if one is not None:
                one.go.set()
        assert (await first.response())[0] == 200
        await eventually(s.idle)
        assert not s.proxy.placing.queue._notes and not s.proxy.placing.queue._tickets


def shed_all(s):
    """The control gives the only class nothing."""
    (fleet,) = s.proxy.placing.queue._fleets.values()
    fleet.shed = frozenset({"all"})


async def asks(s, path=CHAT, body=ASKS[CHAT]):
    return await s.ask(post(body, path.encode()))


async def answered(s, engine, count=2, path=CHAT, body=ASKS[CHAT]):
    """Return what the engine is sent of a request, as the last of `count`, and how its client is told that it was
    degraded."""
    talker = await s.say(post(body, path.encode()))
    await eventually(lambda: len(engine.bodies) == count)
    engine.go.set()
    status, headers, _ = await talker.response()
    assert status == 200
    return engine.bodies[-1], headers.get("x-hitherto-degraded")


@pytest.mark.parametrize("given", [{}, {"limit": 500}, {"limit": 500, "min_tokens": 100}])
@pytest.mark.parametrize("path", ASKS)
async def test_an_answer_is_capped_in_each_apis_own_words_and_the_client_is_told(path, given):
    async with busy("degrade") as (s, engine):
        limit = {LIMIT[path]: given["limit"]} if given else {}
        body = ASKS[path] | limit | {key: given[key] for key in given if key != "limit"}
        got, told = await answered(s, engine, path=path, body=body)
        kept = ASKS[path].keys() - {"max_tokens"}
        assert told == "max_tokens=7" and got[LIMIT[path]] == 7 and got.get("min_tokens", 0) == 0
        assert {name: got[name] for name in kept} == {name: ASKS[path][name] for name in kept}
        assert s.metrics.admission.values["degraded", "all", "full"] == 1


@pytest.mark.parametrize(
    "given, written",
    [
        ("{}", {"max_tokens": 7}),
        ('{"max_tokens": 500}', {"max_tokens": 7}),
        ('{"max_completion_tokens": 500}', {"max_completion_tokens": 7}),
        ('{"max\\u005fcompletion\\u005ftokens": 500}', {"max_completion_tokens": 7}),
        (
            '{"max_tokens": 5, "stop": "\\"max_completion_tokens\\" \\u00e9"}',
            {"max_tokens": 7, "stop": '"max_completion_tokens" é'},
        ),
    ],
)
def test_of_a_chats_two_limits_only_the_one_is_written_that_it_has(given, written):
    assert json.loads(capped(given.encode(), CHAT, 7)) == written


async def test_an_answer_that_was_capped_says_nothing_of_how_long_others_will_be():
    async with busy("degrade", engine=Engine(usage=True), first=40) as (s, engine):
        assert (await answered(s, engine))[1] == "max_tokens=7"
        await eventually(s.idle)
        demand = Demand(9, space=s.proxy.models.spaces[0].number)
        of_one = Outputs()
        of_one.learn(demand, 40)
        assert s.proxy.router.outputs.expected(demand).mean == of_one.expected(demand).mean, "the first one's 40 alone"


async def test_an_answer_stays_capped_where_another_replica_has_to_give_it():
    slow = Engine()
    slow.go.set()
    async with busy("degrade", slow=slow) as (s, engine):
        engine.drops = True
        status, headers, _ = await asks(s)
        assert status == 200 and headers["x-hitherto-degraded"] == "max_tokens=7"
        assert engine.bodies[-1] == slow.bodies[-1] and slow.bodies[-1]["max_tokens"] == 7


async def test_the_slow_pool_gets_what_nobody_else_can_answer_in_time_and_nothing_else():
    slow = Engine()
    async with busy("spill", slow=slow, slo=Slo(1e-6)) as (s, engine):
        assert await answered(s, slow, 1) == (ASKS[CHAT], "slow pool") and len(engine.bodies) == 1
        assert s.metrics.admission.total(decision="spilled") == 1


async def test_a_class_that_the_control_sheds_still_gets_the_slow_pool_where_it_may_spill():
    slow = Engine()
    async with busy("wait", "spill", slow=slow) as (s, engine):
        shed_all(s)
        assert await answered(s, slow, 1) == (ASKS[CHAT], "slow pool") and len(engine.bodies) == 1
        assert s.metrics.admission.values["spilled", "all", "control"] == 1


async def test_a_class_that_the_control_sheds_is_not_spilled_where_all_others_go():
    async with busy("wait", "spill") as (s, engine):
        (only,) = s.proxy.backends.values()
        only.replica.spill = True
        s.proxy.changed()
        shed_all(s)
        assert (await asks(s))[0] == 429


async def test_a_response_that_is_gone_on_with_is_not_spilled_where_all_others_go():
    idle = Engine()
    async with busy("wait", "spill", slow=idle) as (s, _):
        backends = s.proxy.eligible.backends
        maker = next(iter(backends))
        backends[maker] = backends.pop(maker)  # it is not the first of the pool
        for one in backends.values():
            one.replica.spill = True
        s.proxy.changed()
        s.proxy.placing.responses._note("resp_1", maker)
        shed_all(s)
        body = {**ASKS[RESPONSES], "previous_response_id": "resp_1"}
        assert (await asks(s, RESPONSES, body))[0] == 429 and not idle.bodies


async def test_who_is_answered_by_another_than_the_slow_pool_is_not_told_of_it():
    slow = Engine()
    slow.drops = True
    async with busy("spill", slow=slow, slo=Slo(1e-6)) as (s, engine):
        assert (await answered(s, engine))[1] is None and slow.bodies


async def test_without_limits_the_slow_pool_is_asked_only_where_nobody_else_is_left():
    quick, slow = Engine(), Engine()
    quick.go.set()
    slow.go.set()
    async with stack(quick, slow) as s:
        first, last = s.proxy.backends.values()
        last.replica.spill = True
        s.proxy.changed()
        for _ in range(4):
            assert (await asks(s))[0] == 200
        assert (len(quick.bodies), len(slow.bodies)) == (4, 0)
        await eventually(s.idle)
        s.proxy.remove(first.id)
        assert (await asks(s))[0] == 200
        assert (len(quick.bodies), len(slow.bodies)) == (4, 1)


async def test_who_has_waited_too_long_goes_to_the_slow_pool():
    slow = Engine()
    async with busy("wait", "spill", slow=slow, slo=Slo()) as (s, engine):
        await answered(s, slow, 1)
        assert s.metrics.admission.values["spilled", "all", "deadline"] == 1


@pytest.mark.parametrize(
    ("limits", "written", "told"),
    [
        (
            {"max_completion_tokens": 500, "max_tokens": 400},
            {"max_completion_tokens": 7, "max_tokens": 7},
            "max_tokens=7",
        ),
        ({"max_tokens": 7}, {"max_tokens": 7}, None),  # it is short already
    ],
)
async def test_neither_of_two_names_of_a_limit_is_left_and_a_short_answer_is_left_alone(limits, written, told):
    async with busy("degrade") as (s, engine):
        assert await answered(s, engine, body=ASKS[CHAT] | limits) == (ASKS[CHAT] | written, told)

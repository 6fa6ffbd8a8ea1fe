"""However a request ends, the queue lets go of it and has counted it once; and what failed counts in goodput."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from gateway.errors import ApiError
from gateway.proxy.placement.decisions import Decisions
from policies import Rules, Slo

from ..http.talk import eventually
from .replies import ENDS, EVENT, SSE_HEAD, chunk, reply, says, streams
from .stack import stack
from .test_queue import ONE_BY_ONE, Engine, Undecided, be_too_late, decide, fills, overload, send, told, waiting, waits

SOON = Slo(30.0)


@asynccontextmanager
async def counted(*engines, slo=SOON, rules=ONE_BY_ONE, **options):
    async with stack(*engines, overload=overload(slo, rules), **options) as s:
        queue, asked = s.proxy.placing.queue, []
        made = queue._ticket
        queue._ticket = lambda *given: asked.append(1) or made(*given)
        yield s, queue
        await eventually(s.idle)
        assert not queue._tickets and not queue._notes
        assert queue._space.requests == queue._space.bytes == queue._space.untold == 0
        admission = s.metrics.admission
        assert admission.total() - admission.total(decision="queued") == len(asked), "each is counted once"


def decided(s, *but):
    return {key[::2]: count for key, count in s.metrics.admission.values.items() if key[::2] not in but}


SENT, WAITED = ("admitted", "room"), ("queued", "full")


async def test_who_waits_when_the_last_replica_goes_is_told_once_it_may_wait_no_more_and_has_not_left():
    engine = Engine()
    async with counted(engine) as (s, queue):
        first = await fills(s, engine)
        others = [await waits(s, queue, name) for name in "bc"]
        s.proxy.remove(next(iter(s.proxy.backends)))
        assert waiting(queue)["free"] == 2
        await be_too_late(queue)
        for one in others:
            status, headers, body = await one.response()
            assert (status, headers["retry-after"]) == (503, "1") and b"no_replica_ready" in body
        engine.answer("a")
        await first.response()
        assert decided(s, SENT, WAITED) == {("refused", "no_replica"): 2}


async def test_a_decision_that_waits_when_the_last_replica_goes_is_refused_as_well():
    async with counted(Engine()) as (s, queue):
        decisions = Decisions(s.proxy)
        first = await decide(decisions)
        second = asyncio.ensure_future(decide(decisions))
        await eventually(lambda: waiting(queue)["free"] == 1)
        s.proxy.remove(next(iter(s.proxy.backends)))
        await be_too_late(queue)
        with pytest.raises(ApiError):
            await second
        await decisions.done(first["id"], b"")
        assert decided(s, SENT, WAITED) == {("refused", "no_replica"): 1}


async def test_who_waits_until_the_time_of_any_request_is_over_has_not_left():
    engine = Engine()
    async with counted(engine, slo=Slo(60.0), request_timeout=0.3) as (s, queue):
        first = await fills(s, engine)
        second = await waits(s, queue, "b")
        assert (await first.response())[0] == (await second.response())[0] == 504
        await eventually(s.idle)
        assert decided(s, SENT, WAITED) == {("refused", "deadline"): 1}
        assert s.metrics.slo_requests.values == {("free", "m", "failed"): 1}, "an engine had it"


async def test_who_has_left_before_it_was_told_that_it_gave_way_is_counted(monkeypatch):
    engine = Engine()
    async with counted(engine, rules=ONE_BY_ONE._replace(max_requests=1)) as (s, queue):
        first = await fills(s, engine)
        lower = await waits(s, queue, "b")
        look = queue.look
        monkeypatch.setattr(queue, "look", lambda: None)
        higher = await send(s, "c", b"x-tier: premium")
        await eventually(lambda: waiting(queue) == {"premium": 1, "free": 0})
        await lower.close()
        await eventually(lambda: len(s.proxy.exchanges) == 2)
        monkeypatch.setattr(queue, "look", look)
        look()
        for name in "ac":
            engine.answer(name)
        assert (await first.response())[0] == (await higher.response())[0] == 200
        assert decided(s, SENT, WAITED) == {("refused", "shed"): 1, ("admitted", "turn"): 1}


async def test_a_decision_that_makes_the_gateway_fail_leaves_nothing(monkeypatch):
    async with counted(Engine()) as (s, _):

        def fails(*given):
            raise RuntimeError("a bug")

        monkeypatch.setattr(s.proxy.placing, "_take", fails)
        with pytest.raises(RuntimeError):
            await decide(Decisions(s.proxy))


@pytest.mark.parametrize("leaves", ["replica", "client"])
async def test_one_that_was_admitted_and_whose_replica_went_before_it_was_sent_counts_as_failed(leaves):
    """While Redis was asked about it; where its client left meanwhile, nothing is left of it."""
    async with counted(Engine()) as (s, _):
        s.proxy.placing.shared = shared = Undecided()
        talker = await send(s, "a")
        await eventually(lambda: shared.asked)
        chosen, then = shared.asked.pop()
        if leaves == "client":
            await talker.close()
            await eventually(s.idle)
        else:
            s.proxy.remove(chosen)
        then(None)
        assert leaves == "client" or (await talker.response())[0] == 503
        await eventually(s.idle)
        assert s.metrics.slo_requests.values == ({("free", "m", "failed"): 1} if leaves == "replica" else {})
        assert decided(s) == {SENT: 1}


drops = says(then_hangs=False)
FAILED = b'{"error":{"message":"died","type":"InternalServerError","code":%d}}'


def fails(status, in_a_stream=False):
    """A replica that answers with this error, which its client gets."""
    error = FAILED % status
    if not in_a_stream:
        return says(reply(error, b"%d Failed" % status), then_hangs=False)
    head = SSE_HEAD.replace(b"200 OK", b"%d Failed" % status)
    return says(head + chunk(b"data: %b\n\n" % error) + ENDS, then_hangs=False)


@pytest.mark.parametrize(
    ("replicas", "retries", "status", "outcome"),
    [
        ([drops], 2, 502, {"failed": 1}),
        ([drops] * 2, 3, 502, {"failed": 1}),
        ([drops] * 2, 1, 502, {"failed": 1}),  # it may be tried no more
        ([streams(chunk(EVENT), end=None)], 2, 200, {"failed": 1}),  # its stream is cut
        ([fails(500)], 2, 500, {"failed": 1}),
        ([fails(400)], 2, 400, {}),  # the client's own
        ([fails(500, in_a_stream=True)], 2, 500, {"failed": 1}),
        ([fails(400, in_a_stream=True)], 2, 400, {}),
    ],
)
async def test_a_stream_that_fails_counts_as_failed_once(replicas, retries, status, outcome):
    async with counted(*replicas, retries=retries) as (s, _):
        assert (await told(s, "a"))[0] == status
        await eventually(s.idle)
        assert dict(s.metrics.slo_requests.by("outcome")) == outcome and decided(s) == {SENT: 1}
        assert not s.metrics.answer_e2e_seconds.values


@pytest.mark.parametrize("step, status", [("reject", 429), ("observe", 200), ("wait", 200)])
async def test_of_many_that_come_at_once_each_is_counted_once(step, status):
    engine = Engine()
    async with counted(engine, slo=Slo(ttft=20.0), rules=Rules((step,), engine_wait=0.0)) as (s, _):
        talkers = [await send(s, name) for name in "abcd"]
        engine.answer(*"abcd")
        assert {(await one.response())[0] for one in talkers} <= {200, status}

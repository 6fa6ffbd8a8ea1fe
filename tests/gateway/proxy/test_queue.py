"""The queue between real sockets: who waits, who goes first, who leaves, and what those are told who are refused."""

import asyncio
import gc
import hashlib
import itertools
import json
import time
from contextlib import asynccontextmanager

import pytest

from gateway.errors import ApiError
from gateway.prompt.prompt import CHAT, Prompt
from gateway.proxy.admission.overload import Overload
from gateway.proxy.exchange import Exchange
from gateway.proxy.placement.decisions import Decisions
from gateway.tenants.keys import Keys
from policies import Admission, Classes, QosClass, Rule, Rules, Slo
from replicas import State

from ..http.talk import eventually, read_request
from .replies import ENDS, EVENT, SSE_HEAD, chunk, post, says, streams
from .stack import all_answered, stack

PREMIUM, FREE = QosClass("premium", 0.1, 100), QosClass("free", 0.6, 10)
ROUTES = (Rule(PREMIUM, ("x-tier", "premium")), Rule(FREE))
# A replica with a prompt under way has no room.
ONE_BY_ONE = Rules(engine_wait=0.0)
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":20,"prompt_tokens_details":{"cached_tokens":0}}}\n\n'


def overload(slo=Slo(), rules=ONE_BY_ONE, tenant=None, routes=ROUTES):
    classes = [QosClass(one.name, one.reserved_fraction, one.priority, slo) for one in (PREMIUM, FREE)]
    return Overload(Classes(classes, [rule._replace(qos=one) for rule, one in zip(routes, classes)]), rules, tenant)


def ask(name, *headers, path=b"/v1/chat/completions", model="m"):
    body = {"model": model, "messages": [{"role": "user", "content": name}], "stream": True, "max_tokens": 20}
    return post(body, path, b"".join([header + b"\r\n" for header in headers]))


class Engine:
    """Answers in the order in which it is told to, and notes whom it was sent."""

    def __init__(self):
        self.seen, self._go, self.connections = [], {}, []

    async def __call__(self, reader, writer):
        self.connections.append(writer)
        while True:
            _, body = await read_request(reader)
            name = json.loads(body)["messages"][0]["content"]
            self.seen.append(name)
            await self._event(name).wait()
            writer.write(SSE_HEAD + chunk(EVENT) + chunk(USAGE) + ENDS)

    def _event(self, name):
        return self._go.setdefault(name, asyncio.Event())

    def answer(self, *names):
        for name in names:
            self._event(name).set()


@asynccontextmanager
async def queued(*engines, keys=None, **given):
    async with stack(*engines, overload=overload(**given), keys=keys) as s:
        yield s, s.proxy.placing.queue
        await eventually(s.idle)
        assert not s.proxy.placing.queue._tickets and s.proxy.placing.queue._space.requests == 0


async def send(s, *args, **kwargs):
    return await s.say(ask(*args, **kwargs))


async def told(s, *args, **kwargs):
    """Status, headers and body of what a request is answered with."""
    return await s.ask(ask(*args, **kwargs))


def waiting(queue):
    return queue.reading()["queued_requests"]


async def fills(s, engine, name="a"):
    """A request that the replica is computing, so that others wait."""
    talker = await send(s, name)
    await eventually(lambda: engine.seen == [name])
    return talker


async def waits(s, queue, name, *headers, **more):
    before = sum(waiting(queue).values())
    talker = await send(s, name, *headers, **more)
    await eventually(lambda: sum(waiting(queue).values()) == before + 1)
    return talker


@asynccontextmanager
async def busy(**given):
    """A replica that computes the request "a", which is answered by the end, so that others wait."""
    engine = Engine()
    async with queued(engine, **given) as (s, queue):
        first = await fills(s, engine)
        yield s, queue, engine
        engine.answer("a")
        assert (await first.response())[0] == 200


def exchanges():
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Exchange]


async def test_of_a_space_that_is_none_any_more_nothing_is_kept_once_nobody_waits_there():
    """Its prompts are made in another way from now on, or the model is served no more."""
    async with busy(slo=Slo(30.0)) as (s, queue, engine):
        second = await waits(s, queue, "b")
        (space,) = s.proxy.models.spaces
        space.number = space.pipeline.space = space.number + 1
        s.proxy.changed()
        assert len(queue._space.fleets) == 1, "somebody waits"
        engine.answer("a", "b")
        assert (await second.response())[0] == 200
        await eventually(s.idle)
        s.proxy.changed()
        assert queue._space.fleets == [] and s.proxy.control.status()["models"] == []
        third = await send(s, "c")
        await eventually(lambda: engine.seen[-1:] == ["c"])
        engine.answer("c")
        assert (await third.response())[0] == 200
        s.proxy.changed()
        assert len(queue._space.fleets) == len(s.proxy.control.status()["models"]) == 1


async def test_it_waits_until_the_replica_has_room_and_goes_then():
    async with busy() as (s, queue, engine):
        second = await waits(s, queue, "b")
        assert engine.seen == ["a"] and queue.reading()["queued_bytes"] > 0
        engine.answer("a")
        await eventually(lambda: engine.seen == ["a", "b"])
        engine.answer("b")
        assert (await second.response())[0] == 200
        counted = {("admitted", "free", "room"): 1, ("queued", "free", "full"): 1, ("admitted", "free", "turn"): 1}
        assert s.metrics.admission.values == counted and s.metrics.queue_seconds.count("free") == 1
        assert queue.waiting() == {"premium": 0, "free": 0}


async def test_the_higher_class_goes_first_and_tenants_take_turns():
    engine = Engine()
    async with queued(engine, tenant=b"x-team") as (s, queue):
        talkers = [await send(s, "a", b"x-team: big")]
        await eventually(lambda: engine.seen == ["a"])
        for name in ("big 1", "big 2", "big 3", "small"):
            talkers.append(await waits(s, queue, name, b"x-team: " + name.split()[0].encode()))
        talkers.append(await waits(s, queue, "first", b"x-tier: premium"))
        for number in range(1, 6):
            engine.answer(engine.seen[-1])
            await eventually(lambda: len(engine.seen) == number + 1)
        engine.answer(engine.seen[-1])
        assert engine.seen[1] == "first"
        assert engine.seen.index("small") <= 3, "one team's crowd does not make the other wait for all of it"
        await all_answered(talkers)


async def test_a_client_that_leaves_is_out_of_the_queue_and_its_request_is_let_go():
    """Its line knows of it for as long as somebody waits before it; what it holds may be large."""
    engine = Engine()
    async with queued(engine) as (s, queue):
        talkers = [await fills(s, engine)]
        talkers.append(await waits(s, queue, "b"))
        gone = await waits(s, queue, "gone")
        before = len(exchanges())
        await gone.close()
        await eventually(lambda: waiting(queue)["free"] == 1)
        assert len(exchanges()) == before - 1
        engine.answer("a", "b")
        await all_answered(talkers)
        assert engine.seen == ["a", "b"] and s.metrics.admission.total(decision="left") == 1


@pytest.mark.parametrize(
    "path, type_of",
    [
        (b"/v1/chat/completions", lambda body: (body["error"]["type"], body["error"]["code"])),
        (b"/v1/messages", lambda body: (body["type"], body["error"]["type"])),
    ],
)
async def test_who_waits_too_long_is_told_in_its_own_words_when_to_come_back(path, type_of):
    async with busy(rules=ONE_BY_ONE._replace(max_wait=0.1)) as (s, queue, engine):
        status, headers, body = await told(s, "b", path=path)
        assert status == 429 and 1 <= int(headers["retry-after"]) <= 600
        assert type_of(json.loads(body)) in (("rate_limit_error", "overloaded"), ("error", "rate_limit_error"))
        engine.answer("a")
        assert s.metrics.admission.total(decision="refused", reason="deadline") == 1
        assert s.metrics.rejections.total() == 1


async def test_when_the_time_to_stop_is_over_whoever_has_no_byte_yet_gets_503():
    """Who waits and who was sent: each in the format of its API. Streams are cut, as before."""
    seen = []

    async def engine(reader, writer):
        _, body = await read_request(reader)
        seen.append(name := json.loads(body)["messages"][0]["content"])
        if name == "streams":
            writer.write(SSE_HEAD + chunk(EVENT))
        await reader.read()

    async with queued(engine, slo=Slo(30.0)) as (s, queue):
        talkers = [await send(s, "streams")]
        await talkers[0].until(b"\r\n\r\n")
        talkers.append(await send(s, "sent"))
        await eventually(lambda: seen == ["streams", "sent"])
        talkers += [await send(s, "waits"), await send(s, "waits", path=b"/v1/messages")]
        await eventually(lambda: waiting(queue)["free"] == 2)
        s.proxy.drain()
        await s.server.drain(0.1)
        assert s.proxy.refuse_unanswered() == 3
        assert await s.server.end() == 1
        for talker, type_of in zip(talkers[1:], ["server_error", "server_error", "overloaded_error"]):
            status, headers, body = await talker.response()
            assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            assert json.loads(body)["error"]["type"] == type_of
            assert await talker.rest() == b""
        assert not (await talkers[0].rest()).endswith(b"0\r\n\r\n")
        assert seen == ["streams", "sent"]
        assert s.metrics.rejections.values == {("shutting_down",): 2}
        assert s.metrics.admission.total(decision="left") == 0, "no client has left"
        assert s.metrics.admission.total(decision="refused", reason="shutting_down") == 2
        assert s.metrics.slo_requests.total(outcome="failed") == 2, "engines had them"
        assert s.metrics.requests.total(status="cut") == 1 and not s.metrics.client_aborts.values


@pytest.mark.parametrize("slo", [Slo(), Slo(ttft=1.0)])
async def test_time_in_which_this_process_did_not_run_is_no_waiting(slo):
    async with busy(slo=slo, rules=ONE_BY_ONE._replace(max_wait=1.0)) as (s, queue, engine):
        second = await waits(s, queue, "b")
        time.sleep(1.5)
        engine.answer("a", "b")
        assert (await second.response())[0] == 200


async def test_observe_sends_all_and_counts_who_would_have_been_refused():
    engine = Engine()
    async with queued(engine, slo=Slo(ttft=0.001), rules=Rules(("observe",), engine_wait=0.0)) as (s, queue):
        talkers = [await send(s, name) for name in ("a", "b")]
        await eventually(lambda: len(engine.seen) == 2)
        engine.answer("a", "b")
        await all_answered(talkers)
        assert s.metrics.admission.total(decision="observed", reason="ttft") == 1


async def test_a_request_may_bring_limits_of_its_own():
    engine = Engine()
    async with queued(engine) as (s, queue):
        first = await send(s, "a", b"x-hitherto-slo: ttft=30s")
        await eventually(lambda: engine.seen == ["a"])
        status, _, body = await told(s, "b", b"x-hitherto-slo: ttft=2")
        assert status == 400 and b"like 2s or 50ms" in body and b"x-hitherto-slo" in body
        status, _, body = await told(s, "b2", b"x-hitherto-slo:")
        assert status == 400 and b"x-hitherto-slo: it has no value; write ttft=2s,tpot=50ms, or" in body
        assert (await told(s, "c", b"x-hitherto-slo: ttft=1ms"))[0] == 429
        status, _, body = await told(s, "d", b"x-hitherto-slo: ttft=" + 50_000 * b"9")
        assert status == 400 and len(body) < 1000, "what is wrong is not repeated at length"
        engine.answer("a")
        assert (await first.response())[0] == 200
        await eventually(s.idle)
        assert s.metrics.slo_requests.values == {("free", "m", "met"): 1}
        assert s.metrics.predicted_ttft_seconds.total() > 0 and s.metrics.delivered_ttft_seconds.total() > 0


async def test_a_client_that_does_not_keep_up_says_nothing_of_how_fast_replicas_are():
    """Else a few that read slowly make the gateway expect less of all replicas, and admit less."""
    long = streams(*[chunk(1000 * EVENT)] * 400, chunk(USAGE))
    async with queued(long, slo=Slo(None, 1e-5)) as (s, queue):
        talker = await send(s, "a")
        await eventually(lambda: any(one.client.writing_paused for one in s.proxy.exchanges))
        assert (await talker.response())[0] == 200
        await eventually(s.idle)
        assert s.metrics.slo_requests.values == {("free", "m", "met"): 1}
        assert {fleet.fit.tpot_margin.factor for fleet in queue._fleets.values()} == {1.0}


async def test_a_full_queue_sheds_the_lower_class():
    engine = Engine()
    async with queued(engine, rules=ONE_BY_ONE._replace(max_requests=1)) as (s, queue):
        talkers = [await fills(s, engine)]
        lower = await waits(s, queue, "b")
        assert (await told(s, "c"))[0] == 429
        talkers.append(await send(s, "d", b"x-tier: premium"))
        assert (await lower.response())[0] == 429
        engine.answer("a", "d")
        await all_answered(talkers)
        reasons = s.metrics.admission
        assert reasons.total(reason="queue_full") == reasons.total(reason="shed") == 1


async def test_a_replica_that_dies_while_others_wait_takes_nobody_with_it():
    """What was sent there is tried elsewhere without waiting again, who waits is placed among those that are left."""
    dying, living = Engine(), Engine()
    async with queued(dying, living) as (s, queue):
        talkers = [await send(s, name) for name in ("a", "b")]
        await eventually(lambda: len(dying.seen) + len(living.seen) == 2)
        talkers += [await send(s, name) for name in ("c", "d")]
        await eventually(lambda: waiting(queue)["free"] == 2)
        for writer in dying.connections:
            writer.transport.abort()
        s.proxy.remove(next(iter(s.proxy.backends)))
        living.answer(*"abcd")
        await all_answered(talkers)
        assert sorted(living.seen) == list("abcd")


def decide(decisions, tier="free"):
    """Ask for a decision for a request of another proxy's."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    return decisions.decide("/v1/chat/completions", body, {"x-tier": tier})


async def be_too_late(queue):
    """No replica is ready for those that wait, and they have waited for as long as they may."""
    await eventually(lambda: all(line.is_absent for one in queue._fleets.values() for line in one.queues if line.count))
    for fleet in queue._fleets.values():
        fleet.held_up(-1000.0)


def goes(s, at=0, state=State.FAILED):
    backend = [*s.proxy.backends.values()][at]
    s.becomes(backend.replica, state)


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages", b"/invocations"])
async def test_who_comes_while_no_replica_is_ready_waits_and_goes_once_one_is(path):
    """An only engine that compiles, or starts anew, is back within what a request may wait."""
    engine = Engine()
    async with queued(engine, slo=Slo(ttft=60.0)) as (s, queue):
        goes(s)
        talkers = [await send(s, "low", path=path), await send(s, "high", b"x-tier: premium", path=path)]
        await eventually(lambda: waiting(queue) == {"premium": 1, "free": 1})
        classes = ("free", "premium")
        assert s.metrics.admission.values == {("queued", name, "no_replica"): 1 for name in classes}
        goes(s, state=State.READY)
        await eventually(lambda: engine.seen == ["high"])
        engine.answer("high", "low")
        await all_answered(talkers)
        assert engine.seen == ["high", "low"] and s.metrics.admission.total(decision="admitted") == 2
        assert [s.metrics.queue_seconds.count(name) for name in classes] == [1, 1]


async def test_who_waits_for_a_model_that_is_away_keeps_nobody_from_another():
    away, here = Engine(), Engine()
    async with queued(away, here) as (s, queue):
        one, other = s.proxy.backends.values()
        one.replica.models, other.replica.models = {"a": None}, {"b": None}
        s.proxy.changed()
        goes(s)
        absent = await waits(s, queue, "first", b"x-tier: premium", model="a")
        talkers = [await send(s, name, model="b") for name in ("second", "third")]
        await eventually(lambda: here.seen == ["second"])
        here.answer("second", "third")
        await all_answered(talkers)
        assert (await told(s, "fourth", model="c"))[0] == 404
        assert away.seen == [] and waiting(queue) == {"premium": 1, "free": 0}
        goes(s, state=State.READY)
        away.answer("first")
        assert (await absent.response())[0] == 200


async def test_who_may_not_wait_is_told_at_once_that_no_replica_is_ready():
    async with queued(Engine(), rules=Rules(("reject",))) as (s, queue):
        goes(s)
        status, headers, _ = await told(s, "a")
        assert (status, headers["retry-after"]) == (503, "1")
        assert s.metrics.admission.values == {("refused", "free", "no_replica"): 1}


async def test_a_full_queue_takes_nobody_who_waits_for_a_replica():
    async with queued(Engine(), rules=ONE_BY_ONE._replace(max_requests=1)) as (s, queue):
        goes(s)
        first = await waits(s, queue, "a")
        assert (await told(s, "b"))[0] == 503
        higher = await send(s, "c", b"x-tier: premium")
        assert (await first.response())[0] == 429, "its place went to a higher class"
        await be_too_late(queue)
        assert (await higher.response())[0] == 503


async def test_a_client_that_leaves_while_no_replica_is_ready_leaves_nothing():
    async with queued(Engine()) as (s, queue):
        goes(s)
        gone = await waits(s, queue, "a")
        await gone.close()
        await eventually(lambda: waiting(queue)["free"] == 0)
        assert s.metrics.admission.total(decision="left") == 1


async def test_a_decision_for_another_proxy_waits_until_a_replica_is_ready():
    async with queued(Engine()) as (s, queue):
        decisions = Decisions(s.proxy)
        goes(s)
        asked = asyncio.ensure_future(decide(decisions))
        await eventually(lambda: waiting(queue)["free"] == 1)
        goes(s, state=State.READY)
        await decisions.done((await asked)["id"], b"")


async def test_a_decision_for_another_proxy_waits_as_well_and_leaves_with_its_caller():
    engine = Engine()
    async with queued(engine) as (s, queue):
        decisions = Decisions(s.proxy)
        first = await decide(decisions)
        second = asyncio.ensure_future(decide(decisions, "premium"))
        await eventually(lambda: waiting(queue)["premium"] == 1)
        gone = asyncio.ensure_future(decide(decisions))
        await eventually(lambda: waiting(queue)["free"] == 1)
        gone.cancel()
        await eventually(lambda: waiting(queue)["free"] == 0)
        await decisions.first_byte(first["id"])
        other = await second
        for one in (first, other):
            await decisions.done(one["id"], b"")


async def test_a_decision_that_is_refused_says_so():
    async with queued(Engine(), slo=Slo(ttft=0.001), rules=Rules(("reject",), engine_wait=0.0)) as (s, queue):
        decisions = Decisions(s.proxy)
        first = await decide(decisions)
        with pytest.raises(ApiError) as caught:
            await decide(decisions)
        assert caught.value.status == 429
        await decisions.done(first["id"], b"")


async def test_without_classes_and_limits_there_is_no_queue():
    engine = Engine()
    async with stack(engine) as s:
        assert s.proxy.placing.queue is None
        talkers = [await send(s, name) for name in "ab"]
        await eventually(lambda: len(engine.seen) == 2)
        engine.answer("a", "b")
        await all_answered(talkers)
        assert not s.metrics.admission.values


async def test_a_key_of_a_class_overtakes_a_key_of_a_lower_one(tmp_path):
    engine, file = Engine(), tmp_path / "keys.yaml"
    digests = {name: hashlib.sha256(f"hth-{name}".encode()).hexdigest() for name in ("low", "high")}
    classes = {"low": "free", "high": "premium"}
    file.write_text("".join(f"- {{name: {one}, sha256: {digests[one]}, class: {classes[one]}}}\n" for one in digests))
    async with queued(engine, keys=Keys(file)) as (s, queue):
        talkers = []
        for count, name in enumerate(("low", "low", "high")):
            talkers.append(await send(s, f"{name} {count}", f"authorization: Bearer hth-{name}".encode()))
            await eventually(lambda: len(engine.seen) + sum(waiting(queue).values()) == count + 1)
        for number in range(3):
            await eventually(lambda: len(engine.seen) == number + 1)
            engine.answer(engine.seen[-1])
        assert engine.seen == ["low 0", "high 2", "low 1"]
        await all_answered(talkers)


# --- what it costs the event loop


async def test_while_nothing_changes_the_queue_leaves_the_event_loop_alone(monkeypatch):
    engine = Engine()
    async with queued(engine) as (s, queue):
        talkers = [await fills(s, engine)]
        talkers.append(await waits(s, queue, "b"))
        evaluated, evaluate = [], s.proxy.router.evaluate
        seen = lambda *given, **more: evaluated.append(1) or evaluate(*given, **more)  # noqa: E731
        monkeypatch.setattr(s.proxy.router, "evaluate", seen)
        await asyncio.sleep(0.2)  # the time in which they are counted
        assert 1 <= len(evaluated) <= 10, "one look in 50 ms"
        engine.answer("a", "b")
        await all_answered(talkers)


@pytest.mark.parametrize("joined", [False, True])
async def test_many_for_whom_no_replica_comes_in_time_are_told_by_the_dozen(monkeypatch, joined):
    """With Redis too: a look waits there for the answer about one that is placed, and for nothing else."""
    engine = Engine()
    async with queued(engine) as (s, queue):
        first = await fills(s, engine)
        others = [await send(s, f"b{number}") for number in range(40)]
        await eventually(lambda: waiting(queue)["free"] == 40)
        told, unplaced = [], Exchange.unplaced
        monkeypatch.setattr(Exchange, "unplaced", lambda self, error: told.append(1) or unplaced(self, error))
        if joined:
            s.proxy.placing.shared = Undecided()
        s.proxy.remove(next(iter(s.proxy.backends)))
        await be_too_late(queue)
        counts = [0]
        while len(told) < 40:
            await asyncio.sleep(0)
            counts.append(len(told))
        assert max(later - earlier for earlier, later in itertools.pairwise(counts)) <= 24
        for talker in others:
            assert (await talker.response())[0] == 503
        engine.answer("a")
        await first.response()


class Undecided:
    """A shared ledger whose answers come when they are asked for. `asked`: the replica chosen, and what to call."""

    joined = True

    def __init__(self):
        self.asked = []

    def decide(self, evaluation, then):
        def decided(decision):
            if (send := then(decision)) is not None:
                send()

        self.asked.append((evaluation.candidates[evaluation.choice.index].replica, decided))


async def test_a_decision_whose_replica_left_while_redis_was_asked_does_not_queue_again():
    async with queued(Engine(), Engine()) as (s, queue):
        s.proxy.placing.shared = shared = Undecided()
        decisions, asked = Decisions(s.proxy), []
        for _ in range(2):
            asked.append(asyncio.ensure_future(decide(decisions)))
            await eventually(lambda: len(shared.asked) == 1)
            chosen, then = shared.asked.pop()
            if len(asked) == 2:
                s.proxy.remove(chosen)
            then(None)
        assert waiting(queue)["free"] == 0 and len(shared.asked) == 1, "the other replica is full, and it was admitted"
        shared.asked.pop()[1](None)
        for one in asked:
            await decisions.done((await one)["id"], b"")


async def test_who_may_go_to_one_replica_alone_holds_up_nobody_for_the_others():
    """Here the replica that has the adapter; as well one that has the context, or made the stored response."""
    plain, adapted = Engine(), Engine()
    async with queued(plain, adapted) as (s, queue):
        backend = [*s.proxy.backends.values()][1]
        backend.replica.models = {"m": None, "adapter": "m"}
        s.proxy.changed()
        talkers = [await send(s, "a", model="adapter")]
        await eventually(lambda: adapted.seen == ["a"])
        talkers.append(await waits(s, queue, "b", model="adapter"))
        talkers.append(await send(s, "c"))
        await eventually(lambda: plain.seen == ["c"])
        talkers.append(await waits(s, queue, "d"))
        plain.answer("c")
        await eventually(lambda: plain.seen == ["c", "d"])
        assert adapted.seen == ["a"]
        adapted.answer("a")
        await eventually(lambda: adapted.seen == ["a", "b"])
        plain.answer("d")
        adapted.answer("b")
        await all_answered(talkers)


async def test_prompts_of_unknown_size_teach_nothing_of_predictions(monkeypatch):
    learned = []
    monkeypatch.setattr(Admission, "first_token", lambda *given: learned.append(given[2]))
    engine = Engine()
    async with queued(engine, slo=Slo(ttft=30.0)) as (s, queue):
        monkeypatch.setattr(
            s.proxy.preparation, "_prepare", lambda exchange: (Prompt(CHAT, "m", stream=True, mode="load"), 0.0)
        )
        talker = await fills(s, engine)
        engine.answer("a")
        assert (await talker.response())[0] == 200
        await eventually(s.idle)
        assert not learned and s.metrics.slo_requests.total() == 1
        assert not s.metrics.predicted_ttft_seconds.total()


@pytest.mark.parametrize("own", [(), (b"x-hitherto-slo: ttft=60m,tpot=60m",)], ids=["the class's", "its own"])
async def test_who_cannot_be_answered_in_time_is_refused_whatever_looser_limit_it_brings(own):
    async with busy(slo=Slo(ttft=0.001), rules=Rules(("reject",), engine_wait=0.0)) as (s, queue, engine):
        status, headers, _ = await told(s, "b", *own)
        assert status == 429 and "retry-after" in headers and engine.seen == ["a"]


async def test_what_was_predicted_is_compared_at_the_first_token(monkeypatch):
    """Not at the end, which comes too late for a crowd; and not where another replica answers than was asked first."""
    learned, first_token = [], Admission.first_token
    monkeypatch.setattr(Admission, "first_token", lambda *given: learned.append(given[2]) or first_token(*given))
    end = asyncio.Event()

    slow = says(SSE_HEAD + chunk(EVENT), end, chunk(USAGE) + ENDS, then_hangs=False)
    async with queued(slow, slo=Slo(ttft=30.0)) as (s, queue):
        talker = await send(s, "a")
        await eventually(lambda: len(learned) == 1)
        end.set()
        assert (await talker.response())[0] == 200
        await eventually(s.idle)
        assert len(learned) == 1 and s.metrics.slo_requests.total() == 1
    learned.clear()
    async with queued(says(then_hangs=False), slow, slo=Slo(ttft=30.0)) as (s, queue):
        for name in "ab":
            assert (await told(s, name))[0] == 200
            await eventually(s.idle)
        assert len(learned) == 1 and s.metrics.slo_requests.total() == 2

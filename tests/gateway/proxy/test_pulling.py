"""Prompts taken from a peer's memory, between real sockets: what the replica is sent, what is counted, what fails."""

import json
from asyncio import Event
from contextlib import asynccontextmanager
from time import monotonic

import pytest

from gateway.prompt.pipeline import Pipeline
from gateway.proxy.exactness.drift import WINDOW
from policies import Demand, two_legs
from replicas import State
from replicas.simulated.model import sim_model_dir

from ..http.talk import eventually
from .replies import ANSWER, EVENT, answers, chunk, post, reply, says, streams
from .stack import stack
from .test_tiers import usage

SIZE, BLOCKS = 16, 60
TOKENS = SIZE * BLOCKS + 3
COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": list(range(1, TOKENS + 1))}


@asynccontextmanager
async def peers(*scripts, tier="cpu", names=("h0:5710", "[::1]:5711", "h2:5712"), **options):
    """Replicas of which the first has the prompt and much to do, and from which a pull takes next to nothing."""
    pipeline = Pipeline(sim_model_dir(), "m", SIZE)
    async with stack(*scripts, policy="least_time", pipeline=pipeline, cached_tokens_header=True, **options) as s:
        backends, router = [*s.proxy.backends.values()], s.proxy.router
        for backend, name in zip(backends, names):
            backend.replica.peer = name
            router.map.observed(backend.slot, True)
        s.hashes = s.proxy.models.pipelines[0].prepare(COMPLETIONS, json.dumps(BODY).encode()).hashes
        keys = [*range(1, BLOCKS + 1)]
        router.map.store(backends[0].slot, s.hashes, keys)
        router.map.store(backends[0].slot, s.hashes, keys, tier)
        s.busy = [two_legs.commit_decoder(router, Demand(4000), backends[0].candidate, 0.0) for _ in range(200)]
        for backend in backends[1:]:
            for _ in range(40):
                router.pulls.observe(backends[0].id, backend.id, SIZE * BLOCKS, 1e-4, monotonic())
        s.proxy.changed()
        yield s
        for placement in s.busy:
            router.abandon(placement)


async def asks(s, body=BODY, path=COMPLETIONS):
    return await s.ask(post(body, path=path.encode()))


def told(seen):
    return [json.loads(body).get("kv_transfer_params") for _, body in seen]


async def test_the_idle_replica_is_told_where_the_prompt_lies_and_what_came_is_as_predicted():
    seen = []
    async with peers(answers(), answers(usage(TOKENS, SIZE * BLOCKS), seen=seen)) as s:
        holder, other = s.proxy.backends.values()
        status, headers, _ = await asks(s)
        assert (status, headers["x-hitherto-replica"]) == (200, other.id)
        assert headers["x-hitherto-cached-tokens"] == str(SIZE * BLOCKS)
        (params,) = told(seen)
        source = params["remote_kv_source"]
        assert (source["remote_host"], source["remote_port"]) == ("h0", 5710) and len(source["kv_request_id"]) == 24
        assert {name: value for name, value in json.loads(seen[0][1]).items() if name != "kv_transfer_params"} == BODY
        await eventually(lambda: s.metrics.peer_pulls.total())
        assert s.metrics.peer_pulls.values == {(other.id, "complete"): 1}
        assert s.metrics.predictions.values == {(other.id, "equal"): 1}
        # it is expected there now, so the next goes there as it came
        assert (await asks(s))[1]["x-hitherto-replica"] == other.id and told(seen)[1] is None


@pytest.mark.parametrize("tier, names", [("disk", ("a:1", "b:2")), ("cpu", ("", "")), ("cpu", ("a:1", ""))])
async def test_what_nobody_passes_on_is_not_asked_for(tier, names):
    seen = []
    async with peers(answers(seen=seen), answers(seen=seen), tier=tier, names=names) as s:
        assert s.proxy.placing.pulls.any == all(names)
        assert (await asks(s))[0] == 200 and told(seen) == [None]


@pytest.mark.parametrize("body", [BODY | {"n": 2}, BODY | {"kv_transfer_params": {"do_remote_decode": True}}])
async def test_several_sequences_and_legs_of_others_pass_as_they_came(body):
    seen = []
    async with peers(answers(seen=seen), answers(seen=seen)) as s:
        assert (await asks(s, body))[0] == 200
        assert json.loads(seen[0][1]) == body


async def test_where_nothing_can_be_pulled_the_prompt_counts_as_computed():
    arrived, go_on = Event(), Event()

    waits = says(arrived.set, go_on, reply())
    async with peers(waits, waits) as s:
        holder, other = s.proxy.backends.values()
        talk = await s.say(post(BODY | {"kv_transfer_params": None}, path=COMPLETIONS.encode()))
        await arrived.wait()
        computes = other.candidate.load.prefill_tokens, holder.candidate.load.prefill_tokens
        go_on.set()
        assert (await talk.response())[0] == 200
        assert computes == (TOKENS, 0)


async def test_a_pull_that_brings_nothing_pauses_the_pair_and_is_no_drift():
    seen = []
    async with peers(answers(), answers(usage(TOKENS, 0), seen=seen)) as s:
        holder, other = s.proxy.backends.values()
        for _ in range(WINDOW):
            s.proxy.router.map._routed.clear(other.slot)
            s.proxy.router.pulls._paused.clear()
            await asks(s)
            await eventually(lambda: s.proxy.router.ledger.own(other.id)[0] == 0)
        assert s.metrics.peer_pulls.values == {(other.id, "missed"): WINDOW} and not s.metrics.heals.total()
        s.proxy.router.map._routed.clear(other.slot)
        await asks(s)
        assert told(seen)[WINDOW - 1] is not None and told(seen)[WINDOW:] == [None] * len(told(seen)[WINDOW:])


async def test_streams_whose_pulls_bring_nothing_pause_the_pair_for_twice_as_long_each_time():
    counts = b'{"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":1,' % TOKENS
    none = b"data: " + counts + b'"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
    async with peers(answers(), streams(chunk(EVENT), chunk(none))) as s:
        holder, other = s.proxy.backends.values()
        pulls = s.proxy.router.pulls
        for times in (1, 2, 3):
            s.proxy.router.map._routed.clear(other.slot)
            answer = await asks(s, BODY | {"stream": True})
            assert answer[1]["x-hitherto-replica"] == other.id, (times, answer)
            await eventually(lambda: s.metrics.peer_pulls.values == {(other.id, "missed"): times})
            (until, lasts) = pulls._paused[holder.id, other.id]
            assert lasts == 10 * 2 ** (times - 1)
            pulls._paused[holder.id, other.id] = (0.0, lasts)  # it is over
        learned = [pulls.seconds(*pair, TOKENS, 0.0) for pair in ((holder.id, other.id), ("c", "d"))]
        assert learned[0] == pytest.approx(learned[1], rel=1e-4) and learned[0] < 0.001, "nothing learned"


async def test_a_replica_that_fails_over_it_is_followed_by_another_without_a_pull():
    seen = []
    failing = answers(b"{}", status=b"500 Internal Server Error", seen=seen)
    async with peers(answers(usage(TOKENS, 0), seen=seen), failing) as s:
        holder, other = s.proxy.backends.values()
        status, headers, _ = await asks(s)
        assert (status, headers["x-hitherto-replica"]) == (200, holder.id)
        assert [one is None for one in told(seen)] == [False, True]
        assert s.metrics.peer_pulls.values == {(other.id, "failed"): 1}
        assert s.proxy.router.pulls.paused(holder.id, other.id, monotonic())


async def test_of_an_engine_that_tells_no_cached_tokens_no_pull_counts_as_had_and_none_is_asked_again():
    seen = []
    silent = ANSWER[:-1] + b',"usage":{"prompt_tokens":%d,"completion_tokens":1}}' % TOKENS
    async with peers(answers(), answers(silent, seen=seen)) as s:
        holder, other = s.proxy.backends.values()
        assert (await asks(s))[1]["x-hitherto-replica"] == other.id and told(seen)[0] is not None
        await eventually(lambda: s.metrics.peer_pulls.total())
        assert s.metrics.peer_pulls.values == {(other.id, "unknown"): 1}
        assert s.metrics.prefill_saved_tokens.values == {(other.id,): 0}
        s.proxy.router.map._routed.clear(other.slot)
        await asks(s)
        assert told(seen)[1:] == [None] * len(told(seen)[1:])


async def test_a_replica_that_is_full_says_nothing_of_the_pull():
    async with peers(answers(), answers(b"{}", status=b"503 Service Unavailable")) as s:
        holder, other = s.proxy.backends.values()
        assert (await asks(s))[1]["x-hitherto-replica"] == holder.id
        assert not s.proxy.router.pulls.paused(holder.id, other.id, monotonic())
        assert not s.metrics.peer_pulls.total()


async def test_a_holder_that_is_gone_is_nobodys_source():
    seen = []
    async with peers(answers(), answers(seen=seen), answers(seen=seen)) as s:
        holder, *_ = s.proxy.backends.values()
        s.becomes(holder.replica, State.FAILED)
        assert s.proxy.placing.pulls.any and (await asks(s))[0] == 200
        assert told(seen) == [None]


async def test_without_peers_nothing_is_asked():
    async with stack(answers(ANSWER), answers(ANSWER)) as s:
        assert not s.proxy.placing.pulls.any
        assert (await s.ask(post()))[0] == 200 and not s.metrics.peer_pulls.total()

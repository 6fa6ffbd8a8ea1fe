"""Prefixes that move to another replica while a request waits or is answered: it is placed by where they are then."""

import orjson
import pytest

from policies import Demand, Rules, Slo

from ..http.talk import eventually
from .replies import EVENT, chunk, post, streams
from .resume.test_resumer import GREEDY, PIPELINE, engine, told
from .stack import stack
from .test_queue import overload, waiting

BODY = orjson.dumps(GREEDY | {"messages": [{"role": "user", "content": "quality of mercy " * 1000}]})
PROMPT = PIPELINE.prepare("/v1/chat/completions", BODY)
IDS = [*memoryview(PROMPT.token_ids).cast("I")]
KEYS = range(1, len(PROMPT.hashes) + 1)  # what an engine calls its blocks


def hold(s, holder: int) -> None:
    """The replica of that number has the prompt's prefix from now on, and no other one has."""
    for number, backend in enumerate(s.proxy.backends.values()):
        s.proxy.router.map.clear(backend.slot)
        s.proxy.router.map.observed(backend.slot, True)
        if number == holder:
            s.proxy.router.map.store(backend.slot, PROMPT.hashes, KEYS)


@pytest.mark.parametrize("then", [0, 1])
async def test_a_request_that_waits_goes_to_who_has_its_prefix_when_it_leaves(then):
    """Both replicas compute somebody's prompt when it comes, and both are done at once."""
    settings = overload(slo=Slo(30.0), rules=Rules(engine_wait=0.0))
    options = {"policy": "least_time", "pipeline": PIPELINE, "overload": settings, "cached_tokens_header": True}
    async with stack(streams(chunk(EVENT)), streams(chunk(EVENT)), **options) as s:
        router, queue = s.proxy.router, s.proxy.placing.queue
        backends = [*s.proxy.backends.values()]
        busy = [router.place(Demand(4000), router.targets([one.candidate]), 0.0) for one in backends]
        hold(s, 0)
        talk = await s.say(post(BODY))
        await eventually(lambda: waiting(queue)["free"] == 1)
        hold(s, then)
        for placement in busy:
            router.abandon(placement)
        status, headers, _ = await talk.response()
        assert (status, headers["x-hitherto-replica"]) == (200, backends[then].id)
        assert int(headers["x-hitherto-cached-tokens"]) == 16 * len(PROMPT.hashes) > 3000


@pytest.mark.parametrize("holder", [1, 2])
async def test_of_two_engines_a_broken_stream_goes_on_at_the_one_that_holds_its_prefix(holder):
    """It began where its prefix was; that engine dies, and meanwhile another one of three got it."""
    seen: list[list[dict]] = [[], [], []]

    async def moves():
        hold(s, holder)

    scripts = [engine("1", b"", 2, seen[0], moves, IDS), *[engine("2", seen=one, prompt=IDS) for one in seen[1:]]]
    options = {"policy": "least_time", "pipeline": PIPELINE, "continue_streams": "exact"}
    async with stack(*scripts, **options) as s:
        hold(s, 0)
        assert told((await s.ask(post(BODY)))[2]) == ("abcdef", {"1"})
        assert [len(one) for one in seen] == [1, holder == 1, holder == 2]
        assert s.metrics.continued_streams.total(way="ids") == 1

import asyncio

import pytest
from aiohttp import web

from replicas.metrics import Scrape
from replicas.progress import HUNG, STALLED, Progress, computes


def scrape(running=1, waiting=0, generated=5, prompted=10, usage=0.1, ranks=()):
    counts = {"prompted": prompted, "generated": generated}
    return Scrape(0.0, running, waiting, usage, 0, 0, None, 16, 100, ranks=tuple(ranks), **counts)


def look(progress, seconds, *, waited=0.0, begin=0.0, **counters):
    """Once a second, nothing changes; the last moment looked at."""
    for now in range(int(begin), int(begin + seconds) + 1):
        progress.look(float(now), scrape(**counters), waited and waited + now - begin)
    return float(now)


def test_with_work_and_no_step_it_stalls_then_hangs():
    progress = Progress()
    now = look(progress, STALLED)
    assert not progress.stalled(now)  # the second look is the first that shows that nothing changed
    assert progress.stalled(now + 1) and not progress.hung(now + 1)
    now = look(progress, HUNG, begin=now)
    assert progress.hung(now + 1)


@pytest.mark.parametrize("moving", ["generated", "prompted", "usage", "waiting", ""])
def test_any_counter_that_moves_is_progress_and_so_is_an_answer_in_time(moving):
    progress = Progress()
    for now in range(300):
        counters = {moving: now / 8 if moving == "usage" else now // 8} if moving else {"running": 0}
        progress.look(float(now), scrape(**counters), 0.0 if moving else float(now % 10))
        assert not progress.stalled(float(now))


def test_one_that_hangs_still_does_when_its_requests_have_gone_elsewhere():
    progress = Progress()
    now = look(progress, STALLED + 1, running=0, waited=1.0)
    now = look(progress, 30, running=0, begin=now + 1)
    assert progress.stalled(now)
    progress.look(now + 1, scrape(running=0, generated=6), 0.0)
    assert not progress.stalled(now + 1)


def test_one_rank_that_stands_still_is_found_beside_another_that_moves():
    progress = Progress()
    for now in range(int(STALLED) + 2):
        progress.look(float(now), scrape(ranks=[scrape(generated=now), scrape()]), 3.0)
    assert progress.stalled(float(now))


async def test_asking_for_tokens(serve, session):
    asked = []

    async def engine(request):
        asked.append((request.path, await request.json()))
        if len(asked) == 2:
            await asyncio.Event().wait()
        return web.json_response({}, status=(200, 0, 404, 500)[len(asked) - 1])

    url = await serve(engine)
    assert await computes(session, url, "m", 5)
    assert asked[0] == ("/v1/completions", {"model": "m", "prompt": [1], "max_tokens": 2})
    assert not await computes(session, url, "m", 0.1)
    assert await computes(session, url, "m", 5)  # it embeds, perhaps: whoever refuses is there
    assert not await computes(session, url, "m", 5)
    assert not await computes(session, "http://127.0.0.1:9", "m", 5)


def test_an_engine_that_counts_no_tokens_is_not_judged():
    progress = Progress()
    now = look(progress, 500, generated=None)
    assert progress.still(now) == 0

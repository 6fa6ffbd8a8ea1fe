"""Errors that replicas answer with: which of them are held against the replica, and which are the request's own."""

from time import monotonic

import pytest

from ..http.talk import eventually, free_port
from .replies import ANSWER, LONG, answers, chunk, post, streams
from .stack import stack


@pytest.mark.parametrize("status", [b"401 Unauthorized", b"403 Forbidden", b"404 Not Found", b"429 Too Many Requests"])
async def test_a_replica_that_refuses_what_another_one_answers_is_passed_over_and_held_to_account(status):
    """It takes no time, so the replica would look idle and get everything."""
    async with stack(answers(b'{"error": "no"}', status), answers()) as s:
        talk, kind = await s.talk(), f"status {int(status[:3])}"
        for _ in range(6):
            await talk.say(post())
            assert (await talk.response())[0::2] == (200, ANSWER)
        await eventually(s.idle)
        assert s.faults and set(s.faults) == {kind} and not s.unconfirmed


@pytest.mark.parametrize("status", [b"401 Unauthorized", b"429 Too Many Requests"])
async def test_what_all_replicas_refuse_alike_is_held_against_none(status):
    async with stack(*[answers(b'{"error": "no"}', status)] * 3) as s:
        talk = await s.talk()
        for _ in range(6):
            await talk.say(post())
            assert (await talk.response())[0::2] == (int(status[:3]), b'{"error": "no"}')
        await eventually(s.idle)
        assert not s.faults and not s.unconfirmed and s.metrics.retries.total() <= 12


def held(s) -> list[int]:
    """Blocks of LONG that each replica is taken to hold."""
    hashes = s.proxy.models.pipelines[0].prepare("/v1/chat/completions", LONG).hashes
    assert len(hashes) > 3
    return [s.proxy.router.map.match(hashes, monotonic()).held[backend.slot] for backend in s.proxy.backends.values()]


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("status", [b"400 Bad Request", b"401 Unauthorized", b"429 Too Many Requests"])
async def test_a_prompt_that_is_refused_is_not_taken_to_be_cached(status, observed):
    async with stack(answers(b"{}", status)) as s:
        (backend,) = s.proxy.backends.values()
        s.proxy.router.map.observed(backend.slot, observed)
        talk = await s.talk()
        await talk.say(post(LONG))
        assert (await talk.response())[0] == int(status[:3])
        await eventually(s.idle)
        assert held(s) == [0]


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("full", [False, True])
async def test_a_prompt_is_taken_to_be_cached_only_where_it_went_in_the_end(full, observed):
    """Nobody listens at the first, or it has no room."""
    first = {"ports": [free_port()]} if not full else {}
    async with stack(*[answers(status=b"503 Service Unavailable")] * full, answers(), **first) as s:
        for backend in s.proxy.backends.values():
            s.proxy.router.map.observed(backend.slot, observed)
        talk = await s.talk()
        for _ in range(2):  # one of them meets the first one first
            await talk.say(post(LONG))
            assert (await talk.response())[0] == 200
        await eventually(s.idle)
        assert s.metrics.retries.total() >= 1
        there, here = held(s)
        assert there == 0 and here > 3


@pytest.mark.parametrize(("status", "kind"), [(500, "status 500"), (507, "status 5xx")])
async def test_a_5xx_of_the_only_replica_is_counted_and_held_against_nobody_yet(status, kind):
    async with stack(answers(b"{}", b"%d No" % status)) as s:
        (backend,) = s.proxy.backends.values()
        talk = await s.talk()
        await talk.say(post())
        got, headers, _ = await talk.response()
        assert got == status and "x-should-retry" not in headers
        assert (
            s.faults == []
            and s.unconfirmed == [backend.id]
            and s.metrics.upstream_errors.values == {(backend.id, kind): 1}
        )


async def test_what_one_replica_fails_and_another_answers_counts_against_the_first():
    async with stack(answers(b"{}", b"500 No"), answers()) as s:
        bad, _ = s.proxy.backends.values()
        talk = await s.talk()
        for _ in range(2):
            await talk.say(post())
            assert (await talk.response())[0] == 200
        assert set(s.faults) == {"status 500"} and s.metrics.upstream_errors.values == {
            (bad.id, "status 500"): len(s.faults)
        }


ENGINES_ERROR = b'{"error":{"message":"no filter named \'x\'","type":"InternalServerError","code":500}}'


@pytest.mark.parametrize(
    "failing",
    [answers(ENGINES_ERROR, b"500 Internal Server Error"), streams(chunk(b"data: " + ENGINES_ERROR + b"\n\n"))],
)
async def test_what_two_engines_fail_is_the_requests_fault_and_no_third_is_asked(failing):
    async with stack(failing, failing, failing, retries=5) as s:
        talk = await s.talk()
        for number in range(1, 4):
            await talk.say(post())
            _, headers, body = await talk.response()
            assert ENGINES_ERROR in body and headers["x-should-retry"] == "false"
            assert s.faults == [] and s.metrics.retries.total() == number
        await eventually(lambda: s.metrics.requests.total(status="5xx") == 3)
        assert (
            sum(s.metrics.upstream_errors.values.values())
            == s.metrics.upstream_errors.total(kind="request")
            == len(s.unconfirmed)
            == 6
        )
        await eventually(s.idle)


async def test_two_broken_engines_do_not_keep_requests_from_a_third_for_long():
    """Each fails whatever it is asked, which the first requests cannot show."""
    broken = answers(ENGINES_ERROR, b"500 Internal Server Error")
    async with stack(broken, broken, answers(), policy="least_load") as s:
        talk, statuses = await s.talk(), []
        for _ in range(20):
            await talk.say(post())
            statuses.append((await talk.response())[0])
        assert statuses.count(500) <= 6 and set(statuses[-10:]) == {200}
        assert "status 500" in s.faults, "the third answered, so they are to blame"


async def test_a_request_that_another_replica_refuses_is_at_fault():
    async with stack(
        answers(ENGINES_ERROR, b"500 Internal Server Error"),
        answers(b'{"error":{"message":"bad"}}', b"400 Bad Request"),
    ) as s:
        talk = await s.talk()
        for _ in range(2):
            await talk.say(post())
            assert (await talk.response())[0] == 400
        assert (
            s.faults == [] and s.metrics.upstream_errors.total(kind="request") == s.metrics.upstream_errors.total() > 0
        )


async def test_full_replicas_agree_on_nothing():
    async with stack(*[answers(b"{}", b"503 Busy")] * 3, answers()) as s:
        talk = await s.talk()
        await talk.say(post())
        status = (await talk.response())[0]
        assert (status, s.metrics.retries.total(reason="status 503")) == (503, 2) and s.unconfirmed == []

"""Errors that replicas answer with: which of them are held against the replica, and which are the request's own."""

from time import monotonic

import pytest

from gateway.datapath import _access, explain

from ..http.talk import eventually, free_port
from .replies import BODY, LONG, answers, chunk, post, streams
from .stack import stack


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
        assert (await s.ask(post(LONG)))[0] == int(status[:3])
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
            assert (await talk.ask(post(LONG)))[0] == 200
        await eventually(s.idle)
        assert s.metrics.retries.total() >= 1
        there, here = held(s)
        assert there == 0 and here > 3


@pytest.mark.parametrize(("status", "kind"), [(500, "status 500"), (507, "status 5xx")])
async def test_a_5xx_of_the_only_replica_is_counted_and_held_against_nobody_yet(status, kind):
    async with stack(answers(b"{}", b"%d No" % status)) as s:
        (backend,) = s.proxy.backends.values()
        got, headers, _ = await s.ask(post())
        assert got == status and "x-should-retry" not in headers
        assert s.faults == []
        assert s.unconfirmed == [backend.id]
        assert s.metrics.upstream_errors.values == {(backend.id, kind): 1}


ENGINES_ERROR = b'{"error":{"message":"no filter named \'x\'","type":"InternalServerError","code":500}}'


@pytest.mark.parametrize(
    "failing",
    [answers(ENGINES_ERROR, b"500 Internal Server Error"), streams(chunk(b"data: " + ENGINES_ERROR + b"\n\n"))],
)
async def test_what_two_engines_fail_is_the_requests_fault_and_no_third_is_asked(failing):
    async with stack(failing, failing, failing, retries=5) as s:
        talk = await s.talk()
        for number in range(1, 4):
            _, headers, body = await talk.ask(post())
            assert ENGINES_ERROR in body and headers["x-should-retry"] == "false"
            assert s.faults == [] and s.metrics.retries.total() == number
        await eventually(lambda: s.metrics.requests.total(status="5xx") == 3)
        errors = s.metrics.upstream_errors
        assert errors.total() == errors.total(kind="request") == len(s.unconfirmed) == 6


async def test_two_broken_engines_do_not_keep_requests_from_a_third_for_long():
    """Each fails whatever it is asked, which the first requests cannot show."""
    broken = answers(ENGINES_ERROR, b"500 Internal Server Error")
    async with stack(broken, broken, answers(), policy="least_load") as s:
        talk, statuses = await s.talk(), []
        for _ in range(20):
            statuses.append((await talk.ask(post()))[0])
        assert statuses.count(500) <= 6 and set(statuses[-10:]) == {200}
        assert "status 500" in s.faults, "the third answered, so they are to blame"


async def test_a_request_that_another_replica_refuses_is_at_fault():
    refusing = answers(b'{"error":{"message":"bad"}}', b"400 Bad Request")
    async with stack(answers(ENGINES_ERROR, b"500 Internal Server Error"), refusing) as s:
        talk = await s.talk()
        for _ in range(2):
            assert (await talk.ask(post()))[0] == 400
        assert s.faults == []
        assert s.metrics.upstream_errors.total(kind="request") == s.metrics.upstream_errors.total() > 0


FULL_EVENT = b'data: {"error":{"message":"The request queue is full.","type":"%b","code":%d}}\n\n'


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("in_stream", [False, True])
async def test_full_replicas_agree_on_nothing(status, in_stream, caplog):
    """SGLang tells a full queue in the first event of a stream."""
    full = answers(b"{}", b"%d Full" % status, b"Retry-After: 7\r\n")
    if in_stream:
        full = streams(chunk(FULL_EVENT % (b"overloaded", status)))
    caplog.set_level("INFO", "hitherto.access")
    async with stack(full, full, full, answers(), on_end=[_access]) as s:
        got, headers, _ = await s.ask(post())
        assert got == (200 if in_stream else status) and "x-should-retry" not in headers
        assert in_stream or headers["retry-after"] == "7"
        assert s.metrics.retries.total(reason=f"status {status}") == 2 and s.unconfirmed == s.faults == []
        assert all(backend.is_witness for backend in s.proxy.backends.values())
        await eventually(s.idle)
        assert s.metrics.rejections.total(reason="engines_full") == (status == 429)
        (line,) = caplog.records
        assert line.fields["reason"] == ("engines_full" if status == 429 else None)


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/embeddings", b"/rerank"])
@pytest.mark.parametrize("status", [b"429 Too Many Requests", b"503 Service Unavailable"])
@pytest.mark.parametrize(
    "told", [b"Retry-After: 30\r\n", b"Retry-After: Fri, 31 Dec 2077 23:59:59 GMT\r\n", b"Retry-After: soon\r\n", b""]
)
async def test_a_full_replica_is_asked_last_for_as_long_as_it_says(told, status, path):
    """It refuses within a millisecond, so by load it would be asked first by nearly all."""
    asked = []
    async with stack(answers(b"{}", status, told, seen=asked), answers(), policy="least_load") as s:
        full, other = s.proxy.backends.values()
        talk = await s.talk()
        while not asked:
            assert (await talk.ask(post(path=path)))[0] == 200
        left = full.full_until - monotonic()
        assert (1 < left <= 60) if told and b"soon" not in told else left <= 1 < full.full_until
        full.full_until += 60
        s.proxy.eligible.full_until += 60
        for _ in range(20):
            assert (await talk.ask(post(path=path)))[0] == 200
        assert len(asked) == 1
        told = await explain(s.proxy, "/v1/chat/completions", BODY, {})
        assert [one["id"] for one in told["replicas"]] == [other.id]


async def test_where_all_are_full_each_is_asked_as_before_and_another_process_is_not_full():
    asked = []
    full = answers(b"{}", b"503 Full", b"Retry-After: 30\r\n", seen=asked)
    async with stack(full, full) as s:
        talk = await s.talk()
        for number in (1, 2):
            assert (await talk.ask(post()))[0] == 503 and len(asked) == 2 * number
        for backend in s.proxy.backends.values():
            assert backend.full_until > monotonic()
            backend.follow_incarnation()
            assert backend.full_until < monotonic()


async def test_who_is_not_full_is_found_once_until_that_changes():
    """Rather than for each request, of which there are thousands before a replica has room again."""
    async with stack(ports=range(9001, 9041)) as s:  # nobody is asked
        backends, eligible = [*s.proxy.backends.values()], s.proxy.eligible
        for backend in backends[20:]:
            backend.replica.models = {"other": None}
        s.proxy.changed()

        def left(model, now):
            return eligible.but_full(eligible.ready_for(model), now)

        eligible.when_full(backends[0], 130.0)
        assert left("m", 100.0) is left("m", 129.0) and left("other", 100.0) is eligible.ready_for("other")
        assert len(left("m", 100.0)) == 19 and left("m", 100.0).roster is not None
        eligible.when_full(backends[1], 120.0)
        eligible.when_full(backends[20], 110.0)
        assert left("m", 101.0) is left("m", 109.0) is not left("other", 101.0) is left("other", 109.0)
        assert [len(left(*one)) for one in (("m", 109.0), ("other", 109.0))] == [18, 19]
        assert [len(left(*one)) for one in (("m", 110.0), ("other", 110.0))] == [18, 20]
        assert [len(left("m", now)) for now in (119.0, 120.0, 130.0)] == [18, 19, 20]
        assert len(eligible.but_full(eligible.targets(None, (backends[2],), "m"), 109.0)) == 17, "nor who was asked"

        backends[0].follow_incarnation()
        s.proxy.changed()
        assert eligible.full_until == 120.0
        ready, others = ({one.replica for one in of.candidates} for of in (eligible.ready_for("m"), left("m", 100.0)))
        assert ready - others == {backends[1].id}
        backends[1].follow_incarnation()
        s.proxy.changed()
        assert eligible.full_until == 110.0 and left("m", 100.0) is eligible.ready_for("m")

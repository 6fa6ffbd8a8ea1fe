"""A connection is used only if it leads to the process that was chosen: who may be another one is looked at first."""

import asyncio

import pytest

from replicas import State

from ..http.talk import eventually
from .replies import ANSWER, answers, post
from .stack import stack


class Broken(asyncio.Transport):
    """A connection to an engine that has ended."""

    def is_closing(self) -> bool:
        return True


async def respond(s) -> tuple[int, bytes]:
    return (await s.ask(post()))[0::2]


def doubted(s, look):
    """Each replica has to prove itself, and `look(replica)` is what comes of it: None if nothing answers. Returns who
    was looked at."""
    looked = []

    async def prove(id: str) -> bool:
        looked.append(id)
        await asyncio.sleep(0)
        return look(s.proxy.backends[id].replica) is not None

    for backend in s.proxy.backends.values():
        backend.prove, backend.replica.proof, backend.replica.incarnation = prove, Broken(), "1"
    return looked


def is_the_same(replica):
    replica.proof = None
    return replica


def is_another(replica):
    replica.proof, replica.incarnation = None, "2"
    return replica


async def test_the_same_process_gets_the_request_once_it_has_proved_to_be_that():
    seen = []
    async with stack(answers(seen=seen)) as s:
        looked = doubted(s, lambda replica: (seen.append("looked"), is_the_same(replica)))
        assert await respond(s) == (200, ANSWER)
        assert len(looked) == 1 and seen[0] == "looked" and len(seen) == 2
        assert not s.faults and not s.metrics.retries.total()


@pytest.mark.parametrize(
    ("look", "retries"),
    [(lambda replica: replica, {}), (is_another, {("replaced",): 1})],
    ids=["answered all and closed its connection again", "is another process that serves"],
)
async def test_who_serves_gets_the_request_as_any_replica_would_and_nobody_is_blamed(look, retries):
    seen = []
    async with stack(answers(seen=seen)) as s:
        looked = doubted(s, look)
        assert await respond(s) == (200, ANSWER)
        assert len(looked) == len(seen) == 1 and s.metrics.retries.values == retries and not s.faults


async def test_what_is_no_engine_any_more_gets_nothing():
    def is_none(replica):
        replica.proof, replica.state = None, State.WARMING
        s.proxy.changed()
        return replica

    seen, others = [], []
    async with stack(answers(seen=seen), answers(seen=others)) as s:
        doubted(s, is_none)
        first, second = s.proxy.backends.values()
        second.replica.proof = None
        for _ in range(3):
            assert await respond(s) == (200, ANSWER)
        assert not seen and len(others) == 3
        second.replica.proof = Broken()
        second.pool.sweep(float("inf"))
        status, body = await respond(s)
        assert status == 503 and b"ready" in body
        await eventually(s.idle)
        assert s.metrics.replica_requests.values == {(second.id, "2xx"): 3}, "it was sent nothing the fourth time"


async def test_who_cannot_be_looked_at_is_as_good_as_away():
    async with stack(answers(), answers()) as s:
        looked = doubted(s, lambda replica: None)
        list(s.proxy.backends.values())[1].replica.proof = None
        assert await respond(s) == (200, ANSWER)
        assert len(looked) == 1 and s.faults == ["connect"]


async def test_a_replica_that_is_drained_before_it_was_looked_at_is_not_blamed():
    def drains(replica):
        s.becomes(replica, State.DRAINING)

    async with stack(answers(), answers()) as s:
        doubted(s, drains)
        list(s.proxy.backends.values())[1].replica.proof = None
        assert await respond(s) == (200, ANSWER)
        assert not s.faults and s.metrics.retries.values == {("replaced",): 1}


async def test_a_client_that_leaves_meanwhile_and_a_replica_that_is_removed_leave_nothing_behind():
    async with stack(answers()) as s:
        (backend,) = s.proxy.backends.values()
        asked, hold = [], asyncio.Event()

        async def prove(id: str) -> bool:
            asked.append(id)
            return await hold.wait()

        backend.prove, backend.replica.proof = prove, Broken()
        first, second = await s.talk(), await s.talk()
        await first.say(post())
        await eventually(lambda: len(asked) == 1)
        await first.close()
        await eventually(s.idle)
        await second.say(post())
        await eventually(lambda: len(asked) == 2)
        s.proxy.remove(backend.id)
        status, _, _ = await second.response()
        assert status == 503
        await eventually(lambda: not backend.pool._connecting)


async def test_a_bug_in_the_question_who_is_there_does_not_keep_the_request_waiting(caplog):
    async with stack(answers(), answers()) as s:
        first, second = s.proxy.backends.values()

        async def prove(id: str) -> bool:
            raise ZeroDivisionError("a bug")

        first.prove, first.replica.proof = prove, Broken()
        assert await respond(s) == (200, ANSWER)
        assert s.faults == ["connect"] and "a bug" in caplog.text


def another(replica):
    """It may have been looked at by its watcher meanwhile, and be proven, as another process."""
    replica.incarnation = "2"


@pytest.mark.parametrize(
    ("becomes", "replicas", "retries"),
    [
        (another, 1, {("replaced",): 1}),
        (lambda replica: setattr(replica, "state", State.DRAINING), 1, {}),  # it gets what it was chosen for
        (lambda replica: setattr(replica, "state", State.LEAVING), 2, {("replaced",): 1}),  # and this one nothing new
    ],
    ids=["another process", "drains", "leaves"],
)
async def test_what_changed_while_its_connection_was_being_opened_is_looked_at_again(becomes, replicas, retries):
    async with stack(*[answers()] * replicas) as s:
        backend = next(iter(s.proxy.backends.values()))
        opened, backend.pool.connect = [], lambda *given: opened.append(given)
        talk = await s.say(post())
        await eventually(lambda: opened)
        becomes(backend.replica)
        s.proxy.changed()
        type(backend.pool).connect(backend.pool, *opened[0])
        if retries and replicas == 1:
            await eventually(lambda: len(opened) == 2)
            type(backend.pool).connect(backend.pool, *opened[1])
        assert (await talk.response())[0] == 200
        assert not s.faults and s.metrics.retries.values == retries

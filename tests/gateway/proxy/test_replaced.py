"""A connection is used only if it leads to the process that was chosen: who may be another one is looked at first."""

import asyncio

from replicas import State

from ..http.talk import Talker, eventually
from .replies import ANSWER, answers, post
from .stack import stack


class Broken(asyncio.Transport):
    """A connection to an engine that has ended."""

    def is_closing(self) -> bool:
        return True


async def respond(s) -> tuple[int, bytes]:
    talk: Talker = await s.talk()
    status, _, body = await talk.ask(post())
    return status, body


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


async def test_who_answered_all_and_closed_its_connection_again_gets_the_request():
    seen = []
    async with stack(answers(seen=seen)) as s:
        looked = doubted(s, lambda replica: replica)
        assert await respond(s) == (200, ANSWER)
        assert len(looked) == len(seen) == 1 and not s.faults


async def test_another_process_that_serves_gets_it_as_any_replica_would_and_nobody_is_blamed():
    seen = []
    async with stack(answers(seen=seen)) as s:
        looked = doubted(s, is_another)
        assert await respond(s) == (200, ANSWER)
        assert len(looked) == len(seen) == 1
        assert s.metrics.retries.values == {("replaced",): 1} and not s.faults


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


async def test_what_was_replaced_while_its_connection_was_being_opened_gets_nothing():
    """It may have been looked at by its watcher meanwhile, and be proven, as another process."""
    async with stack(answers()) as s:
        (backend,) = s.proxy.backends.values()
        opened, backend.pool.connect = [], lambda *given: opened.append(given)
        talk = await s.say(post())
        await eventually(lambda: opened)
        backend.replica.incarnation = "2"
        type(backend.pool).connect(backend.pool, *opened[0])
        await eventually(lambda: len(opened) == 2)
        assert s.metrics.retries.values == {("replaced",): 1}
        type(backend.pool).connect(backend.pool, *opened[1])
        assert (await talk.response())[0] == 200


async def test_who_cannot_be_looked_at_is_as_good_as_away():
    async with stack(answers(), answers()) as s:
        looked = doubted(s, lambda replica: None)
        list(s.proxy.backends.values())[1].replica.proof = None
        assert await respond(s) == (200, ANSWER)
        assert len(looked) == 1 and s.faults == ["connect"]


async def test_a_replica_that_drains_gets_what_it_was_chosen_for():
    async with stack(answers()) as s:
        (backend,) = s.proxy.backends.values()
        opened, backend.pool.connect = [], lambda *given: opened.append(given)
        talk = await s.say(post())
        await eventually(lambda: opened)
        backend.replica.state = State.DRAINING
        type(backend.pool).connect(backend.pool, *opened[0])
        assert (await talk.response())[0] == 200


async def test_a_replica_that_began_to_leave_meanwhile_gets_nothing_new():
    async with stack(answers(), answers()) as s:
        leaving, _ = s.proxy.backends.values()
        opened, leaving.pool.connect = [], lambda *given: opened.append(given)
        talk = await s.say(post())
        await eventually(lambda: opened)
        s.becomes(leaving.replica, State.LEAVING)
        type(leaving.pool).connect(leaving.pool, *opened[0])
        assert (await talk.response())[0] == 200
        assert not s.faults and s.metrics.retries.values == {("replaced",): 1}


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

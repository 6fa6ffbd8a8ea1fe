"""Requests that come in one turn of the event loop are worked on together, and are still each other's equals."""

import asyncio
from collections import Counter

import pytest

from gateway.prompt.pipeline import OFFLOAD_BYTES, Pipeline
from gateway.proxy import exchange
from gateway.proxy.exchange import Batcher

from ..http.talk import eventually
from .replies import answers, post
from .stack import stack
from .test_large import chat

BODY = chat("Who goes there? " * 20)


async def turn() -> None:
    """Until all that was due in this turn of the loop is done."""
    await asyncio.sleep(0)


async def test_what_comes_in_one_turn_is_given_in_its_order_and_once():
    given = []
    work = Batcher(given.append)
    work.add("a")
    work.add("b")
    assert given == []
    await turn()
    work.add("c")
    await turn()
    await turn()
    assert given == [["a", "b"], ["c"]]


async def test_many_are_given_in_parts_between_which_others_have_their_turn(monkeypatch):
    monkeypatch.setattr(exchange, "MOST", 2)
    seen = []
    work = Batcher(seen.append)
    for item in range(5):
        work.add(item)
    for _ in range(4):
        asyncio.get_running_loop().call_soon(seen.append, "other")
        await turn()
    assert seen == [[0, 1], "other", [2, 3], "other", [4], "other", "other"]


async def test_work_that_fails_leaves_the_rest_to_be_done(monkeypatch):
    monkeypatch.setattr(exchange, "MOST", 1)
    done, failed = [], []

    def work(items: list[int]) -> None:
        if items == [0]:
            raise ZeroDivisionError
        done.extend(items)

    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context["exception"]))
    both = Batcher(work)
    both.add(0)
    both.add(1)
    await turn()
    await turn()
    assert done == [1] and [type(error) for error in failed] == [ZeroDivisionError]


async def at_once(s, count: int, *requests: bytes):
    """So many clients' requests, written before the loop turns."""
    talks = [await s.talk() for _ in range(count)]
    await eventually(lambda: len(s.server.connections) == len(s.talkers))
    for number, talk in enumerate(talks):
        talk.writer.write(requests[number % len(requests)])
    return [await talk.response() for talk in talks]


async def test_each_sees_what_was_reserved_for_the_one_before():
    async with stack(*[answers()] * 4, policy="least_load") as s:
        replied = await at_once(s, 8, post(BODY))
        assert Counter(headers["x-hitherto-replica"] for _, headers, _ in replied) == dict.fromkeys(s.proxy.backends, 2)


async def test_all_are_prepared_before_the_first_is_chosen_for(monkeypatch):
    stages = []

    class Watched(Pipeline):
        def prepare_parsed(self, *given):
            stages.append("prepare")
            return super().prepare_parsed(*given)

    async with stack(answers(), pipeline=Watched(None, "m", 16)) as s:
        choose = s.proxy.router.policy.choose
        monkeypatch.setattr(s.proxy.router.policy, "choose", lambda *given: stages.append("choose") or choose(*given))
        assert [status for status, _, _ in await at_once(s, 3, post(BODY))] == [200] * 3
        assert stages == ["prepare"] * 3 + ["choose"] * 3


@pytest.mark.parametrize("padding", ["", "x" * OFFLOAD_BYTES], ids=["short", "in a thread"])
async def test_a_bug_in_choosing_ends_the_request_that_it_struck_with_an_answer(padding, monkeypatch, caplog):
    async with stack(answers()) as s:
        choose = s.proxy.router.policy.choose

        def fails_for_some(demand, *given):
            if demand.session == "unlucky":
                raise ZeroDivisionError("a bug")
            return choose(demand, *given)

        monkeypatch.setattr(s.proxy.router.policy, "choose", fails_for_some)
        body = chat("hi" + padding)
        replied = await at_once(s, 4, post(body), post(body, extra=b"x-session-id: unlucky\r\n"))
        assert [status for status, _, _ in replied] == [200, 500, 200, 500]
        assert "ZeroDivisionError: a bug" in caplog.text
        assert b"a bug" not in replied[1][2]


async def test_a_bug_in_learning_from_an_answer_costs_nobody_theirs(monkeypatch, caplog):
    async with stack(answers()) as s:
        monkeypatch.setattr(s.proxy.settling, "finish", lambda *given: 1 / 0)
        for _ in range(2):
            assert [status for status, _, _ in await at_once(s, 3, post(BODY))] == [200] * 3
        await eventually(lambda: caplog.text.count("learning from an answer failed") == 6)

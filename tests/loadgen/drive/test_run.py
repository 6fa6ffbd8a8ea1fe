import asyncio

import orjson
import pytest

from loadgen.drive.client import Client
from loadgen.drive.run import CHAT, COMPLETIONS, Asking, Run
from loadgen.workload.conversations import Conversation, Turn, span
from loadgen.workload.synthetic import text, token_ids


def said(text: str) -> dict:
    return {"role": "user", "content": text}


def singles(number: int) -> list[Conversation]:
    return [Conversation(f"c{index}", [Turn([said(f"q{index}")], 4)]) for index in range(number)]


async def go(run: Run) -> Run:
    async with asyncio.timeout(20):
        await run.go()
    run.client.close()
    return run


async def test_open_loop_a_server_that_waits_for_all_gets_all(engine, wire):
    """Nothing is answered before the tenth request has come: a closed loop would never end."""
    full = asyncio.Event()

    async def respond(request, writer):
        if server.inflight == 10:
            full.set()
        await full.wait()
        writer.write(wire.answer())

    async with engine(respond) as server:
        run = await go(Run(singles(10), [index * 0.005 for index in range(10)], Client(server.url), Asking("m")))
        assert [record.error for record in run.done] == [None] * 10
        assert run.not_sent == 0 and run.inflight == {}


async def test_a_turn_follows_the_reply_before_it(engine, wire):
    async def respond(request, writer):
        writer.write(wire.answer(f"answer {len(server.requests)}"))

    turns = [
        Turn([{"role": "system", "content": "s"}, said("one")], 8),
        Turn([said("two")], 9, think=0.05),
        Turn([said("three")], 10),
    ]
    async with engine(respond) as server:
        run = await go(
            Run([Conversation("c", turns, {"tools": [1]})], [0.0], Client(server.url), Asking("m", engine_replies=True))
        )
        bodies = [request.json for request in server.requests]
        heard = [message["content"] for message in bodies[2]["messages"]]
        assert heard == ["s", "one", "answer 1", "two", "answer 2", "three"]
        assert bodies[2]["messages"][2] == {"role": "assistant", "content": "answer 1"}
        assert [body["max_tokens"] for body in bodies] == [8, 9, 10]
        assert all(body["tools"] == [1] and body["stream"] and body["model"] == "m" for body in bodies)
        first, second, third = run.done
        assert second.due == pytest.approx(first.last + 0.05)
        assert second.sent >= second.due
        assert third.due == pytest.approx(second.last)
        assert [record.turn for record in run.done] == [0, 1, 2]


@pytest.mark.parametrize("engine_replies, expected", [(False, "from the file"), (True, "fine")])
async def test_whose_replies_stay(engine, wire, engine_replies, expected):
    turns = [Turn([said("one")], 8, {"role": "assistant", "content": "from the file"}), Turn([said("two")], 8)]
    async with engine(wire.answer("fine")) as server:
        await go(Run([Conversation("c", turns)], [0.0], Client(server.url), Asking("m", engine_replies=engine_replies)))
        assert server.requests[1].json["messages"][1]["content"] == expected


async def test_a_reply_with_tool_calls_is_kept_since_results_name_them(engine, wire):
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    turns = [Turn([said("one")], 8, call), Turn([{"role": "tool", "tool_call_id": "1", "content": "r"}], 8)]
    async with engine(wire.answer("fine")) as server:
        await go(Run([Conversation("c", turns)], [0.0], Client(server.url), Asking("m", engine_replies=True)))
        assert server.requests[1].json["messages"][1] == call


async def test_a_bound_on_concurrency_shows_up_as_lateness(engine, wire):
    async def respond(request, writer):
        await asyncio.sleep(0.02)  # the service time
        writer.write(wire.answer())

    async with engine(respond) as server:
        run = await go(Run(singles(6), [0.0] * 6, Client(server.url), Asking("m"), max_concurrency=2))
        assert server.most_inflight == 2
        late = sorted(record.lateness for record in run.done)
        assert late[-1] >= 0.04 and late[0] < late[-1]
        assert all(record.e2e < record.e2e + record.lateness for record in run.done if record.lateness > 0.03)


async def test_stopping_keeps_what_is_known(engine, wire):
    answered = asyncio.Event()

    async def respond(request, writer):
        if len(server.requests) > 3:
            answered.set()
            await asyncio.Event().wait()
        writer.write(wire.answer())

    async with engine(respond) as server:
        run = Run(singles(6), [0.0, 0.0, 0.0, 0.1, 0.1, 60.0], Client(server.url), Asking("m"))
        going = asyncio.create_task(go(run))
        async with asyncio.timeout(10):
            await answered.wait()
            run.stop()
            await going
        assert len(run.done) == 3 and run.not_sent == 3
        assert run.interrupted and run.inflight == {}


def test_bodies():
    turn = Turn([said("hello")], 5)
    chat = Asking("m", extra={"temperature": 0, "stream_options": None}, ignore_eos=True)
    body = orjson.loads(chat.body(turn.messages, turn, {}))
    own = {"max_tokens": 5, "stream": True, "ignore_eos": True, "temperature": 0}
    assert body == {"model": "m", "messages": turn.messages, **own}
    text = orjson.loads(Asking("m", COMPLETIONS, completions=True).body([said("a"), said("b")], turn, {}))
    assert text["prompt"] == "a\n\nb" and "messages" not in text
    assert Asking("m").endpoint == CHAT


def spans(role: str, *lengths: int) -> dict:
    return {"role": role, "content": tuple(span(length, length) for length in lengths)}


@pytest.mark.parametrize("completions", [True, False])
async def test_spans_become_token_ids_or_words(engine, wire, completions):
    turns = [Turn([spans("system", 20), spans("user", 5, 7)], 3, spans("assistant", 3)), Turn([spans("user", 9)], 4)]
    asking = Asking("m", COMPLETIONS if completions else CHAT, completions, salt=1)
    async with engine(wire.answer()) as server:
        await go(Run([Conversation("c", turns)], [0.0], Client(server.url), asking))
        first, second = (request.json for request in server.requests)
        lengths = (20, 5, 7, 3, 9)
        if completions:
            assert second["prompt"] == token_ids([span(length, length) for length in lengths], 1).tolist()
            assert first["prompt"] == second["prompt"][:32]
        else:
            assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
            assert second["messages"][:2] == first["messages"]
            assert second["messages"][1]["content"] == text([span(5, 5), span(7, 7)], 1)


async def test_forks_go_on_from_what_was_said_while_their_origin_goes_on_too(engine, wire):
    """All three conversations wait for each other at their last turn."""
    together = asyncio.Event()

    async def respond(request, writer):
        if request.json["messages"][-1]["content"] == "last":
            if server.inflight == 3:
                together.set()
            await together.wait()
        writer.write(wire.answer("reply"))

    branches = tuple(Conversation(f"c.{number}", [Turn([said("last")], 4, think=0.01)]) for number in range(2))
    origin = Conversation("c", [Turn([said("one")], 4, forks=branches), Turn([said("last")], 4)])
    async with engine(respond) as server:
        run = await go(Run([origin], [0.0], Client(server.url), Asking("m")))
        assert run.total == len(run.done) == 4
        heard = [[message["content"] for message in request.json["messages"]] for request in server.requests]
        assert heard == [["one"], *[["one", "reply", "last"]] * 3]
        forked = [record for record in run.done if record.conversation != "c"]
        assert all(record.due == pytest.approx(run.done[0].last + 0.01) for record in forked)


async def test_a_closed_loop_begins_a_conversation_when_a_user_is_free(engine, wire):
    async with engine(wire.answer()) as server:
        run = await go(Run(singles(20), [0.0] * 20, Client(server.url), Asking("m"), users=3))
        assert len(run.done) == 20 and server.most_inflight <= 3 and server.connections <= 3
        ended = sorted(record.last for record in run.done)
        later = sorted(record.due for record in run.done)[3:]
        assert all(due >= end for due, end in zip(later, ended))


@pytest.mark.parametrize(
    "reply, errors", [(None, ["http_500"]), ({"role": "assistant", "content": "x"}, ["http_500", None])]
)
async def test_after_a_failure_a_conversation_goes_on_only_with_a_reply_of_its_file(engine, wire, reply, errors):
    async def respond(request, writer):
        writer.write(wire.whole({}, 500) if len(server.requests) == 1 else wire.answer())

    async with engine(respond) as server:
        turns = [Turn([said("one")], 8, reply), Turn([said("two")], 8)]
        run = await go(Run([Conversation("c", turns)], [0.0], Client(server.url), Asking("m")))
        assert [record.error for record in run.done] == errors and run.not_sent == 2 - len(errors)

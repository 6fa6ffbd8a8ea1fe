"""Which model a load asks for, and what is said where a server names none."""

import json

import pytest

from loadgen.drive.client import Client
from loadgen.drive.target import Model, Unreachable, model_of


async def test_the_first_model_that_a_server_lists_is_asked_for(engine, wire):
    async with engine(wire.whole({"data": [{"id": "one"}, {"id": "two"}]})) as server:
        client = Client(server.url)
        assert await model_of(client, None) == Model("one") and await model_of(client, "three") == Model("three")
        client.close()


@pytest.mark.parametrize(
    "status, body, said",
    [
        (
            503,
            {"error": {"message": "no replica is ready (a:1 is starting)"}},
            r"answers 503: no replica is ready \(a:1 is starting\)",
        ),
        (503, b"<html>", "answers 503 to /v1/models and lists no model; name one with --model"),
        (200, {"data": []}, "answers 200 to /v1/models and lists no model"),
        (404, {"detail": "Not Found"}, "answers 404 to .* with --model, or is this not the clients' port\\?$"),
        (
            401,
            {"error": {"message": "an API key is needed"}},
            "answers 401 to /v1/models: it wants an API key, or another one; set OPENAI_API_KEY in the environment$",
        ),
    ],
)
async def test_a_server_that_lists_none_is_told_with_what_to_do(engine, wire, status, body, said):
    async with engine(wire.whole(body, status)) as server:
        client = Client(server.url)
        with pytest.raises(Unreachable, match=said):
            await model_of(client, None)
        client.close()


@pytest.mark.parametrize(
    "config, known",
    [
        ({"vocab_size": 8192}, 8192),
        ({"text_config": {"vocab_size": 512}}, 512),
        *((bad, None) for bad in ({}, [], {"vocab_size": "many"}, {"vocab_size": -1})),
    ],
)
async def test_the_vocabulary_is_that_of_the_folder_the_engine_was_started_with(engine, wire, tmp_path, config, known):
    (tmp_path / "config.json").write_text(json.dumps(config))
    cards = [
        {"id": "tiny", "root": str(tmp_path), "parent": None},
        {"id": "sql", "root": "/adapters/sql", "parent": "tiny"},
    ]
    async with engine(wire.whole({"data": cards})) as server:
        client = Client(server.url)
        for asked, name in ((None, "tiny"), ("tiny", "tiny"), ("sql", "sql")):
            assert await model_of(client, asked) == Model(name, known)
        client.close()


@pytest.mark.parametrize("root", [{}, {"root": "/of/another/machine"}, {"root": "nobody/nothing"}, {"root": 5}])
async def test_of_a_model_that_is_not_at_hand_no_vocabulary_is_known(engine, wire, root):
    async with engine(wire.whole({"data": [{"id": "tiny", **root}]})) as server:
        client = Client(server.url)
        assert await model_of(client, None) == Model("tiny")
        client.close()


async def test_a_server_that_lists_nothing_is_asked_for_the_model_that_was_named(engine, wire):
    async with engine(wire.whole(b"<html>", 404)) as server:
        client = Client(server.url)
        assert await model_of(client, "mine") == Model("mine")
        client.close()

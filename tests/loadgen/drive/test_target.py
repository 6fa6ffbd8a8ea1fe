"""Which model a load asks for, and what is said where a server names none."""

import re

import pytest

from loadgen.drive.client import Client
from loadgen.drive.target import Unreachable, model_of


async def test_the_first_model_that_a_server_lists_is_asked_for(engine, wire):
    async with engine(wire.whole({"data": [{"id": "one"}, {"id": "two"}]})) as server:
        client = Client(server.url)
        assert await model_of(client, None) == "one" and await model_of(client, "three") == "three"
        client.close()


STARTING = "no replica is ready (a:1 is starting)"
KEY = "it wants an API key, or another one; set OPENAI_API_KEY in the environment"


@pytest.mark.parametrize("status, body, said", [
    (503, {"error": {"message": STARTING}}, f"answers 503: {STARTING}"),
    (503, b"<html>", "/v1/models and lists no model; name one with --model, or is this not the clients' port?"),
    (200, {"data": []}, "answers 200 to /v1/models and lists no model"),
    (404, {"detail": "Not Found"}, "answers 404 to /v1/models and lists no model; name one with --model"),
    (401, {"error": {"message": "an API key is needed"}}, f"answers 401 to /v1/models: {KEY}"),
])  # fmt: skip
async def test_a_server_that_lists_none_is_told_with_what_to_do(engine, wire, status, body, said):
    async with engine(wire.whole(body, status)) as server:
        client = Client(server.url)
        with pytest.raises(Unreachable, match=re.escape(said)):
            await model_of(client, None)
        client.close()

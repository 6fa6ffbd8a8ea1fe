"""Which model a load asks for, and what is said where a server names none."""

import pytest

from loadgen.drive.client import Client
from loadgen.drive.target import Unreachable, model_of


async def test_the_first_model_that_a_server_lists_is_asked_for(engine, wire):
    async with engine(wire.whole({"data": [{"id": "one"}, {"id": "two"}]})) as server:
        client = Client(server.url)
        assert await model_of(client, None) == "one" and await model_of(client, "three") == "three"
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

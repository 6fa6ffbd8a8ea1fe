"""What a request says about going on with its answer, of bodies of any form."""

import tracemalloc
from array import array

import orjson
import pytest

from gateway.prompt.api.resumable import FIELD, TOOLS, terms_of
from gateway.prompt.prompt import CHAT, RESPONSES, Prompt

PLAIN = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 9}
MANY = {str(i): 0 for i in range(180_000)}


def terms(body: bytes):
    return terms_of(Prompt(CHAT, "m", stream=True, max_tokens=9), body)


def most_bytes(call) -> int:
    """Of memory that `call` holds at one moment: each object of a parsed body takes at least 24."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "more", [{"metadata": MANY}, MANY, {"other": MANY}, {"metadata": [{}] * 249_000 + [""] * 380_000}], ids=range(4)
)
def test_a_body_of_many_members_is_not_turned_into_objects(more):
    """That took 59 ms on the event loop, and 25 times the bytes of the body."""
    body = orjson.dumps(PLAIN | more)
    parsed = most_bytes(lambda: orjson.loads(body))
    assert most_bytes(lambda: terms(body)) < parsed / 3
    found = terms(body)
    ids = array("I", [1, 2]).tobytes()
    assert most_bytes(lambda: found.rest(CHAT, ids, 1, 9, (b'"ids":', b""))) < parsed / 3


def test_what_means_the_same_for_the_rest_is_sent_as_it_came():
    body = orjson.dumps(PLAIN | {"metadata": MANY, "temperature": 0}).replace(
        b'"temperature"', b' "temper\\u0061ture" '
    )
    found = terms(body)
    assert found.greedy and not found.no_ids
    rest = orjson.loads(found.rest(CHAT, array("I", [1, 2]).tobytes(), 1, 9, (b'"ids":', b"")))
    assert rest["metadata"] == MANY and rest["temperature"] == 0 and rest["max_tokens"] == 8 and rest["ids"] == [1, 2]


def test_of_a_body_without_such_fields_the_rest_is_json_as_well():
    found = terms(b'{"messages":[]}')
    assert orjson.loads(found.rest(CHAT, b"", 0, None, (b'"ids":', b"")))["ids"] == []


@pytest.mark.parametrize(
    "more, no_ids",
    [
        ({}, ""),
        ({"other": 1}, FIELD),
        ({"logprobs": True}, FIELD),
        ({"logprobs": False, "return_token_ids": True}, ""),
        ({"return_token_ids": False}, FIELD),
        ({"response_format": {"type": "text"}}, ""),
        ({"response_format": {"type": "json_schema", "json_schema": {"x": "y" * 9000}}}, FIELD),
        ({"tools": ["x" * 9000]}, TOOLS),
        ({"tools": ["x" * 9000], "other": 1}, TOOLS),
        ({"tools": ["x" * 9000], "tool_choice": "none"}, ""),
        ({"tools": []}, ""),
        ({"stop": ["x"]}, FIELD),
        ({"presence_penalty": 1}, FIELD),
    ],
)
def test_why_an_answer_cannot_be_resumed_by_ids(more, no_ids):
    assert terms(orjson.dumps(PLAIN | more)).no_ids == no_ids


@pytest.mark.parametrize(
    "more, stored", [({}, False), ({"background": True}, True), ({"previous_response_id": "r"}, True)]
)
def test_what_is_about_a_stored_response(more, stored):
    prompt = Prompt(RESPONSES, "m", stream=True)
    assert terms_of(prompt, orjson.dumps({"model": "m", "input": "x", "stream": True} | more)).stored is stored


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"n":}', b'{"other":tru}', b"\xff"])
def test_what_is_no_json_object_is_not_read(body):
    assert terms(body) is None

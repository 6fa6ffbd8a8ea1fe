"""Anthropic's client: messages, streams, token counts, models, and its own shapes of errors."""

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from .conftest import KEY, NO_FAULTS

HELLO = [{"role": "user", "content": "Which module reads CSV?"}]
ASKED = {"model": "sim", "max_tokens": 12, "messages": HELLO}
LONG = {**ASKED, "messages": [{"role": "user", "content": "Count these words. " * 200}]}
TOOLS = [{"name": "look", "description": "look somewhere", "input_schema": {"type": "object", "properties": {}}}]


@pytest.fixture
def client(gateway):
    with Anthropic(base_url=gateway.url, api_key="unused", max_retries=0, timeout=30) as client:
        yield client


def test_messages(client):
    answer = client.messages.create(**ASKED, system="Answer in a word.")
    assert (answer.type, answer.role, answer.content[0].type) == ("message", "assistant", "text")
    assert answer.content[0].text and answer.usage.output_tokens <= 12


def test_streamed_message_is_the_whole_one(client):
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == client.messages.create(**ASKED).content[0].text
    assert final.stop_reason in ("end_turn", "max_tokens") and final.usage.output_tokens > 0


def test_what_claude_code_sends(client):
    """Beta messages go to `/v1/messages?beta=true`, with tools, cache marks and system blocks."""
    system = [{"type": "text", "text": "You are a coding agent. " * 100, "cache_control": {"type": "ephemeral"}}]
    for _ in range(2):
        answer = client.beta.messages.create(**ASKED, system=system, tools=TOOLS, betas=["claude-code-20250219"])
    assert answer.usage.cache_read_input_tokens > 300


def test_a_tools_result_in_the_conversation(client):
    messages = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "csv.py"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a module"}]},
    ]
    assert client.messages.create(model="sim", max_tokens=4, messages=messages, tools=TOOLS).content


def test_count_tokens(client):
    counted = client.messages.count_tokens(model="sim", messages=HELLO)
    usage = client.messages.create(**ASKED).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["sim"]
    assert client.models.retrieve("sim").id == "sim"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("another")


def test_errors_have_anthropics_shape(client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**ASKED, "model": "another"})
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{**ASKED, "max_tokens": 10_000_000})
    assert caught.value.body["error"]["type"] == "invalid_request_error"


NOT_SERVED = {
    "batches": lambda client: client.messages.batches.list(),
    "files": lambda client: client.beta.files.list(),
}


@pytest.mark.parametrize("ask", NOT_SERVED.values(), ids=NOT_SERVED)
def test_what_is_not_served_is_said_at_once(client, ask):
    with pytest.raises(anthropic.APIStatusError) as caught:
        ask(client)
    assert caught.value.status_code in (404, 405), caught.value
    assert "not part of the inference API" in str(caught.value)


def test_keys(guarded):
    with Anthropic(base_url=guarded.url, api_key="sk-unknown", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            stranger.messages.create(**ASKED)
        assert caught.value.body["error"]["type"] == "authentication_error"
    with Anthropic(base_url=guarded.url, api_key=KEY, max_retries=0) as client:
        with pytest.raises(anthropic.PermissionDeniedError) as caught:
            client.messages.create(**{**ASKED, "model": "another"})
        assert caught.value.body["error"]["type"] == "permission_error"
        assert [model.id for model in client.models.list()] == ["sim"]


@pytest.mark.parametrize("fault", ["error_503", "error_500", "error_stream"])
def test_an_engine_that_fails_is_not_the_clients_matter(gateway, client, fault):
    def went_elsewhere() -> bool:
        """Whether the engine that was to fail was asked; where not, its fault is still to come and is taken back."""
        gateway.fault(**NO_FAULTS)
        first = client.messages.with_raw_response.create(**LONG)
        replica = first.headers["x-hitherto-replica"]  # which holds the prompt now
        gateway.fault(replica, **{fault: 1})
        with client.messages.stream(**LONG) as stream:
            assert stream.get_final_text()
            return stream.response.headers["x-hitherto-replica"] != replica

    gateway.until(went_elsewhere)


def test_a_stream_that_breaks_never_ends_as_if_complete(gateway, client):
    gateway.fault(die_mid_stream=1)
    with pytest.raises((anthropic.APIError, httpx.TransportError)):
        with client.messages.stream(**{**ASKED, "max_tokens": 50}) as stream:
            stream.get_final_message()


def test_a_timeout_and_a_client_that_leaves_end_in_the_engine(gateway, client):
    with client.messages.stream(**{**ASKED, "max_tokens": 10_000}) as stream:
        next(iter(stream))
    gateway.until(gateway.idle)
    gateway.fault(slow=1000)
    with pytest.raises(anthropic.APITimeoutError):
        client.with_options(timeout=1).messages.create(**ASKED)
    gateway.fault(slow=1)
    gateway.until(gateway.idle)

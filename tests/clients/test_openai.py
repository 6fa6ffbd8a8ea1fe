"""OpenAI's client, whole and streaming, on each API, and what it makes of errors."""

import asyncio
import re
import time

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from .conftest import KEY, LIMITED_KEY, NO_FAULTS, ROOT

HELLO = [{"role": "user", "content": "Which module reads CSV?"}]
LONG = [{"role": "user", "content": "Count these words. " * 200}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
    }
]


@pytest.fixture
def client(gateway):
    """It repeats nothing by itself: what it gets is what the gateway answered first."""
    with OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0, timeout=30) as client:
        yield client


def test_chat(client):
    answer = client.chat.completions.create(model="sim", messages=HELLO, max_tokens=8)
    assert answer.object == "chat.completion" and answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 8


def test_chat_names_its_replica_and_goes_on_there(client):
    unheard = [{"role": "user", "content": "Nobody has asked this before. " * 200}]
    first = client.chat.completions.with_raw_response.create(model="sim", messages=unheard, max_tokens=4)
    replica, said = first.headers["x-hitherto-replica"], first.parse()
    further = [*unheard, {"role": "assistant", "content": said.choices[0].message.content}, *HELLO]
    second = client.chat.completions.with_raw_response.create(model="sim", messages=further, max_tokens=4)
    assert second.headers["x-hitherto-replica"] == replica
    assert second.parse().usage.prompt_tokens_details.cached_tokens > 500
    assert second.headers["x-request-id"]


def test_streamed_chat_is_the_whole_one(client):
    asked = {"model": "sim", "messages": HELLO, "max_tokens": 12, "seed": 1}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == client.chat.completions.create(**asked).choices[0].message.content
    assert chunks[-1].usage.total_tokens > 12


def test_stream_helper_with_events(client):
    """To its own end: what ends by its length the helper does not parse."""
    with client.chat.completions.stream(model="sim", messages=HELLO) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.content
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_several_choices_and_tools_in_the_prompt(client):
    answer = client.chat.completions.create(model="sim", messages=HELLO, tools=TOOLS, max_tokens=4, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_completions(client):
    whole = client.completions.create(model="sim", prompt="import csv", max_tokens=8)
    chunks = list(client.completions.create(model="sim", prompt="import csv", max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    both = client.completions.create(model="sim", prompt=["one", "two"], max_tokens=2)
    assert len(both.choices) == 2


def test_responses(client):
    answer = client.responses.create(model="sim", input="Which module reads CSV?", max_output_tokens=8)
    assert answer.output_text and answer.usage.input_tokens_details.cached_tokens >= 0
    with client.responses.stream(model="sim", input="Which module reads CSV?", max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == answer.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_a_stored_response_that_nobody_has(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_nobody")


def test_embeddings_are_read_from_base64(client):
    """The client asks for base64 by itself."""
    answer = client.embeddings.create(model="sim", input=["one", "two"])
    assert [len(one.embedding) for one in answer.data] == [64, 64]
    floats = client.embeddings.create(model="sim", input=["one"], encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-6)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["sim"]
    model = client.models.retrieve("sim")
    assert (model.id, model.object, model.owned_by) == ("sim", "model", "hitherto")
    with pytest.raises(openai.NotFoundError, match="sim") as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found"


def test_a_model_whose_name_has_a_slash(start_gateway):
    gateway = start_gateway("--launch", "1", "--profile", "sim", "--served-model-name", "org/sim")
    with OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0) as client:
        assert client.models.retrieve("org/sim").id == "org/sim"
        assert client.chat.completions.create(model="org/sim", messages=HELLO, max_tokens=2).model == "org/sim"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("org/another")


def test_the_program_in_the_documents(gateway, capsys):
    """docs/clients.md"""
    program = re.search(r"```python\n(.*?)```", (ROOT / "docs/clients.md").read_text(), re.S)[1]
    exec(program.replace("http://127.0.0.1:8080", gateway.url), {})
    assert len(capsys.readouterr().out) > 20


async def test_async_client_with_many_at_once(gateway):
    async with AsyncOpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0) as client:

        async def one(number: int) -> str:
            said, asked = "", [{"role": "user", "content": f"Number {number}"}]
            stream = await client.chat.completions.create(model="sim", messages=asked, max_tokens=16, stream=True)
            async for chunk in stream:
                said += chunk.choices[0].delta.content or ""
            return said

        assert all(await asyncio.gather(*map(one, range(40))))


# ---- errors


def test_an_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="another", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert caught.value.request_id


def test_a_bad_request(client):
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.chat.completions.create(model="sim", messages=HELLO, max_tokens=10_000_000)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="sim", prompt="", max_tokens=2)


NOT_SERVED = {
    "images": lambda client: client.images.generate(model="sim", prompt="a cat"),
    "moderations": lambda client: client.moderations.create(input="a cat"),
    "files": lambda client: client.files.list(),
    "batches": lambda client: client.batches.list(),
    "speech": lambda client: client.audio.speech.create(model="sim", voice="alloy", input="a cat"),
    "transcriptions": lambda client: client.audio.transcriptions.create(model="sim", file=("a.wav", b"RIFF")),
    "vector stores": lambda client: client.vector_stores.list(),
    "fine-tuning": lambda client: client.fine_tuning.jobs.list(),
    "conversations": lambda client: client.conversations.create(),
    "stored chats": lambda client: client.chat.completions.list(),
    "a stored chat": lambda client: client.chat.completions.retrieve("chatcmpl-1"),
    "counting a response": lambda client: client.responses.input_tokens.count(model="sim", input="a cat"),
    "compacting a response": lambda client: client.responses.compact(model="sim", input="a cat"),
    "deleting a response": lambda client: client.responses.delete("resp_nobody"),
    "cancelling a response": lambda client: client.responses.cancel("resp_nobody"),
    "items of a response": lambda client: client.responses.input_items.list("resp_nobody"),
}


@pytest.mark.parametrize("ask", NOT_SERVED.values(), ids=NOT_SERVED)
def test_what_is_not_served_is_said_at_once(client, ask):
    """In OpenAI's form, as the client's matter and no server's failure."""
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client)
    assert caught.value.status_code in (404, 405), caught.value
    assert caught.value.body["message"], caught.value


def test_keys(guarded):
    with OpenAI(base_url=guarded.url + "/v1", api_key="sk-unknown", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.chat.completions.create(model="sim", messages=HELLO)
        assert caught.value.code == "invalid_api_key"
    with OpenAI(base_url=guarded.url + "/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["sim"]
        with pytest.raises(openai.PermissionDeniedError):
            client.chat.completions.create(model="another", messages=HELLO)
    with OpenAI(base_url=guarded.url + "/v1", api_key=LIMITED_KEY, max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            for _ in range(10):  # twice four, where a minute ends in between
                client.chat.completions.create(model="sim", messages=HELLO, max_tokens=1)
        assert caught.value.code == "rate_limit_exceeded"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60


# ---- retries


@pytest.mark.parametrize("fault", ["error_503", "error_500", "error_stream"])
def test_an_engine_that_fails_is_not_the_clients_matter(gateway, client, fault):
    def went_elsewhere() -> bool:
        """Whether the engine that was to fail was asked: what the gateway asks for itself may have met the fault.
        Where it was not, its fault may be still to come, and is taken back."""
        gateway.fault(**NO_FAULTS)
        first = client.chat.completions.with_raw_response.create(model="sim", messages=LONG, max_tokens=2)
        replica = first.headers["x-hitherto-replica"]  # which holds the prompt now
        gateway.fault(replica, **{fault: 1})
        second = client.chat.completions.with_raw_response.create(model="sim", messages=LONG, max_tokens=2, stream=True)
        assert all(chunk.choices for chunk in second.parse())
        return second.headers["x-hitherto-replica"] != replica

    gateway.until(went_elsewhere)


def test_what_all_engines_refuse_is_not_repeated_by_the_client(gateway):
    """A 500 of two engines to one request is the request's fault: `x-should-retry: false` keeps the client, which
    repeats a 500 twice by default, from giving it to them again."""
    with OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=2) as client:
        gateway.fault(error_500=5)
        before = gateway.counted("hitherto_requests_total")
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="sim", messages=HELLO, max_tokens=2)
        assert gateway.counted("hitherto_requests_total") == before + 1


def test_the_client_repeats_what_is_full_and_gets_it(gateway):
    """503 of all engines, then none: by default the client asks again."""
    with OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=2) as client:
        gateway.fault(error_503=1)
        assert client.chat.completions.create(model="sim", messages=HELLO, max_tokens=2).choices


# ---- streams that end early, clients that leave


@pytest.mark.parametrize(
    ("api", "fault"), [("chat", "die_mid_stream"), ("chat", "error_mid_stream"), ("responses", "die_mid_stream")]
)
def test_a_stream_that_breaks_never_ends_as_if_complete(gateway, client, api, fault):
    gateway.fault(**{fault: 1})
    if api == "chat":
        stream = client.chat.completions.create(model="sim", messages=HELLO, max_tokens=50, stream=True)
    else:
        stream = client.responses.create(model="sim", input="Hi", max_output_tokens=50, stream=True)
    with pytest.raises((openai.APIError, openai.APIConnectionError, httpx.TransportError)):
        for _ in stream:
            pass


def test_a_client_that_stops_reading_its_stream_ends_it_in_the_engine(gateway, client):
    stream = client.chat.completions.create(model="sim", messages=HELLO, max_tokens=100_000, stream=True)
    assert next(iter(stream)).choices
    stream.close()
    gateway.until(gateway.idle)


def test_a_clients_timeout_ends_its_request_in_the_engine(gateway, client):
    gateway.fault(slow=1000)
    begun = time.monotonic()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1).chat.completions.create(model="sim", messages=HELLO, max_tokens=100)
    assert time.monotonic() - begun < 10
    gateway.fault(slow=1)
    gateway.until(gateway.idle)

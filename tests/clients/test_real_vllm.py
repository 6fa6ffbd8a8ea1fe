"""OpenAI's and Anthropic's clients before real vLLM on the CPU: a tiny model of random weights that chats, and the same
one that embeds. What they say means nothing; its form is held to a grammar where one is asked for."""

import json
import os
import subprocess

import anthropic
import openai
import pytest
import yaml
from pydantic import BaseModel

from .conftest import ROOT

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif("HITHERTO_VLLM" not in os.environ, reason="needs a vLLM: HITHERTO_VLLM names its folder"),
]
HELLO = [{"role": "user", "content": "Which module reads CSV?"}]
LONG = [{"role": "user", "content": "Count these words. " * 60}]
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "open": {"type": "boolean"}},
    "required": ["city", "open"],
    "additionalProperties": False,
}
TOOL = {"name": "go_to", "description": "Go to a place.", "parameters": PLACE, "strict": True}  # else any JSON would do
CHOSEN = {"type": "function", "function": {"name": "go_to"}}
# A grammar of calls allows any space between JSON's tokens, and that may be a random model's likeliest token for ever.
# Drawn nearly at random, one token in twenty goes on, at about six places.
DRAWN = {"temperature": 2, "seed": 1}
ENOUGH = 2000  # tokens


@pytest.fixture(scope="module")
def real(start_gateway, tmp_path_factory):
    """`hitherto serve` with a pool that chats and one that embeds."""
    folder = tmp_path_factory.mktemp("real")
    write = "import sys, pathlib; from loadgen.demo.tiny_model import tiny_model; tiny_model(pathlib.Path(sys.argv[1]))"
    model = folder / "tiny"
    subprocess.run([os.environ["HITHERTO_PYTHON"], "-c", write, model], check=True, cwd=ROOT)
    profile = yaml.safe_load((ROOT / "replicas/profiles/cpu.yaml").read_text())
    profile |= {
        "dtype": "float32",  # in bfloat16 vLLM 0.32 may die on processors with AMX
        "executable": f"{os.environ['HITHERTO_VLLM']}/bin/vllm",
        "kv_cache_memory_bytes": "16M",
        "max_model_len": 4096,
    }
    pools = {
        "chat": ["--enable-auto-tool-choice", "--tool-call-parser=hermes", '--structured-outputs-config={"backend":"xgrammar","disable_any_whitespace":true}'],
        "embed": ["--runner=pooling", "--convert=embed"],
    }  # fmt: skip
    for name, flags in pools.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(profile | {"extra_args": flags}))
    config = {
        name: {"profile": str(folder / f"{name}.yaml"), "launch": 1, "model": str(model), "served_model_name": name}
        for name in pools
    }
    (folder / "hitherto.yaml").write_text(yaml.safe_dump({"pools": config}))
    return start_gateway("--config", str(folder / "hitherto.yaml"), ready=2, seconds=240)


@pytest.fixture
def client(real):
    with openai.OpenAI(base_url=real.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def messages(real):
    with anthropic.Anthropic(base_url=real.url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client.messages


def test_chat_and_stream(client):
    asked = {"model": "chat", "messages": LONG, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 64


def test_a_tool_is_called(client):
    asked = {"model": "chat", "messages": HELLO, "tools": [{"type": "function", "function": TOOL}], **DRAWN}
    said = client.chat.completions.create(**asked, tool_choice=CHOSEN, max_tokens=ENOUGH).choices[0].message
    assert said.tool_calls, said
    [call] = said.tool_calls
    assert call.function.name == "go_to" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    chunks = client.chat.completions.create(**asked, tool_choice=CHOSEN, max_tokens=ENOUGH, stream=True)
    parts = [chunk.choices[0].delta.tool_calls or [] for chunk in chunks if chunk.choices]
    streamed = "".join(one.function.arguments or "" for calls in parts for one in calls)
    assert json.loads(streamed) == json.loads(call.function.arguments)
    answer = {"role": "assistant", "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "closed"}
    assert client.chat.completions.create(model="chat", messages=[*HELLO, answer, result], max_tokens=2).choices


def test_structured_output(client):
    class Place(BaseModel):
        model_config = {"extra": "forbid"}
        open: bool
        near: bool

    parsed = client.chat.completions.parse(model="chat", messages=HELLO, response_format=Place, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, Place)
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    said = client.chat.completions.create(model="chat", messages=HELLO, response_format=schema, max_tokens=200)
    assert json.loads(said.choices[0].message.content)["city"] in ("Paris", "Rome")
    choice = client.chat.completions.create(
        model="chat", messages=HELLO, max_tokens=8, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert choice.choices[0].message.content in ("yes", "no")


def test_responses(client):
    asked = {"model": "chat", "input": "Which module reads CSV?", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_completions_and_logprobs(client):
    said = client.completions.create(model="chat", prompt="import csv", max_tokens=4, logprobs=2)
    assert len(said.choices[0].logprobs.tokens) == 4
    chat = client.chat.completions.create(model="chat", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=2)
    assert len(chat.choices[0].logprobs.content) == 4


def test_embeddings(client):
    made = client.embeddings.create(model="embed", input=["one", "two"])
    assert [len(one.embedding) for one in made.data] == [128, 128]
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="chat", input=["one"])


def test_models(client):
    assert [model.id for model in client.models.list()] == ["chat", "embed"]
    assert client.models.retrieve("embed").id == "embed"


def test_errors(client):
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="chat", prompt="word " * 9000, max_tokens=2)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="chat", messages=HELLO, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=HELLO)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="chat", messages=[{"role": "tool", "content": "x" * 9}], tool_choice="required"
        )


def test_a_client_that_leaves_and_one_that_is_impatient_end_in_the_engine(real, client):
    asked = {"model": "chat", "messages": HELLO, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(**asked, stream=True)
    assert next(iter(stream)).choices
    stream.close()
    real.until(real.idle)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).chat.completions.create(**asked)
    real.until(real.idle)


def test_anthropics_messages(messages):
    asked = {"model": "chat", "max_tokens": 12, "messages": LONG, "extra_body": {"temperature": 0}}
    with messages.stream(**asked, system="Answer in a word.") as stream:
        text = stream.get_final_text()
    again = messages.create(**asked, system="Answer in a word.")
    assert again.content[0].text == text and again.usage.cache_read_input_tokens >= 64
    assert messages.count_tokens(model="chat", messages=LONG).input_tokens > 60


def test_anthropics_tools(messages):
    tool = {"name": "go_to", "description": "Go to a place.", "input_schema": PLACE, "strict": True}
    asked = {
        "model": "chat",
        "max_tokens": ENOUGH,
        "messages": HELLO,
        "tools": [tool],
        "extra_body": {"temperature": DRAWN["temperature"]},
    }
    said = messages.create(**asked, tool_choice={"type": "tool", "name": "go_to"})
    assert said.stop_reason == "tool_use", said
    [use] = [block for block in said.content if block.type == "tool_use"]
    assert use.input["city"] in ("Paris", "Rome")
    result = [{"type": "tool_result", "tool_use_id": use.id, "content": "closed"}]
    turns = [*HELLO, {"role": "assistant", "content": [use.model_dump()]}, {"role": "user", "content": result}]
    assert messages.create(**{**asked, "messages": turns, "max_tokens": 4}).content is not None


def test_anthropics_errors(messages):
    with pytest.raises(anthropic.BadRequestError) as caught:
        messages.create(model="chat", max_tokens=4, messages=[{"role": "user", "content": "word " * 9000}])
    assert caught.value.body["type"] == "error"
    with pytest.raises(anthropic.NotFoundError):
        messages.create(model="another", max_tokens=4, messages=HELLO)

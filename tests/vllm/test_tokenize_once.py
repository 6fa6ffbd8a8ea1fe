"""The same requests with their text and with the ids in its place: a real engine answers the same.

Each is asked of the engine itself, then through a gateway that sends ids. Both find the prompt cached: with the same
blocks computed before, a seed or no temperature makes the same tokens.
"""

import asyncio
import json
import re

import httpx
import pytest

from gateway.prompt.forward import LEAST_TOKENS
from gateway.prompt.prompt import CHAT, COMPLETIONS
from loadgen.demo.tiny_model import tiny_model

from ..gateway.prompt.reference import model_dir
from ..gateway.test_continue import events
from .bodies import CALLED, DOCUMENT, PLAIN, SHUFFLED, WEATHER, chat, complete, said, system, text, user
from .engines import block_size, gateway, lora

CONTEXT = 4096  # tokens, also of its whole cache
LONG = "The river runs past the copper mill, and every year of the 1870s somebody writes down how high it stood. "
RULES = system(LONG * 40)
ESSAY = LONG * 40
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {
    "type": "object", "properties": {"prompt": {"type": "string", "maxLength": 8}}, "required": ["prompt"], "additionalProperties": False}}}  # fmt: skip

# What is sent as ids.
AS_IDS = {
    "a conversation": chat(RULES, *PLAIN),
    "a stream": chat(RULES, *PLAIN, stream=True, stream_options={"include_usage": True}),
    "a stream without usage": chat(RULES, *PLAIN, stream=True),
    "sampled": chat(RULES, *PLAIN, temperature=0.9, top_p=0.9, top_k=50, seed=11),
    "sampled stream": chat(RULES, *PLAIN, temperature=0.9, seed=12, stream=True),
    "two choices": chat(RULES, *PLAIN, n=2, temperature=1.0, seed=13),
    "penalties": chat(RULES, *PLAIN, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"1000": 5}, min_p=0.01),
    "logprobs": chat(RULES, *PLAIN, logprobs=True, top_logprobs=2),
    "ids told": chat(RULES, *PLAIN, return_token_ids=True),
    "ids told in a stream": chat(RULES, *PLAIN, return_token_ids=True, stream=True),
    "stop": chat(RULES, *PLAIN, stop=["e", "a"], include_stop_str_in_output=True, max_tokens=40),
    "max_completion_tokens": chat(RULES, *PLAIN, max_completion_tokens=3),
    "content in parts": chat(RULES, user([text("one"), text("two")])),
    "continued": chat(RULES, user("Tell me."), said("Well, the river"), continue_final_message=True, add_generation_prompt=False),
    "continued stream": chat(RULES, user("Tell me."), said("Well, the"), continue_final_message=True, add_generation_prompt=False, stream=True),
    "without a generation prompt": chat(RULES, *PLAIN, add_generation_prompt=False),
    "thinking off": chat(RULES, *PLAIN, chat_template_kwargs={"enable_thinking": False}),
    "reasoning in the history": chat(RULES, user("one"), said("two", reasoning_content="hm, so"), user("three")),
    "effort": chat(RULES, *PLAIN, reasoning_effort="low"),
    "documents": chat(RULES, *PLAIN, documents=[DOCUMENT]),
    "special tokens asked for": chat(RULES, *PLAIN, add_special_tokens=True),
    "tools": chat(RULES, *CALLED, tools=[WEATHER, SHUFFLED]),
    "tools in a stream": chat(RULES, *CALLED, tools=[WEATHER, SHUFFLED], stream=True),
    "tool_choice none": chat(RULES, user("Weather?"), tools=[WEATHER], tool_choice="none"),
    "tool_choice named": chat(RULES, user("Weather?"), tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "get_weather"}}, max_tokens=24),
    "tool_choice named, stream": chat(RULES, user("Weather?"), tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "get_weather"}}, stream=True, max_tokens=24),
    "tool_choice required": chat(RULES, user("Weather?"), tools=[SHUFFLED], tool_choice="required", max_tokens=24),
    "structured": chat(RULES, *PLAIN, response_format=SCHEMA, max_tokens=24),
    "salt": chat(RULES, *PLAIN, cache_salt="tenant"),
    "adapter": chat(RULES, *PLAIN, model="red"),
    "priority and names": chat(RULES, *PLAIN, priority=0, user="me", request_id="mine", metadata={"a": "b"}),
    "completion": complete(ESSAY),
    "completion with odd letters": complete(ESSAY + ' "prompt": "\\\u00e9\U0001f600\u4f60\n'),
    "completion stream": complete(ESSAY, stream=True, stream_options={"include_usage": True}),
    "completion sampled": complete(ESSAY, temperature=0.9, seed=21),
    "completion of two": complete(ESSAY, n=2, temperature=0.9, seed=22),
    "completion logprobs": complete(ESSAY, logprobs=2),
    "completion ids told": complete(ESSAY, return_token_ids=True),
    "completion ids told, stream": complete(ESSAY, return_token_ids=True, stream=True),
    "completion stop": complete(ESSAY, stop=["e"], max_tokens=40),
    "completion bare": complete(ESSAY, add_special_tokens=False),
    "completion salt": complete(ESSAY, cache_salt="tenant"),
    "completion adapter": complete(ESSAY, model="red"),
}  # fmt: skip
# What is not, and why.
AS_TEXT = {
    "echo": complete(ESSAY, echo=True),
    "chat echo": chat(RULES, user("Tell me."), said("Well, the"), continue_final_message=True, add_generation_prompt=False, echo=True),
    "truncated": complete(ESSAY, truncate_prompt_tokens=LEAST_TOKENS + 9),
    "several": complete([ESSAY, ESSAY + "x"]),
    "ids already": complete([1000, 1001, 1002] * 300),
    "a prompt in the schema": complete(ESSAY, response_format=SCHEMA, max_tokens=24),
    "of another kind": ("/v1/messages", {"messages": [user(ESSAY)], "max_tokens": 6}),
}  # fmt: skip
# What the engine refuses: it must refuse the same.
REFUSED = {
    "no temperature": chat(RULES, *PLAIN, temperature=-1),
    "unheard-of tool": chat(RULES, *PLAIN, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "nobody"}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(vllm, tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", model_dir("qwen3"))


@pytest.fixture(scope="module")
def engine(start_engine, tmp_path_factory):
    """Its own engine: a real template, tool calls, an adapter, and a context that prompts can be too long for."""
    red = lora(tmp_path_factory.mktemp("adapters") / "red", 5)
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
             "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"red={red}"]  # fmt: skip
    return start_engine(*flags, events=None, blocks=CONTEXT // block_size()).wait()


def asked(path: str, body: dict) -> bytes:
    return json.dumps({"model": "tiny", "temperature": 0, "max_tokens": 6} | body, ensure_ascii=False).encode()


async def answer(client: httpx.AsyncClient, path: str, body: bytes):
    reply = await client.post(path, content=body, headers={"content-type": "application/json"})
    if reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream"):
        return joined([one for one in events(reply.text) if one != "[DONE]"])
    return reply.status_code, alike(reply.json())


def alike(told):
    """Without what is new in each answer: its ids, its time."""
    if isinstance(told, dict):
        return {key: "new" if key in ("id", "created", "signature") else alike(value) for key, value in told.items()}
    if isinstance(told, str):
        return re.sub(r"(cmpl|resp|msg|call|tool)[-_][0-9a-z-]{6,}", "new", told)
    return [alike(one) for one in told] if isinstance(told, list) else told


def joined(chunks: list[dict]):
    """A stream as one answer: how many tokens come in one chunk depends on the moment."""
    whole: dict = {}
    for chunk in map(alike, chunks):
        for choice in chunk.pop("choices"):
            merge(whole.setdefault(choice.pop("index"), {}), choice)
        whole |= {key: value for key, value in chunk.items() if value is not None}
    return 200, whole


def merge(into: dict, more: dict) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            merge(into.setdefault(key, {}), value)
        elif key == "tool_calls":
            for call in value or ():
                merge(into.setdefault(f"call {call.get('index')}", {}), call)
        elif isinstance(value, str | list) and into.get(key) and key not in ("role", "finish_reason", "type", "id"):
            into[key] = into[key] + value
        elif value is not None:
            into[key] = value


async def sent(process) -> dict[str, int]:
    """Long prompts so far by what was sent."""
    return {how: int(await process.counted("hitherto_long_prompts_total", sent=how)) for how in ("ids", "text")}


async def until_ids(process, path: str, body: dict) -> str:
    """Ask for bodies of this kind until one is sent as ids or it is known that none will be; what the gateway found."""
    for number in range(200):
        before = (await sent(process)).get("ids", 0)
        await answer(process.client, path, asked(path, another(body, number)))
        found = (await process.status())["replicas"][0]["takes_ids"]
        if path + ": no" in found or (await sent(process)).get("ids", 0) > before:
            return found
        await asyncio.sleep(0.05)  # the check comes behind the answer
    raise AssertionError(found)


def another(body: dict, number: int) -> dict:
    """A body of the same kind with another text at its start."""
    if "prompt" in body:
        return body | {"prompt": f"{number}. {body['prompt']}"}
    first, *rest = body["messages"]
    return body | {"messages": [{**first, "content": f"{number}. {first['content']}"}, *rest]}


async def test_an_engine_sent_ids_answers_what_it_answers_to_the_text(engine, model):
    different = []
    async with gateway(engine, model=model) as process, httpx.AsyncClient(base_url=engine.url, timeout=60) as direct:
        for path, body in AS_IDS.values():
            assert f"{path}: yes" in await until_ids(process, path, body)
        before = await sent(process)
        for name, (path, body) in AS_IDS.items():
            request = asked(path, body)
            await answer(direct, path, request)  # from here on its prompt is cached
            theirs, got = [await answer(client, path, request) for client in (direct, process.client)]
            if theirs != got or got[0] != 200:
                different.append((name, theirs, got))
        assert different == []
        assert await sent(process) == before | {"ids": before.get("ids", 0) + len(AS_IDS)}
        assert (await process.status())["replicas"][0]["takes_ids"].count("yes") == 2
    assert "Got kv_transfer_params" not in engine.log.read_text(errors="replace")


async def test_what_needs_its_text_is_sent_as_text_and_what_is_refused_is_refused_alike(engine, model):
    async with gateway(engine, model=model) as process, httpx.AsyncClient(base_url=engine.url, timeout=60) as direct:
        for name in ("a conversation", "completion"):
            await until_ids(process, *AS_IDS[name])
        before = (await sent(process)).get("ids", 0)
        for name, (path, body) in AS_TEXT.items():
            request = asked(path, body)
            await answer(direct, path, request)
            assert await answer(direct, path, request) == await answer(process.client, path, request), name
        assert (await sent(process)).get("ids", 0) == before
        for name, (path, body) in REFUSED.items():
            theirs, ours = [await answer(client, path, asked(path, body)) for client in (direct, process.client)]
            assert theirs == ours and ours[0] == 400, name
        assert (await process.status())["replicas"][0]["takes_ids"].count("yes") == 2


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_engine_with_another_tokenizer_or_template_is_never_sent_ids(engine, path, tmp_path):
    """The gateway was given another model than the engine serves: nothing it would send is what the engine makes."""
    async with gateway(engine, model=model_dir("llama3_2")) as process:
        _, body = AS_IDS["a conversation" if path != COMPLETIONS else "completion"]
        found = await until_ids(process, path, body)
        assert "the ids it makes differ from ours" in found
        await asyncio.gather(*(answer(process.client, path, asked(path, body)) for _ in range(3)))
        assert not (await sent(process)).get("ids")
        assert b"no replica gets token ids from now on" in b"".join(process.log)

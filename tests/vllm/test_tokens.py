"""The gateway's token ids are the engine's: four real tokenizers and templates, every endpoint, named and random
bodies.

The engine says its ids itself (`return_token_ids`, `enable_response_messages`, the /render endpoints), and where it
says nothing (Messages of older versions) its KV events hold them. What an engine refuses is left out of the
comparison; what it takes the gateway must make exactly.
"""

import asyncio
import json
from array import array
from collections import Counter
from contextlib import suppress

import httpx
import pytest

from gateway.errors import ApiError
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.prompt import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from loadgen.demo.tiny_model import tiny_model
from replicas.engines.vllm.versions import version_quirks

from ..gateway.prompt.reference import model_dir
from ..gateway.prompt.test_pipeline import FAULTS
from .bodies import AGENTS, CORPUS
from .engines import Engine, gateway, release, version
from .mixed_bodies import random_bodies
from .odd_bodies import EMBEDDED, INEXACT, LOOSE, TOO_LONG
from .traffic import cached, predicted, prompt_tokens

pytestmark = pytest.mark.exact

JSON = {"content-type": "application/json"}
NAMES = ("qwen3", "llama3_2", "deepseek_v3", "mistral_nemo")
ORDER = (*NAMES, "embedding")  # the last is Llama as an embedding model
RANDOM = 250  # bodies a tokenizer
PICKY = ("mistral_nemo",)  # its template takes turns that alternate only, and one system message


@pytest.fixture(scope="module")
def engines(start_engine, tmp_path_factory):
    """`engines(name)` is one with that tokenizer, with the gateway's `pipeline` to the same ids. The engine of the next
    one starts meanwhile, and those before are gone."""
    made: dict[str, Engine] = {}

    def start(name: str) -> Engine:
        folder = tiny_model(tmp_path_factory.mktemp("models") / name, model_dir(name if name in NAMES else "llama3_2"))
        if name == "deepseek_v3":
            say_what_tokenizer_it_is(folder)
        flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        if version() >= (0, 30):
            flags.append("--enable-scale-out")
        if name not in NAMES:
            flags = ["--runner", "pooling", "--convert", "embed"]
        engine = start_engine(*flags, model=folder, buffer_steps=100_000)
        engine.pipeline = Pipeline(folder, "tiny", engine.block_size, max_model_len=engine.length)
        engine.pipeline.follow(version_quirks(release()))
        return engine

    def get(name: str) -> Engine:
        place = ORDER.index(name)
        for one in ORDER[place : place + 2]:
            made[one] = made.get(one) or start(one)
        for one in ORDER[:place]:
            if one in made:
                made.pop(one).stop()
        return made[name].wait()

    return get


def say_what_tokenizer_it_is(folder) -> None:
    """DeepSeek names Llama's tokenizer class. For its own `model_type` transformers knows better; for one of type llama
    5.19 builds Llama's, whatever tokenizer.json says, and drops every blank."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.fixture(scope="module", params=NAMES)
def served(request, engines) -> Engine:
    return engines(request.param)


@pytest.fixture(scope="module")
def first(engines) -> Engine:
    return engines(NAMES[0])


def prepared(engine: Engine, path: str, body: dict):
    return engine.pipeline.prepare(path, json.dumps(body).encode())


# --- what the engine makes of a body


class Refused(Exception):
    """The engine does not take this body."""


def rendered(path: str) -> bool:
    """Whether the engine tells what it would make of a body, and does not answer it."""
    since = {CHAT: (0, 28), COMPLETIONS: (0, 28), MESSAGES: (0, 29), RESPONSES: (0, 30)}
    return version() >= since[path]


async def render(client: httpx.AsyncClient, path: str, body: dict) -> list[list[int]]:
    told = (await ask(client, path + "/render", body)).json()
    return [one["token_ids"] for one in (told if isinstance(told, list) else [told])]


async def answer(client: httpx.AsyncClient, path: str, body: dict) -> list[list[int]]:
    """The ids of a prompt that was really computed."""
    if path == RESPONSES:
        more = {"enable_response_messages": True, "store": False}
        reply = await ask(client, path, {"max_output_tokens": 1, **body, **more})
        return [one["tokens"] for one in reply.json()["input_messages"]]
    reply = await ask(client, path, {**body, "max_tokens": 1, "return_token_ids": True})
    return prompts_of(path, body, reply.json())


def prompts_of(path: str, body: dict, told: dict) -> list[list[int]]:
    """The ids of prompts, as an answer with `return_token_ids` has them."""
    if path == CHAT:
        return [told["prompt_token_ids"]]
    return [one["prompt_token_ids"] for one in told["choices"][:: body.get("n", 1)]]


async def ask(client: httpx.AsyncClient, path: str, body: dict) -> httpx.Response:
    reply = await client.post(path, json={"model": "tiny", **body})
    assert reply.status_code < 500 or "NotImplemented" in reply.text, (reply.text, body)
    if reply.status_code != 200:
        raise Refused(reply.text)
    return reply


async def compare(engine: Engine, bodies: dict[object, tuple[str, dict]], theirs=render) -> Counter:
    """Each body's ids, ours and the engine's; the second time ours are known already. Counts what was equal."""
    counts: Counter = Counter()
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client:
        gate = asyncio.Semaphore(8)

        async def one(name: object, path: str, body: dict) -> None:
            async with gate:
                try:
                    lists = await theirs(client, path, body)
                except Refused:
                    counts[path, "refused"] += 1
                    return
            for _ in range(2):
                ours = prepared(engine, path, body)
                assert ours.mode == "exact", (name, ours.note, body)
                assert memoryview(ours.token_ids).cast("I").tolist() == max(lists, key=len), (name, path, body)
                assert ours.tokens == sum(map(len, lists)), (name, body)
            counts[path, "equal"] += 1

        async with asyncio.TaskGroup() as group:
            for name, (path, body) in bodies.items():
                group.create_task(one(name, path, body))
    return counts


# --- one tokenizer will do (first in the file: its engine ends when the next is asked)


async def test_prompts_cut_to_the_context_length(first):
    """-1 leaves room for the output: how much differs between versions."""
    bodies = {name: case for name, case in TOO_LONG.items() if rendered(case[0])}
    counts = await compare(first, bodies)
    assert sum(counts[path, "equal"] for path in (CHAT, COMPLETIONS, RESPONSES)) == len(bodies)


async def test_what_cannot_be_made_exactly_is_not_called_exact(first):
    for name, (path, body) in INEXACT.items():
        prompt = prepared(first, path, body)
        assert prompt.mode in ("text", "partly") and prompt.note and not prompt.token_ids, name


async def test_the_gateway_refuses_nothing_that_the_engine_takes(first):
    wrong = []
    async with httpx.AsyncClient(base_url=first.url, timeout=60, headers=JSON) as client:
        for name, (path, raw, taken) in LOOSE.items():
            reply = await client.post(path, content=raw)
            if (reply.status_code == 200) is not taken:
                wrong.append((name, reply.status_code, reply.text))
            elif taken:
                prompt = first.pipeline.prepare(path, raw)
                tokens = reply.json()["usage"]["prompt_tokens"]
                if not (prompt.tokens == tokens if prompt.mode == "exact" else "Python" in prompt.note):
                    wrong.append((name, prompt.mode, prompt.note, prompt.tokens, tokens))
    assert not wrong


async def test_what_the_gateway_refuses_the_engine_refuses(first):
    wrong = []
    async with httpx.AsyncClient(base_url=first.url, timeout=60, headers=JSON) as client:
        for path, body, _ in FAULTS:
            if path == EMBEDDINGS:
                continue  # a model that generates has none
            if isinstance(body, dict):
                hello = {"messages": [{"role": "user", "content": "hi"}]} if path in (CHAT, MESSAGES) else {}
                body = json.dumps({"model": "tiny", "max_tokens": 4, **hello, **body}).encode()
            with pytest.raises(ApiError):
                first.pipeline.prepare(path, body)
            if (await client.post(path, content=body)).status_code == 200:
                wrong.append((path, body))
    assert not wrong


async def test_through_the_gateway(first):
    """The engine behind it makes the ids that it was routed by; asked again, it finds what was predicted."""
    names = [name for name, (path, _) in CORPUS.items() if path in (CHAT, COMPLETIONS)]
    async with gateway(first, served_model_name="tiny") as process:
        for name in names[::3]:
            path, body = CORPUS[name]
            body = {"model": "tiny", **body, "max_tokens": 1, "return_token_ids": True}
            told = (await process.admin.post("/explain", params={"path": path}, json=body)).json()
            reply = await process.client.post(path, json=body)
            if reply.status_code != 200:
                direct = await process.client.post(first.url + path, json=body)
                assert (reply.status_code, reply.json()) == (direct.status_code, direct.json()), name
                continue
            lists = prompts_of(path, body, reply.json())
            assert told["mode"] == "exact", (name, told)
            assert told["tokens"] == sum(map(len, lists)) == prompt_tokens(reply), (name, told)
            assert array("I", max(lists, key=len)).tobytes() == prepared(first, path, body).token_ids, name
            again = await process.client.post(path, json=body)
            if len(lists) == 1 and body.get("n", 1) == 1:
                assert predicted(again) == cached(again), name


# --- every tokenizer


async def test_named_bodies_computed_by_the_engine(served):
    bodies = {name: case for name, case in (CORPUS | AGENTS).items() if case[0] != MESSAGES}
    counts = await compare(served, bodies, answer)
    assert counts[COMPLETIONS, "equal"] >= 25 and counts[RESPONSES, "equal"] >= 20
    assert counts[CHAT, "equal"] >= (50 if served.model.name in PICKY else 90)


async def test_named_bodies_rendered_by_the_engine(served):
    counts = await compare(served, {name: case for name, case in (CORPUS | AGENTS).items() if rendered(case[0])})
    assert counts[CHAT, "equal"] >= (50 if served.model.name in PICKY else 90)


async def test_random_bodies(served):
    cases = {f"random {i}": case for i, case in enumerate(random_bodies(20_260, RANDOM))}
    counts = await compare(served, {name: case for name, case in cases.items() if rendered(case[0])})
    rest = {name: case for name, case in cases.items() if not rendered(case[0]) and case[0] == RESPONSES}
    counts += await compare(served, rest, answer)
    assert counts[CHAT, "equal"] >= (50 if served.model.name in PICKY else 100) and counts[COMPLETIONS, "equal"] >= 25


async def test_messages_as_events_tell_them(served, witness_of):
    """Enough output to fill the prompt's last block, so that it is told, too."""
    bodies = [body for path, body in [*CORPUS.values(), *AGENTS.values(), *random_bodies(5, 100)] if path == MESSAGES]
    more = served.block_size + 1
    longer = [{**body, "max_tokens": max(more, body["max_tokens"])} for body in bodies]
    told = await compare_with_events(served, MESSAGES, longer, witness_of)
    assert told >= (20 if served.model.name in PICKY else 35)


async def test_embeddings_as_events_tell_them(engines, witness_of):
    told = await compare_with_events(
        engines("embedding"), EMBEDDINGS, [body for _, body in EMBEDDED.values()], witness_of
    )
    assert told == len(EMBEDDED)


async def compare_with_events(engine: Engine, path: str, bodies: list[dict], witness_of) -> int:
    """Each with a salt of its own, by which its full blocks are found; the count of tokens is told in usage. How many
    the engine took."""
    counted: dict[str, int] = {}
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client:
        gate = asyncio.Semaphore(8)

        async def send(salt: str, body: dict) -> None:
            async with gate:
                with suppress(Refused):
                    counted[salt] = prompt_tokens(await ask(client, path, {**body, "cache_salt": salt}))

        async with asyncio.TaskGroup() as group:
            for number, body in enumerate(bodies):
                group.create_task(send(f"salt {number}", body))
    witness = witness_of(engine)
    await asyncio.to_thread(witness.settled)
    stored = stored_by_salt(witness.events)
    for salt, tokens in counted.items():
        body = bodies[int(salt.removeprefix("salt "))]
        ours = prepared(engine, path, body)
        assert (ours.mode, ours.tokens) == ("exact", tokens), (ours.note, body)
        ids = memoryview(ours.token_ids).cast("I").tolist()
        theirs = stored.get(salt, [])[: len(ids)]
        if not ours.several:
            assert ids[: len(theirs)] == theirs and len(theirs) >= len(ids) - len(ids) % engine.block_size, body
    return len(counted)


def stored_by_salt(events: list[dict]) -> dict[str, list[int]]:
    """All token ids that an engine's events tell, in chains, by the salt of the first block."""
    chains: dict[str, list[int]] = {}
    salt_of: dict[int | bytes, str] = {}
    for event in events:
        if event["type"] == "BlockStored":
            parent = event["parent_block_hash"]
            salt = (event["extra_keys"][0] or [None])[0] if parent is None else salt_of.get(parent)
            if salt is not None:
                chains.setdefault(salt, []).extend(event["token_ids"])
                salt_of.update(dict.fromkeys(event["block_hashes"], salt))
    return chains

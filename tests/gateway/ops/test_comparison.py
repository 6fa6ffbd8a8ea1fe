"""The gateway's tokenizer against the engine's, when an engine is adopted: real processes on both sides."""

import asyncio
import functools
import json
import re
import shutil
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import pytest
from aiohttp import web

from gateway.errors import ApiError
from gateway.ops import comparison as asking
from gateway.ops.chats import CHATS
from gateway.ops.comparison import TokenizerComparison
from gateway.ops.doubts import ELSEWHERE, ENOUGH
from gateway.ops.view import _seen
from gateway.prompt.pipeline import Pipeline
from replicas import Replica
from replicas.engines.sglang import SGLANG
from replicas.engines.vllm import VLLM
from replicas.simulated.model import sim_model_dir

from ..prompt.families import FAMILIES
from ..prompt.read_once import tokenizers_read_once
from ..running import running
from ..sglang_engine import SglangTokens

LONG = "All the world's a stage, and all the men and women merely players. " * 80


@pytest.fixture(scope="module", autouse=True)
def few_tokenizers():
    with tokenizers_read_once():
        yield


def model(folder: Path, config: dict, **changes) -> str:
    """The simulated engine's model with another tokenizer_config.json, and changes of its tokenizer.json."""
    shutil.copytree(sim_model_dir(), folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 16384}))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return str(folder)


async def answered(gateway, text: str) -> dict:
    reply = await gateway.client.post("/v1/completions", json={"model": "sim", "prompt": text, "max_tokens": 1})
    assert reply.status_code == 200, reply.text
    return reply


async def prompts(gateway) -> dict[str, float]:
    return {
        mode: await gateway.counted("hitherto_prompts_total", mode=mode) for mode in ("exact", "engine", "text", "load")
    }


@pytest.mark.parametrize("workers", [[], ["--workers", "2"]])
async def test_an_engine_that_reads_the_files_in_another_way_is_followed(start_engine, tmp_path, workers):
    """By its class transformers may rebuild this tokenizer; the engine uses tokenizer.json as it is."""
    folder = model(tmp_path / "distilled", {"tokenizer_class": "LlamaTokenizerFast"})
    engine = start_engine("--model", folder, "--served-model-name", "sim").wait()
    async with running("--model", folder, "--replica-url", engine.url, *workers) as gateway:
        status = await gateway.until(
            lambda status: any(one["tokenizer"] != "not compared yet" for one in status["replicas"])
        )
        assert status["replicas"][0]["tokenizer"].startswith("the gateway's, tokenizer.json as it is")
        for _ in range(200):  # workers are told a moment later
            reply = await answered(gateway, LONG)
            if (await prompts(gateway)).get("exact", 0) >= 2:
                break
        assert (
            int(reply.headers["x-hitherto-cached-tokens"])
            == reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            > 500
        )


async def test_a_model_whose_engine_has_another_tokenizer_is_not_called_exact(start_engine, tmp_path):
    ours = model(tmp_path / "ours", {})
    added = json.loads((tmp_path / "ours" / "tokenizer.json").read_text())["added_tokens"]
    one = {
        "content": "\u4e16",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    theirs = model(
        tmp_path / "theirs", {}, added_tokens=[*added, {"id": max(token["id"] for token in added) + 1, **one}]
    )
    engine = start_engine("--model", theirs, "--served-model-name", "sim").wait()
    async with running("--model", ours, "--replica-url", engine.url) as gateway:
        status = await gateway.until(
            lambda status: any(one["tokenizer"] != "not compared yet" for one in status["replicas"])
        )
        assert status["replicas"][0]["tokenizer"].startswith("differs: the engine makes other tokens: ")
        assert any("tokenizer is not the gateway's" in problem for problem in status["replicas"][0]["problems"])
        for _ in range(3):
            await answered(gateway, LONG)  # the engine makes the same tokens of this one, but who knows
        assert {mode: count for mode, count in (await prompts(gateway)).items() if count} == {"text": 3.0}
        assert (await gateway.status())["replicas"][0]["takes_ids"] == "not tried yet"
        assert re.search(rb"has another tokenizer than the gateway: .* is \[\d+", b"".join(gateway.log))


def template(folder: str, change) -> str:
    """The model in this folder with another chat template."""
    path = Path(folder) / "chat_template.jinja"
    path.write_text(change(path.read_text()))
    return folder


async def chatted(gateway, messages: list[dict], stream: bool = False) -> None:
    body = {"model": "sim", "messages": messages, "max_tokens": 1, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    reply = await gateway.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_bodies_of_a_kind_that_an_engine_counted_otherwise_are_exact_no_more(start_engine, tmp_path, stream):
    """Its template prints names, of which the chats that are compared have none."""
    names = lambda text: text.replace("'<\uff5cUser\uff5c>'", "'<\uff5cUser\uff5c>' + (message['name'] or '')")  # noqa: E731
    theirs = template(model(tmp_path / "theirs", {}), names)
    engine = start_engine("--model", theirs, "--served-model-name", "sim").wait()
    async with running("--model", model(tmp_path / "ours", {}), "--replica-url", engine.url) as gateway:
        await gateway.until(lambda status: any("alike" in one["tokenizer"] for one in status["replicas"]))
        named = {"role": "user", "content": "hi", "name": "the walrus"}
        for words in range(4):
            await chatted(gateway, [{**named, "content": "hi" + " there" * words}], stream)
        await chatted(gateway, [{"role": "system", "content": "x"}, named], stream)
        for _ in range(3):
            await chatted(gateway, [{"role": "user", "content": "hi"}], stream)
        found = await prompts(gateway)
        # Of a stream the body may be forgotten when it is counted: then it is known by the second one.
        wrong = await gateway.counted("hitherto_prompt_mismatches_total")
        assert wrong in ((2.0, 3.0) if stream else (2.0,))
        assert (found["exact"], found["text"]) == (wrong + 3, 5 - wrong)
        (replica,) = (await gateway.status())["replicas"]
        assert any("bodies of that kind are matched as text" in problem for problem in replica["problems"])


NAMED = json.dumps({"messages": [{"role": "user", "content": "hi", "name": "x"}]}).encode()
PLAIN = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
TOOLS = json.dumps({**json.loads(PLAIN), "tools": [{"type": "function", "function": {"name": "f"}}]}).encode()


def longer(body: bytes, words: int) -> bytes:
    """The same kind of body with another prompt."""
    return body.replace(b'"hi', b'"hi' + b" there" * words)


CHAT = "/v1/chat/completions"


@pytest.fixture
async def two_engines(compared):
    """A pipeline, its comparison, and two replicas whose engines were found to be alike."""
    pipeline = Pipeline(sim_model_dir(), "sim", 16, max_model_len=2000)
    comparison = compared(pipeline)
    async with Engine(pipeline) as one, Engine(pipeline) as other:
        replicas = one.replica(), other.replica()
        for replica in replicas:
            comparison.compare(replica)
        await all_done(comparison)
        yield pipeline, comparison, replicas


async def test_one_odd_answer_leaves_all_bodies_exact_but_refuses_none_for_its_count(two_engines):
    pipeline, comparison, (replica, _) = two_engines
    odd = pipeline.prepare(CHAT, PLAIN)
    for _ in range(3):  # a client that asks again is no further evidence
        comparison.made_otherwise(replica.engine, odd, PLAIN, "it counted 7")
    assert {pipeline.prepare(CHAT, body).mode for body in (PLAIN, NAMED, TOOLS)} == {"exact"}
    assert pipeline.prepare(CHAT, longer(PLAIN, 3000)).mode == "text"
    assert pipeline.prepare("/v1/completions", b'{"prompt": "hi"}').mode == "exact"
    with pytest.raises(ApiError, match="maximum context length"):
        pipeline.prepare("/v1/completions", longer(b'{"prompt": "hi"}', 3000))
    for _ in range(ENOUGH):
        comparison.made_alike(replica.engine, pipeline.prepare(CHAT, TOOLS))
    with pytest.raises(ApiError, match="maximum context length"):
        pipeline.prepare(CHAT, longer(PLAIN, 3000))


async def test_a_kind_is_exact_again_after_equal_counts_in_a_row(two_engines):
    pipeline, comparison, (replica, _) = two_engines
    for words in range(2):
        body = longer(PLAIN, words)
        comparison.made_otherwise(replica.engine, pipeline.prepare(CHAT, body), body, f"it counted {words}")
    held = pipeline.prepare(CHAT, TOOLS)
    assert held.mode == "text" and "it counted 1" in held.note and "it counted 1" in replica.tokenizer
    for so_far in range(ENOUGH - 1):
        comparison.made_alike(replica.engine, pipeline.prepare(CHAT, longer(PLAIN, so_far)))
    comparison.made_otherwise(replica.engine, pipeline.prepare(CHAT, PLAIN), PLAIN, "it counted 3")
    for so_far in range(ENOUGH):
        assert pipeline.prepare(CHAT, PLAIN).mode == "text", so_far
        comparison.made_alike(replica.engine, pipeline.prepare(CHAT, longer(PLAIN, so_far)))
    assert pipeline.prepare(CHAT, TOOLS).mode == "exact" and "it counted" not in replica.tokenizer
    assert not pipeline.prepare(CHAT, TOOLS).doubted


@pytest.mark.parametrize("body, alone", [(PLAIN, True), (NAMED, False)], ids=["plain", "unusual"])
async def test_an_engine_that_alone_makes_plain_bodies_otherwise_is_set_apart(two_engines, body, alone):
    """For the sake of an unusual kind it keeps its exact prompts of all others."""
    pipeline, comparison, (odd, good) = two_engines
    for words in range(2):
        given = longer(body, words)
        comparison.made_otherwise(odd.engine, pipeline.prepare(CHAT, given), given, "it counted 7")
    for _ in range(ELSEWHERE):
        assert not comparison.set_apart()
        comparison.made_alike(good.engine, pipeline.prepare(CHAT, body))
    assert comparison.set_apart() == ({odd.engine} if alone else set())


async def test_a_kind_of_body_is_known_though_its_body_is_forgotten(compared):
    pipeline = Pipeline(sim_model_dir(), "sim", 16)
    comparison = compared(pipeline)

    def prepared(body: bytes):
        return pipeline.prepare("/v1/chat/completions", body)

    async with Engine(pipeline) as engine:
        replica = engine.replica()
        comparison.compare(replica)
        await all_done(comparison)
        for body, fewest in ((NAMED, 3), (TOOLS, 2)):  # of messages that are not plain nothing is kept at first
            seen = 0
            while seen < 4 and prepared(body).mode == "exact":
                comparison.made_otherwise(replica.engine, prepared(longer(body, seen)), b"", "it counted 7")
                seen += 1
            assert seen == fewest and "it counted 7" in prepared(body).note
        assert prepared(PLAIN).mode == "exact" and "it counted 7" in replica.tokenizer
        replica.incarnation = "2"  # another process may make them as the gateway does
        comparison.compare(replica)
        await all_done(comparison)
        assert {prepared(body).mode for body in (NAMED, PLAIN, TOOLS)} == {"exact"}


@pytest.mark.parametrize(
    "map, more",
    [*(({effort: "high" if effort == "max" else "max"}, 0) for effort in ("none", "minimal", "high", "xhigh", "max")), ({}, 1), ({}, 0)],
)  # fmt: skip
async def test_flags_for_efforts_are_found_by_asking_for_chats_with_one(compared, tmp_path, map, more):
    """/tokenize knows no efforts, so an engine is asked for a chat of one token, and for the count of a chat that
    disables thinking. `more`: how many tokens more another effort makes there."""
    folder = template(model(tmp_path / "model", {}), lambda text: text + "{{ reasoning_effort }}")
    pipeline, theirs = Pipeline(Path(folder), "sim", 16), Pipeline(Path(folder), "sim", 16)
    comparison = compared(pipeline)

    class Flagged(Engine):
        async def tokenize(self, request: web.Request) -> web.Response:
            said = await request.json()
            if request.path == "/tokenize":
                return await super().tokenize(request)
            if request.path == "/v1/messages/count_tokens":
                count = len(self.pipeline.made("/v1/messages", json.dumps(said).encode()))
                return web.json_response({"input_tokens": count + more})
            assert said["max_tokens"] == 1
            said["reasoning_effort"] = map.get(said["reasoning_effort"], said["reasoning_effort"])
            ids = self.pipeline.made("/v1/chat/completions", json.dumps(said).encode())
            return web.json_response({"prompt_token_ids": ids, "usage": {"prompt_tokens": len(ids)}})

    async with Flagged(theirs) as engine:
        replica = engine.replica()
        comparison.compare(replica)
        await all_done(comparison)
        plain = json.loads(PLAIN)
        bodies = {
            "/v1/chat/completions": {**plain, "reasoning_effort": "low"},
            "/v1/responses": {"input": "hi", "reasoning": {"effort": "low"}},
            "/v1/messages": {**plain, "max_tokens": 1, "thinking": {"type": "disabled"}},
        }
        for path, body in bodies.items():
            assert pipeline.prepare(path, json.dumps(body).encode()).mode == ("text" if map or more else "exact"), path
        assert pipeline.prepare("/v1/chat/completions", PLAIN).mode == "exact"


async def test_a_model_without_tokenizer_json_is_matched_as_text(start_engine, tmp_path):
    """Kimi's folder has tiktoken.model and code of its own."""
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TikTokenTokenizer", "chat_template": "x"}')
    engine = start_engine().wait()
    async with running("--model", str(tmp_path), "--replica-url", engine.url) as gateway:
        await gateway.ready(1)
        assert re.search(rb"has no tokenizer.json.*matched as text", b"".join(gateway.log))
        await answered(gateway, LONG)
        assert {mode: count for mode, count in (await prompts(gateway)).items() if count} == {"text": 1.0}


class Engine:
    """What answers /tokenize at a real port: by a pipeline of its own, or nonsense."""

    def __init__(self, pipeline: Pipeline | None):
        self.pipeline = pipeline
        self.hosts: list[str] = []

    async def __aenter__(self) -> "Engine":
        app = web.Application()
        for path in ("/tokenize", "/v1/chat/completions", "/v1/messages/count_tokens"):
            app.router.add_post(path, self.tokenize)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error) -> None:
        await self.runner.cleanup()

    async def tokenize(self, request: web.Request) -> web.Response:
        said = await request.json()
        self.hosts.append(request.host)
        if self.pipeline is None:
            return web.json_response({"tokens": [1, 2, 3]})
        if "messages" in said:
            return web.json_response({"tokens": self.pipeline.made("/v1/chat/completions", json.dumps(said).encode())})
        ids = self.pipeline.tokenizer.encode(said["prompt"], said["add_special_tokens"])
        return web.json_response({"tokens": memoryview(ids).cast("I").tolist()})

    def replica(
        self, incarnation: str = "1", rank: int | None = None, host: str = "127.0.0.1", **models: str
    ) -> Replica:
        id = f"{host}:{self.port}" + (f"-dp{rank}" if rank is not None else "")
        found = Replica(id, f"http://{host}:{self.port}", host, self.port, rank=rank, address="127.0.0.1")
        found.incarnation, found.models = incarnation, {"sim": None, **models}
        return found


def chat_mode(pipeline: Pipeline, model: str = "sim") -> str:
    body = {"model": model, "messages": [{"role": "user", "content": LONG}]}
    return pipeline.prepare("/v1/chat/completions", json.dumps(body).encode()).mode


def mode(pipeline: Pipeline, model: str) -> str:
    return pipeline.prepare(
        "/v1/completions", json.dumps({"model": model, "prompt": LONG}).encode(), None, {"adapter"}
    ).mode


@pytest.fixture
async def compared():
    """Makes comparisons."""
    made: list[TokenizerComparison] = []

    def make(pipeline: Pipeline) -> TokenizerComparison:
        made.append(TokenizerComparison(lambda: pipeline))
        return made[-1]

    yield make
    for one in made:
        one.stop()


async def all_done(comparison: TokenizerComparison) -> None:
    while comparison._running:
        await asyncio.wait(comparison._running, timeout=10)


async def test_the_only_engine_restarts_and_is_still_read_as_it_reads(tmp_path, compared, monkeypatch):
    folder = Path(model(tmp_path / "distilled", {"tokenizer_class": "LlamaTokenizerFast"}))
    ours, theirs = Pipeline(folder, "sim", 16), Pipeline(folder, "sim", 16)
    theirs.adopt(theirs.read_as("rebuilt as LlamaTokenizer"), True)
    assert ours.reading.how != theirs.reading.how
    comparison = compared(ours)
    read: list[str] = []
    enter = Pipeline._enter
    monkeypatch.setattr(Pipeline, "_enter", lambda self, loaded: (read.append(loaded.reading.how), enter(self, loaded)))
    async with Engine(theirs) as engine:
        for incarnation in ("1", "2", "3"):
            replica = engine.replica(incarnation)
            comparison.compare(replica)
            await all_done(comparison)
            assert ours.reading.how == theirs.reading.how and ours.inexact("sim") == ""
            assert replica.tokenizer == "the gateway's, rebuilt as LlamaTokenizer; fills its chat template alike"
    assert read == ["rebuilt as LlamaTokenizer"], "it is read once, and no other way in between"


async def test_an_adapter_loaded_later_is_no_more_exact_than_its_engine(compared):
    pipeline = Pipeline(sim_model_dir(), "sim", 16)
    comparison = compared(pipeline)
    async with Engine(None) as engine:
        replica = engine.replica()
        comparison.compare(replica)
        await all_done(comparison)
        replica.models["adapter"] = "sim"
        comparison.compare(replica)
        await all_done(comparison)
        assert [mode(pipeline, name) for name in ("sim", "adapter", "another")] == ["text", "text", "exact"]
        comparison.forget(replica.engine)
        await all_done(comparison)
        assert mode(pipeline, "adapter") == "exact"


async def test_the_engine_is_asked_at_the_address_where_it_was_found(compared):
    comparison = compared(Pipeline(sim_model_dir(), "sim", 16))
    async with Engine(Pipeline(sim_model_dir(), "sim", 16)) as engine:
        replica = engine.replica(host="engine.invalid")
        comparison.compare(replica)
        await all_done(comparison)
        assert replica.tokenizer.startswith("the gateway's") and engine.hosts[0] == f"engine.invalid:{engine.port}"


async def test_what_was_found_of_an_engine_is_told_of_all_its_ranks(compared):
    comparison = compared(Pipeline(sim_model_dir(), "sim", 16))
    async with Engine(Pipeline(sim_model_dir(), "sim", 16)) as engine:
        ranks = [engine.replica(rank=rank) for rank in (0, 1)]
        for rank in ranks:
            comparison.compare(rank)
        await all_done(comparison)
        ranks.append(engine.replica(rank=2))
        comparison.compare(ranks[-1])
        assert len({rank.tokenizer for rank in ranks}) == 1 and ranks[0].tokenizer.startswith("the gateway's")


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "differs"])
async def test_nothing_is_told_of_a_tokenizer_that_is_in_use_no_more_when_the_engine_answers(alike):
    """Its files were changed: what the engine said of the old ones would pass for the new ones, not loaded yet."""
    in_use = [Pipeline(sim_model_dir(), "sim", 16)]
    comparison = TokenizerComparison(lambda: in_use[-1])
    async with Engine(in_use[0] if alike else None) as engine:
        replica = engine.replica()
        comparison.compare(replica)
        in_use.append(Pipeline(None, "sim", 16))
        replica.tokenizer = "not compared yet"
        await all_done(comparison)
        assert engine.hosts and replica.tokenizer == "not compared yet"


@pytest.mark.parametrize("chats", [False, True], ids=["tokens", "chats"])
async def test_no_prompt_is_exact_once_it_is_told_that_the_engine_differs(compared, monkeypatch, chats):
    """However long it takes until the tokenizer is read as the engines do."""
    pipeline, gate = sglang_pipeline() if chats else Pipeline(sim_model_dir(), "sim", 16), asyncio.Event()
    comparison, told = compared(pipeline), asyncio.Event()
    adopt, tell = comparison._adopt, Replica.__setattr__

    async def later(*given) -> None:
        if comparison._engines[replica.engine].differs:
            await gate.wait()
        await adopt(*given)

    def telling(replica: Replica, name: str, value: object) -> None:
        tell(replica, name, value)
        if name == "tokenizer" and value.startswith("differs"):
            told.set()

    monkeypatch.setattr(comparison, "_adopt", later)
    monkeypatch.setattr(Replica, "__setattr__", telling)
    async with ChatEngine(other=True) if chats else Engine(None) as engine:
        replica = engine.replica()
        comparison.compare(replica)
        await asyncio.wait_for(told.wait(), 20)
        assert chat_mode(pipeline) == "text" and (mode(pipeline, "sim") == "exact") == chats
        gate.set()
        await all_done(comparison)
        assert chat_mode(pipeline) == "text" and (mode(pipeline, "sim") == "exact") == chats


def sglang_pipeline() -> Pipeline:
    pipeline = Pipeline(sim_model_dir(), "sim", 16)
    pipeline.follow(SGLANG.version_quirks(None))
    return pipeline


tokens_of = functools.cache(SglangTokens)  # reading the tokenizer for each chat would take most of these tests' CPU


class ChatEngine(Engine):
    """One whose chats have to be compared. It wants a key, answers chats with `busy` while that is set, and fills its
    template in another way if it is `other`."""

    def __init__(self, busy: int = 0, other: bool = False):
        super().__init__(Pipeline(sim_model_dir(), "sim", 16))
        self.busy, self.other, self.chats = busy, other, 0
        self.asked_often = asyncio.Event()

    async def tokenize(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer secret":
            return web.Response(status=401)
        said = await request.json()
        if "messages" not in said:
            return await super().tokenize(request)
        self.chats += 1
        if self.chats > len(asking.PAUSES) + 1:
            self.asked_often.set()
        if self.busy:
            return web.Response(status=self.busy)
        return web.json_response({"tokens": tokens_of(sim_model_dir()).chat(said)[self.other :]})

    def replica(self, *given, **more) -> Replica:
        found = super().replica(*given, **more)
        found.dialect, found.key = SGLANG, "secret"
        return found


async def test_chats_are_asked_for_with_the_engines_key(compared):
    pipeline = sglang_pipeline()
    comparison = compared(pipeline)
    async with ChatEngine() as engine:
        replica = engine.replica()
        comparison.compare(replica)
        await all_done(comparison)
        assert replica.tokenizer.endswith("fills its chat template alike") and chat_mode(pipeline) == "exact"


@pytest.mark.parametrize("dialect, found", [(SGLANG, "text"), (VLLM, "exact")])
async def test_an_engine_that_is_not_known_to_fill_templates_alike_is_exact_only_if_it_tells_its_tokens(
    compared, caplog, dialect, found
):
    pipeline = Pipeline(sim_model_dir(), "sim", 16)
    pipeline.follow(dialect.version_quirks("0.32.0"))
    comparison = compared(pipeline)
    async with Engine(pipeline) as engine:
        replica = engine.replica()
        replica.dialect, replica.url = dialect, f"{replica.url}/elsewhere"  # where /tokenize is missing
        comparison.compare(replica)
        await all_done(comparison)
        assert replica.tokenizer == "cannot be compared: /tokenize answers 404"
        assert chat_mode(pipeline) == mode(pipeline, "sim") == found
        assert ("matched as text" in caplog.text) == (found == "text")


async def test_an_engine_that_is_busy_when_it_comes_is_asked_again_until_it_answers(compared, monkeypatch):
    monkeypatch.setattr(asking, "PAUSES", (0.01, 0.01))
    pipeline = sglang_pipeline()
    comparison = compared(pipeline)
    async with ChatEngine(429) as engine:
        replica = engine.replica()
        comparison.compare(replica)
        await asyncio.wait_for(engine.asked_often.wait(), 20)
        assert replica.tokenizer == "its chats cannot be compared yet: it answers 429"
        assert chat_mode(pipeline) == "text", "nothing shows that its chats are the gateway's"
        assert not comparison.set_apart(), "nor that they are not"
        async with ChatEngine() as second:
            other = second.replica()
            comparison.compare(other)
            while other.tokenizer != "the gateway's, tokenizer.json as it is; fills its chat template alike":
                assert not other.tokenizer.startswith("differs")
                await asyncio.wait(comparison._running, timeout=0.05)
            comparison.forget(other.engine)
        engine.busy = 0
        await all_done(comparison)
        assert replica.tokenizer.endswith("fills its chat template alike") and chat_mode(pipeline) == "exact"


async def test_a_busy_engine_leaves_a_model_exact_whose_chats_another_has_shown(compared, monkeypatch):
    monkeypatch.setattr(asking, "PAUSES", (0.01, 0.01))
    pipeline = sglang_pipeline()
    comparison = compared(pipeline)
    async with ChatEngine() as well, ChatEngine(503) as busy:
        comparison.compare(well.replica())
        await all_done(comparison)
        comparison.compare(busy.replica())
        await asyncio.wait_for(busy.asked_often.wait(), 20)
        assert chat_mode(pipeline) == "exact"


class MistralEngine(ChatEngine):
    """One whose mistral-common writes Mistral's own format by the rules of version `tekken`."""

    def __init__(self, folder: Path, tekken: int):
        super().__init__()
        self.pipeline = Pipeline(FAMILIES[f"Mistral (tekken v{tekken})"](folder), "sim", 16)
        self.pipeline.adopt(self.pipeline.likeliest(), True)

    async def tokenize(self, request: web.Request) -> web.Response:
        said = await request.json()
        if "messages" not in said:
            return await Engine.tokenize(self, request)
        self.chats += 1
        return web.json_response({"tokens": self.pipeline.made("/v1/chat/completions", json.dumps(said).encode())})

    def replica(self, *given, **more) -> Replica:
        return Engine.replica(self, *given, **more)


@pytest.mark.parametrize("theirs, found", [(13, "exact"), (11, "text")])
async def test_rules_that_follow_a_librarys_version_are_shown_by_chats(theirs, found, compared, tmp_path):
    """The two versions make the same tokens of texts, and write the results of tools otherwise."""
    pipeline = Pipeline(FAMILIES["Mistral (tekken v13)"](tmp_path / "ours"), "sim", 16)
    comparison = compared(pipeline)
    async with MistralEngine(tmp_path / "theirs", theirs) as engine:
        replica = engine.replica()
        assert pipeline.must_be_shown and chat_mode(pipeline) == "text"
        comparison.compare(replica)
        await all_done(comparison)
        assert engine.chats and chat_mode(pipeline) == found
        assert ("of a chat it makes other tokens" in replica.tokenizer) == (found == "text")


EVENING = 1_795_898_520  # Saturday 28 November 2026, 20:42 UTC; in Auckland it is Sunday


ADOPTED = len(CHATS) + 4  # chats that it has been asked for once it was compared and has been looked at again


class DatedEngine(Engine):
    """One whose template prints the date of its zone, in quarters of an hour from UTC. `tells`: what of its chats."""

    def __init__(self, folder: str, zone: int, now: list[float], tells: str = "ids"):
        super().__init__(Pipeline(Path(folder), "sim", 16))
        self.zone, self.now, self.tells = zone, now, tells
        self.asked: asyncio.Queue[str] = asyncio.Queue()

    @property
    def day(self) -> date:
        return datetime.fromtimestamp(self.now[0], timezone(timedelta(minutes=15 * self.zone))).date()

    async def tokenize(self, request: web.Request) -> web.Response:
        said = await request.json()
        if "messages" not in said:
            return await super().tokenize(request)
        self.asked.put_nowait(request.path)
        ids = self.pipeline.made("/v1/chat/completions", json.dumps(said).encode(), self.day)
        if self.tells == "nothing":
            return web.json_response({})
        if self.tells == "counts":
            return web.json_response({"usage": {"prompt_tokens": len(ids)}})
        return web.json_response({"tokens": ids})

    def prompt(self, body: bytes) -> list[int]:
        return self.pipeline.made("/v1/chat/completions", body, self.day)

    async def looked_at(self, times: int = 3) -> None:
        """Once it has been asked for the third time, its second answer is known, and that was asked for now."""
        while not self.asked.empty():
            self.asked.get_nowait()
        for _ in range(times):
            await asyncio.wait_for(self.asked.get(), 20)


@pytest.fixture
def dated(tmp_path, compared, monkeypatch):
    """A model whose template prints the date, what compares its engines, and the moment that it is."""
    monkeypatch.setattr(asking, "seconds_to_next_look", lambda now: 0.01)
    folder = template(
        model(tmp_path / "dated", {}),
        lambda text: text.replace(
            "{%- for message",
            "{{- '<｜begin▁sys｜>Today is ' + strftime_now('%A %d %B %Y') + '<｜end▁sys｜>' -}}{%- for message",
            1,
        ),
    )
    now = [float(EVENING)]
    pipeline = Pipeline(Path(folder), "sim", 16)
    pipeline.clock.now = lambda: now[0]
    return folder, pipeline, compared(pipeline), now


def ids_of(pipeline: Pipeline, body: bytes = PLAIN) -> list[int] | str:
    """Of a chat, or how it is known if it is not exact."""
    prompt = pipeline.prepare("/v1/chat/completions", body)
    return memoryview(prompt.token_ids).cast("I").tolist() if prompt.mode == "exact" else prompt.mode


async def test_the_date_is_that_of_the_engines_time_zone_and_ends_with_its_day(dated, caplog):
    caplog.set_level("INFO", "hitherto")
    folder, pipeline, comparison, now = dated
    async with DatedEngine(folder, 52, now) as auckland:
        replica = auckland.replica()
        comparison.compare(replica)
        await auckland.looked_at(ADOPTED)
        assert ids_of(pipeline) == auckland.prompt(PLAIN) and "Sunday" in replica.tokenizer
        assert "it prints Sunday 29 November, its time zone (TZ) is another than this gateway's" in caplog.text
        assert "tokenizer than" not in caplog.text and not comparison.set_apart()
        for at, day in ((14.2 * 3600, 29), (14.3 * 3600 - 1, 29), (14.3 * 3600 + 6, 30), (14.4 * 3600, 30)):
            now[0] = EVENING + at  # its midnight is after 14.3 hours
            await auckland.looked_at()
            assert auckland.day.day == day
            assert ids_of(pipeline) == ("partly" if at == 14.3 * 3600 - 1 else auckland.prompt(PLAIN)), at
        now[0] = EVENING + 14.55 * 3600
        assert ids_of(pipeline) == auckland.prompt(PLAIN), "it had ended before"


async def test_engines_of_unlike_zones_are_exact_up_to_the_date_while_it_differs(dated, caplog):
    folder, pipeline, comparison, now = dated
    async with DatedEngine(folder, 52, now) as auckland, DatedEngine(folder, 0, now) as london:
        replicas = [one.replica() for one in (auckland, london)]
        for one in replicas:
            comparison.compare(one)
        await auckland.looked_at(ADOPTED)
        await london.looked_at(ADOPTED)
        await auckland.looked_at()
        prompt = pipeline.prepare("/v1/chat/completions", PLAIN)
        told = (
            f"replica {replicas[1].id} prints Saturday 28 November, replica {replicas[0].id} prints Sunday 29 November: "
            "their time zones (TZ) differ"
        )
        assert prompt.mode == "partly" and told in prompt.note and told in caplog.text
        assert all(told in one.tokenizer and told in str(_seen(one, None, None)) for one in replicas)
        assert not comparison.set_apart()
        now[0] = EVENING + 3.5 * 3600  # London's day has begun
        for one in (auckland, london, auckland):
            await one.looked_at()
        assert ids_of(pipeline) == auckland.prompt(PLAIN) == london.prompt(PLAIN)
        assert not any(_seen(one, None, None) for one in replicas)
        now[0] = EVENING + 15.5 * 3600  # and Auckland's next one
        for one in (auckland, london, auckland):
            await one.looked_at()
        assert ids_of(pipeline) == "partly"
        comparison.forget(auckland.replica().engine)
        await london.looked_at()
        assert ids_of(pipeline) == london.prompt(PLAIN)


@pytest.mark.parametrize("tells", ["counts", "nothing"])
async def test_where_nothing_tells_the_date_chats_are_exact_up_to_it(dated, tells):
    folder, pipeline, comparison, now = dated
    async with DatedEngine(folder, 0, now, tells) as engine, DatedEngine(folder, 0, now) as second:
        replica = engine.replica()
        comparison.compare(replica)
        await engine.looked_at(4 * ADOPTED)
        prompt = pipeline.prepare("/v1/chat/completions", PLAIN)
        longer = json.loads(PLAIN)["messages"] + [{"role": "assistant", "content": "x"}]
        assert prompt.mode == "partly" and f"nothing tells which day replica {replica.id} prints" in prompt.note
        assert "nothing tells which day" in str(_seen(replica, None, None))
        again = pipeline.prepare("/v1/chat/completions", json.dumps({"messages": longer}).encode())
        assert list(again.hashes[: len(prompt.hashes) - 1]) == list(prompt.hashes[:-1]), "the session goes on by text"
        assert mode(pipeline, "sim") == "exact", "texts have no date"
        comparison.compare(second.replica())
        await second.looked_at(ADOPTED)
        assert ids_of(pipeline) == "partly"
        comparison.forget(replica.engine)
        await second.looked_at()
        assert ids_of(pipeline) == second.prompt(PLAIN)


async def test_an_engine_that_prints_a_day_of_its_own_is_matched_as_text(dated):
    """vLLM takes one from VLLM_SYSTEM_START_DATE."""
    folder, pipeline, comparison, now = dated
    async with DatedEngine(folder, 0, [0.0]) as engine:
        replica = engine.replica()
        comparison.compare(replica)
        await all_done(comparison)
        assert replica.tokenizer.startswith("differs: of a chat it makes other tokens")
        assert ids_of(pipeline) == "text"

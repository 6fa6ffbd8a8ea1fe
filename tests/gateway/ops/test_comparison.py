"""The gateway's tokenizer against the engine's, when an engine is adopted: real processes on both sides."""

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest
from aiohttp import web

from gateway.ops import comparison as asking
from gateway.ops.comparison import TokenizerComparison
from gateway.prompt.pipeline import Pipeline, Verdict
from replicas import Replica
from replicas.engines.sglang import SGLANG
from replicas.engines.vllm import VLLM
from replicas.simulated.model import sim_model_dir
from replicas.simulated.tokens import Tokens

from ..prompt.families import FAMILIES
from ..running import running

LONG = "All the world's a stage, and all the men and women merely players. " * 80


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
        assert status["replicas"][0]["tokenizer"] == "the gateway's, tokenizer.json as it is"
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


async def test_a_model_without_tokenizer_json_is_served_by_load(start_engine, tmp_path):
    """Kimi's folder has tiktoken.model and code of its own."""
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TikTokenTokenizer", "chat_template": "x"}')
    engine = start_engine().wait()
    async with running("--model", str(tmp_path), "--replica-url", engine.url) as gateway:
        await gateway.ready(1)
        assert re.search(rb"has no tokenizer.json.*routed by load", b"".join(gateway.log))
        await answered(gateway, LONG)
        assert {mode: count for mode, count in (await prompts(gateway)).items() if count} == {"load": 1.0}


class Engine:
    """What answers /tokenize at a real port: by a pipeline of its own, or nonsense."""

    def __init__(self, pipeline: Pipeline | None):
        self.pipeline = pipeline
        self.hosts: list[str] = []

    async def __aenter__(self) -> "Engine":
        app = web.Application()
        app.router.add_post("/tokenize", self.tokenize)
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
        ids = self.pipeline.tokenizer.encode(said["prompt"], said["add_special_tokens"])
        return web.json_response({"tokens": memoryview(ids).cast("I").tolist()})

    def replica(
        self, incarnation: str = "1", rank: int | None = None, host: str = "127.0.0.1", **models: str
    ) -> Replica:
        id = f"{host}:{self.port}" + (f"-dp{rank}" if rank is not None else "")
        found = Replica(id, f"http://{host}:{self.port}", host, self.port, rank=rank, address="127.0.0.1")
        found.incarnation, found.models = incarnation, {"sim": None, **models}
        return found


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
    theirs.adopt(theirs.read_as("rebuilt as LlamaTokenizer"), True, {})
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
            assert replica.tokenizer == "the gateway's, rebuilt as LlamaTokenizer"
    assert read == ["rebuilt as LlamaTokenizer"], "it is read once, and no other way in between"


def test_a_way_that_is_no_longer_in_use_confirms_nothing(tmp_path):
    """A comparison ends after the tokenizer was read in yet another way."""
    folder = Path(model(tmp_path / "distilled", {"tokenizer_class": "LlamaTokenizerFast"}))
    pipeline = Pipeline(folder, "sim", 16)
    pipeline.adopt(Verdict("rebuilt as LlamaTokenizer"), True, {})
    assert pipeline.reading.how != "rebuilt as LlamaTokenizer" and not pipeline._confirmed


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
    pipeline, gate = Pipeline(sim_model_dir(), "sim", 16), asyncio.Event()
    comparison = compared(pipeline)
    adopt = comparison._adopt

    async def later(*given) -> None:
        if comparison._engines[replica.engine].differs:
            await gate.wait()
        await adopt(*given)

    monkeypatch.setattr(comparison, "_adopt", later)
    async with ChatEngine(other=True) if chats else Engine(None) as engine:
        replica = engine.replica()
        comparison.compare(replica)
        async with asyncio.timeout(20):
            while not replica.tokenizer.startswith("differs"):
                await asyncio.sleep(0)
        assert mode(pipeline, "sim") == "text"
        gate.set()
        await all_done(comparison)
        assert mode(pipeline, "sim") == "text"


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
        return web.json_response({"tokens": Tokens(sim_model_dir()).chat(said)[self.other :]})

    def replica(self, *given, **more) -> Replica:
        found = super().replica(*given, **more)
        found.dialect, found.key = SGLANG, "secret"
        return found


async def test_chats_are_asked_for_with_the_engines_key(compared):
    pipeline = Pipeline(sim_model_dir(), "sim", 16)
    comparison = compared(pipeline)
    async with ChatEngine() as engine:
        replica = engine.replica()
        comparison.compare(replica)
        await all_done(comparison)
        assert replica.tokenizer.endswith("fills its chat template alike") and mode(pipeline, "sim") == "exact"


@pytest.mark.parametrize("dialect, found", [(SGLANG, "text"), (VLLM, "exact")])
async def test_an_engine_that_is_not_known_to_fill_templates_alike_is_exact_only_if_it_tells_its_tokens(
    compared, caplog, dialect, found
):
    pipeline = Pipeline(sim_model_dir(), "sim", 16)
    comparison = compared(pipeline)
    async with Engine(pipeline) as engine:
        replica = engine.replica()
        replica.dialect, replica.url = dialect, f"{replica.url}/elsewhere"  # where /tokenize is missing
        comparison.compare(replica)
        await all_done(comparison)
        assert replica.tokenizer == "cannot be compared: /tokenize answers 404"
        assert mode(pipeline, "sim") == found
        assert ("matched as text" in caplog.text) == (found == "text")


async def test_an_engine_that_is_busy_when_it_comes_is_asked_again_until_it_answers(compared, monkeypatch):
    monkeypatch.setattr(asking, "PAUSES", (0.01, 0.01))
    pipeline = Pipeline(sim_model_dir(), "sim", 16)
    comparison = compared(pipeline)
    async with ChatEngine(429) as engine:
        replica = engine.replica()
        comparison.compare(replica)
        await asyncio.wait_for(engine.asked_often.wait(), 20)
        assert replica.tokenizer == "its chats cannot be compared yet: it answers 429"
        assert mode(pipeline, "sim") == "text", "nothing shows that its chats are the gateway's"
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
        assert replica.tokenizer.endswith("fills its chat template alike") and mode(pipeline, "sim") == "exact"


async def test_a_busy_engine_leaves_a_model_exact_whose_chats_another_has_shown(compared, monkeypatch):
    monkeypatch.setattr(asking, "PAUSES", (0.01, 0.01))
    pipeline = Pipeline(sim_model_dir(), "sim", 16)
    comparison = compared(pipeline)
    async with ChatEngine() as well, ChatEngine(503) as busy:
        comparison.compare(well.replica())
        await all_done(comparison)
        comparison.compare(busy.replica())
        await asyncio.wait_for(busy.asked_often.wait(), 20)
        assert mode(pipeline, "sim") == "exact"


class MistralEngine(ChatEngine):
    """One whose mistral-common writes Mistral's own format by the rules of version `tekken`."""

    def __init__(self, folder: Path, tekken: int):
        super().__init__()
        self.pipeline = Pipeline(FAMILIES[f"Mistral (tekken v{tekken})"](folder), "sim", 16)
        self.pipeline.adopt(self.pipeline.likeliest(), True, {})

    async def tokenize(self, request: web.Request) -> web.Response:
        said = await request.json()
        if "messages" not in said:
            return await Engine.tokenize(self, request)
        self.chats += 1
        made = self.pipeline.prepare("/v1/chat/completions", json.dumps(said).encode())
        return web.json_response({"tokens": memoryview(made.token_ids).cast("I").tolist()})

    def replica(self, *given, **more) -> Replica:
        return Engine.replica(self, *given, **more)


@pytest.mark.parametrize("theirs, found", [(13, "exact"), (11, "text")])
async def test_rules_that_follow_a_librarys_version_are_shown_by_chats(theirs, found, compared, tmp_path):
    """The two versions make the same tokens of texts, and write the results of tools otherwise."""
    pipeline = Pipeline(FAMILIES["Mistral (tekken v13)"](tmp_path / "ours"), "sim", 16)
    comparison = compared(pipeline)
    async with MistralEngine(tmp_path / "theirs", theirs) as engine:
        replica = engine.replica()
        assert replica.dialect.fills_templates_alike and mode(pipeline, "sim") == "text"
        comparison.compare(replica)
        await all_done(comparison)
        assert engine.chats and mode(pipeline, "sim") == found
        assert ("of a chat it makes other tokens" in replica.tokenizer) == (found == "text")

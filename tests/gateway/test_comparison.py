"""The gateway's tokenizer against the engine's, when an engine is adopted: real processes on both sides."""

import json
import re
import shutil
from pathlib import Path

import pytest

from replicas.simulated.model import sim_model_dir

from .running import running

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
    page = (await gateway.admin.get("/metrics")).text
    return {mode: float(count) for mode, count in re.findall(r'hitherto_prompts_total\{mode="(\w+)"\} (\S+)', page)}


@pytest.mark.parametrize("workers", [[], ["--workers", "2"]])
async def test_an_engine_that_reads_the_files_in_another_way_is_followed(start_engine, tmp_path, workers):
    """By its class transformers may rebuild this tokenizer; the engine uses tokenizer.json as it is."""
    folder = model(tmp_path / "distilled", {"tokenizer_class": "LlamaTokenizerFast"})
    engine = start_engine("--model", folder, "--served-model-name", "sim").wait()
    async with running("--model", folder, "--replica-url", engine.url, *workers) as gateway:
        status = await gateway.until(lambda status: any(one["tokenizer"] != "not compared yet" for one in status["replicas"]))
        assert status["replicas"][0]["tokenizer"] == "the gateway's, tokenizer.json as it is"
        for _ in range(200):  # workers are told a moment later
            reply = await answered(gateway, LONG)
            if (await prompts(gateway))["exact"] >= 2:
                break
        assert int(reply.headers["x-hitherto-cached-tokens"]) == reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 500


async def test_a_model_whose_engine_has_another_tokenizer_is_not_called_exact(start_engine, tmp_path):
    ours = model(tmp_path / "ours", {})
    added = json.loads((tmp_path / "ours" / "tokenizer.json").read_text())["added_tokens"]
    one = {"content": "\u4e16", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    theirs = model(tmp_path / "theirs", {}, added_tokens=[*added, {"id": max(token["id"] for token in added) + 1, **one}])
    engine = start_engine("--model", theirs, "--served-model-name", "sim").wait()
    async with running("--model", ours, "--replica-url", engine.url) as gateway:
        status = await gateway.until(lambda status: any(one["tokenizer"] != "not compared yet" for one in status["replicas"]))
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

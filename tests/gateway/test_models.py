"""Several models behind one gateway, each exact: a gateway process before simulated engines of unlike models and variants."""

import json
import shutil
from pathlib import Path

import pytest

from replicas.simulated.model import sim_model_dir

from .running import running

PROSE = "All the world's a stage, and all the men and women merely players. "


def other_model(folder: Path, name: str = "") -> str:
    """A model with another tokenizer than the demo's, of which half of the merges are gone, and another chat template."""
    shutil.copytree(sim_model_dir(), folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = merges[: len(merges) // 2]
    path.write_text(json.dumps(tokenizer))
    template = folder / "chat_template.jinja"
    template.write_text("Speak plainly." + name + template.read_text())
    return str(folder)


async def ask(gateway, model: str, text: str, **fields) -> tuple[int, int]:
    """Cached tokens of a chat, as predicted and as the engine reports."""
    reply = await gateway.chat([{"role": "user", "content": text}], model=model, **fields)
    assert reply.status_code == 200, reply.text
    return int(reply.headers["x-hitherto-cached-tokens"]), reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def held(gateway, model: str, text: str) -> int:
    """Ask until the prompt's blocks were reported by events; how many tokens of it are held. Nothing is ever predicted too high."""
    for _ in range(200):
        predicted, reported = await ask(gateway, model, text)
        assert predicted <= reported
        if predicted and predicted == reported:
            return predicted
    raise AssertionError("what is held is never predicted")


async def compared(gateway, count: int) -> dict:
    """The status, once all engines' tokenizers were found to be the gateway's."""
    await gateway.ready(count)
    return await gateway.until(lambda status: sum(one["tokenizer"].startswith("the gateway's") for one in status["replicas"]) == count)


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> str:
    return other_model(tmp_path_factory.mktemp("models") / "other")


async def test_each_model_has_its_own_tokens_blocks_and_context(start_engine, other):
    long = start_engine("--served-model-name", "long", "--max-model-len", "131072", "--num-blocks", "9000", "--lora", "red")
    short = start_engine("--model", other, "--served-model-name", "short", "--block-size", "32", "--max-model-len", "512")
    async with running("--replica-url", long.wait().url, short.wait().url) as gateway:
        await compared(gateway, 2)
        told = {one["id"]: one["max_model_len"] for one in (await gateway.client.get("/v1/models")).json()["data"]}
        assert told == {"long": 131072, "red": 131072, "short": 512}
        assert await held(gateway, "long", PROSE * 150) > 2000
        assert await held(gateway, "red", PROSE * 150) > 2000
        assert await held(gateway, "short", PROSE * 10) % 32 == 0
        refused = await gateway.chat([{"role": "user", "content": PROSE * 150}], model="short")
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        assert "512" in refused.json()["error"]["message"]
        spaces = (await gateway.status())["spaces"]
        assert {(*one["models"],): (one["block_size"], one["max_model_len"]) for one in spaces} == {("long",): (16, 131072), ("short",): (32, 512)}
        assert set((await gateway.status())["totals"]["prompts"]) == {"exact"}

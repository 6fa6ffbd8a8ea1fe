"""A gateway process and a simulated engine with LoRA adapters that come, go and change while they are asked."""

import pytest

from .running import running

WORDS = "All the world's a stage, and all the men and women merely players. " * 20


async def ask(gateway, model: str) -> tuple[int, int]:
    """Cached tokens of a prompt, as predicted and as the engine reports."""
    reply = await gateway.client.post("/v1/completions", json={"model": model, "max_tokens": 1, "prompt": WORDS})
    assert reply.status_code == 200, reply.text
    return int(reply.headers["x-hitherto-cached-tokens"]), reply.json()["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]


async def post(gateway, id: str, path: str, **said) -> None:
    reply = await gateway.admin.post(f"/replicas/{id}/engine{path}", json=said)
    assert reply.status_code == 200, reply.text


async def held(gateway, model: str) -> int:
    """Ask until the prompt's blocks were reported by events; how many tokens of it are held."""
    for _ in range(100):
        predicted, reported = await ask(gateway, model)
        assert predicted <= reported
        if predicted:
            return predicted
    raise AssertionError("nothing of it is ever predicted")


@pytest.mark.parametrize("way", ["in place", "unloaded and loaded"])
async def test_an_adapter_that_is_loaded_from_another_folder_is_predicted_to_be_cached_nowhere(way):
    """vLLM keys blocks with the adapter's path beside its name, and events tell the name alone."""
    async with running("--launch", "1") as gateway:
        id = (await gateway.ready(1))["replicas"][0]["id"]
        await post(gateway, id, "/v1/load_lora_adapter", lora_name="red", lora_path="/adapters/first")
        assert await ask(gateway, "red") == (0, 0)
        whole = await held(gateway, "red")
        assert await held(gateway, "sim") == whole
        if way == "in place":
            await post(
                gateway, id, "/v1/load_lora_adapter", lora_name="red", lora_path="/adapters/second", load_inplace=True
            )
        else:
            await post(gateway, id, "/v1/unload_lora_adapter", lora_name="red")
            await post(gateway, id, "/v1/load_lora_adapter", lora_name="red", lora_path="/adapters/second")
        await gateway.until(lambda _: any(b"was loaded from /adapters/second" in line for line in gateway.log))
        assert await ask(gateway, "red") == (0, 0)
        assert await held(gateway, "red") == whole
        assert await held(gateway, "sim") == whole
        page = (await gateway.admin.get("/metrics")).text
        assert f'hitherto_predictions_total{{outcome="over",replica="{id}"}} 0.0' in page

"""A gateway process and a simulated engine with LoRA adapters that come, go and change while they are asked."""

import pytest

from .running import running
from .test_models import PROSE, ask, held

TEXT = PROSE * 20


async def post(gateway, id: str, path: str, **said) -> None:
    reply = await gateway.admin.post(f"/replicas/{id}/engine/v1{path}", json=said)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("way", ["in place", "unloaded and loaded"])
async def test_an_adapter_that_is_loaded_from_another_folder_is_predicted_to_be_cached_nowhere(way):
    """vLLM keys blocks with the adapter's path beside its name, and events tell the name alone."""
    async with running("--launch", "1") as gateway:
        id = (await gateway.ready(1))["replicas"][0]["id"]
        await post(gateway, id, "/load_lora_adapter", lora_name="red", lora_path="/adapters/first")
        assert await ask(gateway, "red", TEXT) == (0, 0)
        whole = await held(gateway, "red", TEXT)
        assert await held(gateway, "sim", TEXT) == whole
        more = {"load_inplace": True} if way == "in place" else {}
        if not more:
            await post(gateway, id, "/unload_lora_adapter", lora_name="red")
        await post(gateway, id, "/load_lora_adapter", lora_name="red", lora_path="/adapters/second", **more)
        await gateway.until(lambda _: any(b"was loaded from /adapters/second" in line for line in gateway.log))
        assert await ask(gateway, "red", TEXT) == (0, 0)
        assert await held(gateway, "red", TEXT) == await held(gateway, "sim", TEXT) == whole
        assert await gateway.counted("hitherto_predictions_total", outcome="over", replica=id) == 0

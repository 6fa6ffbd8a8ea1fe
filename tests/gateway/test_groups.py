"""An engine whose layers are not all alike behind a gateway: what is predicted is what its usage tells."""

import pytest

from .running import running
from .test_copies import compared, story
from .test_lmcache import read


@pytest.mark.parametrize("retention", ["replay", "all"])
async def test_predictions_are_what_an_engine_with_windows_and_states_delivers(start_engine, retention):
    engine = start_engine("--windows", "80", "0", "--retention", retention).wait()
    async with running("--model", "sim", "--replica-url", engine.url) as gateway:
        await gateway.until(lambda status: status["replicas"][0]["events"] == "live")

        async def ask(prompt: str) -> int:
            body = {"model": "sim", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
            usage = (await gateway.client.post("/v1/completions", json=body)).json()["usage"]
            told = await gateway.client.get(f"{engine.url}/faults")
            await read(gateway, told.json()["event_batches"])
            return usage["prompt_tokens_details"]["cached_tokens"]

        grown = story("a") + story("b")
        cached = [await ask(grown := grown + f" {turn}: " + story("and then")) for turn in range(8)]
        assert cached[0] == 0 and cached == sorted(cached) and len(set(cached)) == 8
        branches = [await ask(story("a") + story(f"instead, {way}")) for way in ("c", "d", "e")]
        assert branches[0] == 0, "nobody had use for a state there"
        assert branches[1] == branches[2] > 0
        assert await compared(gateway) == {"equal": 11, "over": 0, "under": 0}

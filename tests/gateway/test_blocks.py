"""Engines whose blocks are not what /metrics says, and engines that compute the last block they find once more."""

import pytest

from .test_sglang import Talks, house, name, predicted, reported

SHARED = ("--block-size", "128", "--decode-context-parallel-size", "8", "--num-blocks", "90")


async def told(home, engine, blocks: tuple[int, int]) -> None:
    """Its blocks are taken to be these, what it holds in them is known, and its prompts are seen to be the gateway's:
    until then they go by text."""
    replica = name(engine)
    await home.until(lambda: home.gateway.models.blocks(replica) == blocks)
    await home.heard()
    await home.until(lambda: home.gateway.intakes[replica].state == "live")
    await home.until(lambda: home.gateway.fleet.replicas[replica].tokenizer.endswith("fills its chat template alike"))


def problems(home) -> list[str]:
    return [one for replica in home.gateway.view.status()["replicas"] for one in replica["problems"] if "block" in one]


async def test_blocks_of_many_gpus_are_learned_from_events_and_predicted_exactly(start_engine):
    """vLLM before 0.32 tells one GPU's part of a block alone."""
    wide, plain = start_engine(*SHARED), start_engine("--num-blocks", "400")
    for engine in (wide, plain):
        engine.wait()
    async with house(wide, plain, policy="random") as home:
        assert home.gateway.models.blocks(name(wide)) == (16, 0)
        while home.gateway.models.blocks(name(wide)) == (16, 0):  # until one has come there, and its events
            await home.chat([{"role": "user", "content": Talks(0).text(200)}])
            await home.heard()
        await told(home, wide, (128, 0))
        assert home.gateway.models.blocks(name(plain)) == (16, 0)
        found = await home.converse(Talks(1), 60)
        assert max(found[name(wide)]) >= 256 and not any(tokens % 128 for tokens in found[name(wide)])
        assert max(found[name(plain)]) > 128 and not problems(home)


async def test_a_speculators_block_is_known_from_the_first_answer_on(start_engine):
    engines = [start_engine(*flags, "--num-blocks", "400") for flags in (("--drops-block",), ())]
    async with house(*[engine.wait() for engine in engines], policy="random") as home:
        found = await home.converse(Talks(3), 40)
        assert all(max(cached) > 64 for cached in found.values()) and len(found) == 2
        assert not home.gateway.metrics.heals.total()


@pytest.mark.parametrize("drops", [True, False])
async def test_a_steady_block_more_or_less_is_learned_from_answers_and_the_map_stays(start_engine, drops):
    """No series tells of a speculator that reads hidden states, or it tells of one that does not (ngram)."""
    engine = start_engine("--num-blocks", "400", *(["--drops-block"] if drops else [])).wait()
    async with house(engine) as home:
        (backend,) = home.gateway.proxy.backends.values()
        home.gateway.map.drop(backend.slot, not drops)
        talks, wrong = Talks(4), 0
        while home.gateway.map.drops(backend.slot) != drops:
            await home.heard()
            answer = await home.chat([{"role": "system", "content": "walrus " * 60}, *talks.next()[-1:]])
            wrong += predicted(answer) != reported(answer)
        assert wrong == 3
        await home.converse(talks, 30)
        assert not home.gateway.metrics.heals.total()

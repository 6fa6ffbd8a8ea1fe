"""Engines whose events are fetched over HTTP, beside one that publishes them, of one model behind one gateway."""

import signal

import pytest

from .test_sglang import House, Talks, house, name, predicted, reported

SPEAKS = ("--speaks", "tensorrt-llm", "--num-blocks", "90")


class Fetched(House):
    """Knows what is fetched by the number of the next event."""

    async def heard(self) -> None:
        for one in self.ready():
            told = (await self.client.get(f"{one.url}/faults")).json()["event_batches"]
            intake = self.gateway.intakes[one.id]
            if one.dialect.id == "tensorrt-llm":
                decoder = intake._decode.__self__
                # the first event, of the cache's size, may have gone to whoever followed the engine's predecessor
                await self.until(lambda decoder=decoder, told=told: (decoder._next or 1) >= told)
            else:
                await self.until(lambda intake=intake, told=told: not told or (intake.last_seq or 0) >= told - 1)


async def test_what_is_predicted_is_delivered_also_after_evictions(start_engine):
    other = start_engine("--num-blocks", "160", "--block-size", "32").wait()
    fetched = [start_engine(*SPEAKS).wait() for _ in range(2)]
    async with house(other, *fetched, policy="random") as home:
        home.__class__ = Fetched
        assert [one.dialect.id for one in home.ready()] == ["sim", "tensorrt-llm", "tensorrt-llm"]
        found = await home.converse(Talks(1), 90)
        assert len(found) == 3
        for engine in fetched:
            assert max(found[name(engine)]) > 200 and not any(tokens % 32 for tokens in found[name(engine)])
            assert home.gateway.intakes[name(engine)].blocks_removed > 10
        assert home.gateway.metrics.prompts.values == {("exact",): 90}
        assert not home.gateway.metrics.heals.total()
        assert {space.format.block_size for space in home.gateway.models.spaces} == {32}


async def test_one_that_is_killed_and_comes_back_holds_nothing(start_engine):
    first, other = (start_engine(*SPEAKS).wait() for _ in range(2))
    async with house(first, other, policy="random") as home:
        home.__class__ = Fetched
        talks = Talks(2)
        await home.converse(talks, 20)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(20)
        await home.until(lambda: len(home.ready()) == 1)
        await home.converse(talks, 5)
        start_engine(*SPEAKS, "--port", str(first.port)).wait()
        await home.until(lambda: len(home.ready()) == 2)
        found = await home.converse(talks, 30)
        assert len(found) == 2 and min(found[name(first)]) == 0
        assert not home.gateway.metrics.heals.total()


async def test_events_that_somebody_else_fetched_mean_that_the_cache_is_not_known(start_engine):
    engine = start_engine(*SPEAKS).wait()
    async with house(engine) as home:
        home.__class__ = Fetched
        talks = Talks(3)
        await home.converse(talks, 5)
        (await home.client.post(f"{engine.url}/faults", json={"drop_events": 1})).raise_for_status()
        await home.chat([{"role": "user", "content": talks.text(80)}], max_tokens=20)
        for _ in range(8):  # nothing is promised that may be gone; what is stored from then on is known again
            await home.heard()
            messages = talks.next()
            answer = await home.chat(messages, max_tokens=20)
            assert predicted(answer) <= reported(answer)
            talks.answered(messages, answer)
        unheard = [{"role": "system", "content": "Why the walrus wept, and whether pigs have wings. " * 20}]
        for known in (False, True):
            await home.heard()
            answer = await home.chat(unheard, max_tokens=4)
            assert predicted(answer) == reported(answer) and (reported(answer) > 100) == known


async def test_one_behind_a_key_is_compared_and_asked_with_it(start_engine):
    engine = start_engine(*SPEAKS, "--api-key", "k").wait()
    async with house(engine, engine_api_key="k") as home:
        home.__class__ = Fetched
        home.client.headers["Authorization"] = "Bearer k"
        await home.until(lambda: home.ready()[0].tokenizer.endswith("fills its chat template alike"))
        await home.converse(Talks(5), 6)
        assert home.gateway.intakes[name(engine)].state == "live"


@pytest.mark.parametrize("more", [{}, {"redis_url": "redis://127.0.0.1:1", "event_intake": "each"}])
async def test_a_warning_says_that_not_each_gateway_can_have_events_that_are_told_once(start_engine, caplog, more):
    engine = start_engine(*SPEAKS).wait()
    async with house(engine, **more):
        assert ("event_intake: each" in caplog.text) == bool(more)

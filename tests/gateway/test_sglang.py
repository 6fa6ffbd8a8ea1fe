"""Engines that cache in pages of one token, beside engines with blocks of sixteen, of one model behind one gateway."""

import asyncio
import random
import signal
from contextlib import asynccontextmanager

import httpx
import pytest

from gateway.app import Gateway
from gateway.settings import Settings
from replicas import State

from .running import predicted, reported

WORDS = "the sea was wet as could be and the sands were dry you could not see a cloud because no cloud was in the sky".split()
CACHE = ("--num-blocks", "2600")  # of pages; some four conversations


class Talks:
    """Conversations that share the beginning of their system prompts and grow turn by turn."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.talks: list[list[dict]] = []

    def text(self, words: int) -> str:
        return " ".join(self.random.choice(WORDS) for _ in range(words))

    def next(self) -> list[dict]:
        if len(self.talks) < 12 and (not self.talks or self.random.random() < 0.3):
            shared = "You are a walrus, and know a carpenter. " * self.random.randint(1, 8)
            self.talks.append([{"role": "system", "content": shared + self.text(self.random.randint(1, 40))}])
        talk = self.random.choice(self.talks)
        return [*talk, {"role": "user", "content": self.text(self.random.randint(1, 60))}]

    def answered(self, messages: list[dict], answer: httpx.Response) -> None:
        talk = next(one for one in self.talks if one == messages[:-1])
        talk += [messages[-1], {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}]


class House:
    """A gateway in front of these engines, and a client of it."""

    def __init__(self, gateway: Gateway, client: httpx.AsyncClient):
        self.gateway, self.client = gateway, client

    async def until(self, true, seconds=30.0):
        async with asyncio.timeout(seconds):
            while not true():
                await asyncio.sleep(0.005)

    def ready(self) -> list:
        return [one for one in self.gateway.fleet.replicas.values() if one.state is State.READY]

    async def chat(self, messages: list[dict], **fields) -> httpx.Response:
        body = {"model": "sim", "messages": messages, "max_tokens": 4, **fields}
        answer = await self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    async def heard(self) -> None:
        """The gateway knows what each engine has told of its cache: an answer may come before that."""
        for one in self.ready():
            told = (await self.client.get(f"{one.url}/faults")).json()["event_batches"]
            intakes, id = self.gateway.intakes, one.id
            await self.until(lambda: not told or (intakes[id].last_seq or 0) >= told - 1)
            await self.until(lambda: getattr(intakes[id], "role", "") == "follower" or not intakes[id].unreplayed)

    async def converse(self, talks: Talks, requests: int) -> dict[str, list[int]]:
        """Cached tokens by replica; each answer delivers what was predicted of it."""
        found: dict[str, list[int]] = {}
        for _ in range(requests):
            await self.heard()
            messages = talks.next()
            answer = await self.chat(messages, max_tokens=talks.random.randint(1, 40))
            usage, replica = answer.json()["usage"], answer.headers["x-hitherto-replica"]
            assert predicted(answer) == reported(answer), (replica, usage)
            found.setdefault(replica, []).append(reported(answer))
            talks.answered(messages, answer)
        return found


@asynccontextmanager
async def house(*engines, **settings):
    random.seed(1)  # the policy's draws: of 90 requests one engine had too few for its cache in some runs
    urls = tuple(engine.url for engine in engines)
    gateway = Gateway(
        Settings(
            host="127.0.0.1", port=0, admin_port=0, replica_url=urls, model="sim", cached_tokens_header=True, **settings
        )
    )
    try:
        await gateway.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=30) as client:
            home = House(gateway, client)
            await home.until(lambda: len(home.ready()) == len(engines) == len(gateway.intakes))
            await home.until(
                lambda: all(one.state != "connecting" or not one.unreplayed for one in gateway.intakes.values())
            )
            await home.until(
                lambda: all(one.tokenizer.endswith("fills its chat template alike") for one in home.ready())
            )
            yield home
    finally:
        await gateway.stop(0)


def name(engine) -> str:
    return engine.url.removeprefix("http://")


async def test_both_kinds_deliver_what_is_predicted_also_after_evictions(start_engine):
    whole = start_engine("--num-blocks", "160")
    pages = [start_engine(*CACHE, sglang=True) for _ in range(2)]
    for engine in (whole, *pages):
        engine.wait()
    async with house(whole, *pages, policy="random") as home:
        assert [one.dialect.id for one in home.ready()] == ["sim", "sglang", "sglang"]
        found = await home.converse(Talks(1), 90)
        assert len(found) == 3
        for engine in pages:
            cached = found[name(engine)]
            assert any(tokens % 16 for tokens in cached) and max(cached) > 200
            assert home.gateway.intakes[name(engine)].blocks_removed > 10
        assert not any(tokens % 16 for tokens in found[name(whole)])
        assert home.gateway.metrics.prompts.values == {("exact",): 90}


async def test_prompts_are_hashed_in_blocks_of_sixteen_whatever_pages_events_tell(start_engine):
    async with house(start_engine("--num-blocks", "26000", sglang=True).wait()) as home:
        ((replica, intake),) = home.gateway.intakes.items()
        await home.converse(Talks(3), 5)
        home.gateway._care_for(home.gateway.proxy.backends[replica], {})
        assert home.gateway.models.blocks(replica) == (16, 0) and home.gateway.intakes[replica] is intake


async def test_one_that_is_killed_and_comes_back_holds_nothing(start_engine):
    first, other = (start_engine(*CACHE, sglang=True).wait() for _ in range(2))
    async with house(first, other, policy="random") as home:
        talks = Talks(2)
        await home.converse(talks, 20)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(20)
        await home.until(lambda: len(home.ready()) == 1)
        await home.converse(talks, 10)
        again = start_engine(*CACHE, "--port", str(first.port), sglang=True).wait()
        assert again.port == first.port
        await home.until(lambda: len(home.ready()) == 2)
        found = await home.converse(talks, 30)
        assert len(found) == 2 and min(found[name(first)]) == 0
        assert not home.gateway.metrics.heals.total()


@pytest.mark.parametrize("fault", ["drop", "reorder"])
async def test_events_that_are_lost_or_out_of_order_are_made_up_for(start_engine, fault):
    engine = start_engine(*CACHE, sglang=True).wait()
    async with house(engine) as home:
        talks = Talks(3)
        await home.converse(talks, 5)
        (await home.client.post(f"{engine.url}/faults", json={f"{fault}_events": 2})).raise_for_status()
        await home.chat([{"role": "user", "content": talks.text(80)}], max_tokens=20)
        await home.converse(talks, 15)
        assert home.gateway.intakes[name(engine)].gaps == 1


async def test_ids_are_sent_beside_messages_once_they_are_shown_to_be_the_same(start_engine):
    engine = start_engine(sglang=True).wait()
    async with house(engine) as home:
        text = "All the world's a stage, and all the men and women merely players. " * 200
        for n in range(12):
            await home.chat([{"role": "user", "content": f"{n}. {text}"}])
        await home.until(lambda: "/v1/chat/completions: yes" in home.ready()[0].takes_ids)
        for n in range(12, 16):
            await home.heard()
            answer = await home.chat([{"role": "user", "content": f"{n}. {text}"}])
            assert predicted(answer) == reported(answer) > 0
        assert home.gateway.metrics.long_prompts.values[name(engine), "ids"] >= 3

"""A gateway that was itself stopped for a while: whoever kept time meanwhile is blamed for nothing."""

import asyncio

import pytest

from .running import Running, running, stopped

PREFIX = "What they have in common, and only one of them has computed. " * 150
# A prompt here takes a second, and a token 20 ms: whoever holds a prefix is chosen, and streams last.
PROFILE = "step: {prefill: 4, prefill_token: 0.5, decode: 20}\nnum_blocks: 30000\n"
PROMPTS = [f"{number} {PREFIX}" for number in range(4)]


@pytest.fixture(scope="module")
def start_slow_engine(start_engine, tmp_path_factory):
    profile = tmp_path_factory.mktemp("profile") / "profile.yaml"
    profile.write_text(PROFILE)
    return lambda: start_engine("--speedup", "1", "--profile", str(profile))


@pytest.fixture(scope="module")
def engines(start_slow_engine):
    started = [start_slow_engine() for _ in range(2)]
    return [engine.wait() for engine in started]


class Stream:
    """A stream that is read; `begun` once its first bytes are there."""

    def __init__(self, gateway: Running, text: str, tokens: int):
        self.begun, self.replica = asyncio.Event(), ""
        self._body = {"model": "sim", "stream": True, "max_tokens": tokens, "ignore_eos": True}
        self._body["messages"] = [{"role": "user", "content": text}]
        self.read = asyncio.create_task(self._read(gateway))

    async def _read(self, gateway: Running) -> bool:
        """Whether it came to its end."""
        text = ""
        async with gateway.client.stream("POST", "/v1/chat/completions", json=self._body, timeout=120) as answer:
            self.replica = answer.headers.get("x-hitherto-replica", "")
            async for piece in answer.aiter_text():
                text += piece
                self.begun.set()
        return text.rstrip().endswith("data: [DONE]")


async def asked(gateway: Running, text: str) -> str:
    """Who answered."""
    stream = Stream(gateway, text, 2)
    assert await stream.read
    return stream.replica


async def under_way(gateway: Running, tokens: int) -> list[Stream]:
    streams = [Stream(gateway, f"{text} and more", tokens) for text in PROMPTS]
    async with asyncio.timeout(60):
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
    return streams


def troubles(gateway: Running) -> list[str]:
    """What its log says of replicas that were taken out."""
    lines = [line.decode() for line in gateway.log]
    return [line for line in lines if " -> degraded: " in line or " -> failed: " in line]


async def test_no_replica_is_taken_out_and_no_stream_fails_for_ten_seconds_of_our_own(engines):
    async with running("--replica-url", *(engine.url for engine in engines), "--model", "sim") as gateway:
        await gateway.ready(2)
        holders = [await asked(gateway, text) for text in PROMPTS]
        streams = await under_way(gateway, 300)
        unanswered = asyncio.create_task(asked(gateway, f"another {PREFIX * 3}"))
        await gateway.until(lambda status: sum(one["inflight"] for one in status["replicas"]) > len(streams))
        with stopped(gateway.process.pid):
            await asyncio.sleep(5)
            meanwhile = [asyncio.create_task(asked(gateway, text)) for text in PROMPTS]
            await asyncio.sleep(5)
        assert await asyncio.gather(*meanwhile) == holders
        assert [await asked(gateway, text) for text in PROMPTS] == holders
        assert all([await stream.read for stream in streams]) and await unanswered
        assert not troubles(gateway)
        assert any(b"this process did not run for " in line for line in gateway.log)


async def test_a_machine_that_was_suspended_gives_its_engines_their_time(engines):
    """All processes of it stop, and the engines go on somewhat later than the gateway: by the clock their streams were
    silent for longer than is waited for."""
    flags = ("--idle-timeout-s", "6", "--model", "sim")
    async with running("--replica-url", *(engine.url for engine in engines), *flags) as gateway:
        await gateway.ready(2)
        streams = await under_way(gateway, 300)
        with stopped(*(engine.process.pid for engine in engines)):
            await asyncio.sleep(0.3)  # what they had sent before is read
            with stopped(gateway.process.pid):
                await asyncio.sleep(8)
            await asyncio.sleep(0.5)
            assert not any(stream.read.done() for stream in streams)
        assert all([await stream.read for stream in streams])
        assert not troubles(gateway)

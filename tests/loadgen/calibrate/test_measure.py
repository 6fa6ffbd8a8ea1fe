"""What is read off streams: steps, the token budget, replies; and what is said when they can't be read."""

import asyncio
import json
import random
from itertools import accumulate

import pytest
from aiohttp import web

from loadgen.calibrate.ask import CalibrationError, Client, Refused, Reply
from loadgen.calibrate.fit import NAMES, NEW, Fit, decode_sample, prompt_sample
from loadgen.calibrate.measure import changed, full_steps, most_at_once, sizes, spread, step_seconds


def reply(first: float, gap: float, chunks: int, tokens: int | None = None) -> Reply:
    return Reply(tokens or chunks, times=[first + gap * n for n in range(chunks)])


def test_a_step_is_the_gap_while_all_decode():
    early, late = reply(0.0, 0.004, 100), reply(0.2, 0.004, 60)
    early.times[:40] = [0.001 * n for n in range(40)]  # alone it was faster
    seconds, tokens = step_seconds([early, late])
    assert seconds == pytest.approx(0.004) and 40 < tokens < 70


def test_a_chunk_with_two_tokens_counts_as_two_steps():
    seconds, _ = step_seconds([reply(0.0, 0.008, 50, tokens=99)])
    assert seconds == pytest.approx(0.004)


def test_hiccups_are_left_out_and_replies_that_hardly_meet_say_nothing():
    one = reply(0.0, 0.004, 100)
    one.times = [time + 0.5 * (n > 50) for n, time in enumerate(one.times)]
    assert step_seconds([one])[0] == pytest.approx(0.004)
    assert step_seconds([reply(0.0, 0.004, 20), reply(0.076, 0.004, 20)])[0] == 0.0


def test_the_spread_of_steps_is_not_that_of_hiccups():
    one = reply(0.0, 0.004, 100)
    assert spread(one) == pytest.approx(0, abs=1e-9)
    chance = random.Random(1)
    one.times = list(accumulate(0.5 if n % 20 == 0 else chance.gauss(0.004, 0.0004) for n in range(1000)))
    assert spread(one) == pytest.approx(0.1, rel=0.1)
    one.times[1::2] = one.times[::2]
    assert spread(one) is None


@pytest.mark.parametrize("ms, steps", [
    ([2] * 20 + [57, 129, 170, 233, 10, 7] + [2] * 20, 4),  # as seen: 8,192 tokens in steps of 2,048
    ([2] * 20 + [50, 112, 13] + [2] * 20, 2),
    ([2] * 20 + [60, 20] + [2] * 20, 1),
    ([2] * 20 + [7, 2, 6] + [2] * 20, 1),  # nothing but noise
    ([2] * 40, 1),
])  # fmt: skip
def test_steps_that_a_long_prompt_filled(ms, steps):
    assert full_steps([one / 1e3 for one in ms]) == steps


def test_how_many_ran_at_once():
    assert most_at_once([reply(0.0, 0.1, 10), reply(0.5, 0.1, 10), reply(0.8, 0.1, 10), reply(3.0, 0.1, 10)]) == 3


@pytest.mark.parametrize(
    "most, factor, expected", [(14336, 4, [64, 256, 1024, 4096, 14336]), (64, 2, [64]), (50, 2, [50])]
)
def test_sizes_end_with_the_largest(most, factor, expected):
    assert sizes(most, factor) == expected


def test_change_between_two_fits_is_that_of_the_region_that_changed_most():
    def of(base, latency):
        return Fit(dict.fromkeys(NAMES, 0.0) | {"base": base, "latency": latency}, {})

    seen = [decode_sample(0.002, 1, 0)] * 3 + [prompt_sample(NEW, 0.012, 64, 0, 2048)] * 3
    assert changed(seen, of(2, 10), of(2, 10)) == 0
    assert changed(seen, of(2, 10), of(2.2, 9.8)) == pytest.approx(0.1)


# ---- the client, against a server that says what it is told to


@pytest.fixture
async def ask(serve):
    """ask(status, text, content_type) -> what `complete` makes of such an answer."""
    clients = []

    async def ask(status: int, text: str, content_type: str = "application/json"):
        async def handler(request):
            return web.Response(status=status, text=text, content_type=content_type)

        client = Client(await serve(handler))
        clients.append(client)
        return await client.complete([300, 301], 3)

    yield ask
    for client in clients:
        client.close()


def events(*data: dict) -> str:
    return "".join(f"data: {json.dumps(one)}\n\n" for one in data) + "data: [DONE]\n\n"


async def test_chunks_and_usage(ask):
    chunk = {"choices": [{"index": 0, "text": ""}]}
    counted = {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
    got = await ask(200, events(chunk, chunk, chunk, {"choices": [], "usage": counted}), "text/event-stream")
    assert (len(got.times), got.record.prompt_tokens, got.record.cached_tokens) == (3, 2, 1) and got.ttft > 0
    got = await ask(200, events(chunk), "text/event-stream")
    assert got.record.prompt_tokens is None and got.record.cached_tokens is None  # an engine that gives no usage


@pytest.mark.parametrize("status, text, says", [
    (401, '{"error": "Unauthorized"}', "OPENAI_API_KEY"),
    (404, '{"error": {"message": "The model `x` does not exist."}}', "404: The model `x` does not exist."),
    (404, "<html> not\nfound</html>", "<html> not found</html>"),
    (400, '{"object": "error", "message": "too long"}', "400: too long"),
    (503, "[]", "503"),
])  # fmt: skip
async def test_refusals_carry_the_engines_own_words(ask, status, text, says):
    with pytest.raises(Refused, match="/v1/completions") as caught:
        await ask(status, text)
    assert says in str(caught.value)


async def test_streams_without_output_and_streams_that_break(ask):
    with pytest.raises(CalibrationError, match="without any output"):
        await ask(200, events(), "text/event-stream")
    with pytest.raises(CalibrationError, match="out of memory"):
        await ask(200, events({"error": {"message": "out of memory"}}), "text/event-stream")


async def test_a_connection_that_breaks(serve):
    async def handler(request):
        request.transport.abort()
        await asyncio.sleep(0)
        return web.Response()

    async with Client(await serve(handler)) as client:
        with pytest.raises(CalibrationError, match="a request with 1 prompt tokens to .* failed"):
            await client.complete([300])


def test_prompts_are_new_each_time_and_inside_any_vocabulary():
    from loadgen.calibrate.ask import IDS, WORDS

    async def made():
        async with Client("http://127.0.0.1:1/v1/") as client:
            assert client.base_url == "http://127.0.0.1:1"
            return client.ids(16), client.ids(16), client.text(50)

    one, other, text = asyncio.run(made())
    assert one != other and all(id in IDS for id in one + other) and IDS.start >= 300 and IDS.stop <= 1000
    assert len(text.split()) == 50 and len(WORDS) > 500


async def test_tokens_of_a_text_are_those_that_the_engine_counts(serve):
    usage = {"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": {"prompt_tokens": 7}}

    async def handler(request):
        return web.Response(text=events(usage), content_type="text/event-stream")

    async with Client(await serve(handler)) as client:
        await client.complete("far more letters than tokens")
        assert client.prompt_tokens == 7

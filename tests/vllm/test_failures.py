"""What real engines answer when something is wrong with a request, and what the gateway makes of it."""

import asyncio
from collections import Counter
from time import monotonic

from . import bodies
from .engines import gateway

OUTSIDE = 99_999_999  # of any vocabulary


async def complete(process, prompt, **fields):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "stream": True, **fields}
    return await process.client.post("/v1/completions", json=body)


async def test_streams_that_are_the_clients_fault_teach_nothing(engines):
    """vLLM 0.32 answers them 200 with an error event, in a millisecond. Forty of them sent all of the next 360 requests
    to one of two equal engines, and made their events `unobserved`."""
    async with gateway(*engines) as process:
        begun = monotonic()
        for number in range(40):
            answer = await complete(process, [OUTSIDE - number] * 100)
            assert answer.status_code == 200 and "out of vocabulary" in answer.text, answer.text
        await asyncio.sleep(max(0.0, begun + 2.5 - monotonic()))  # longer than an engine that computes may be silent
        await complete(process, [OUTSIDE] * 100)
        assert await process.counted("hitherto_requests_total", path="completions", status="4xx") == 41
        for whose in ("", "replica_"):
            assert await process.counted(f"hitherto_{whose}ttft_seconds_count") == 0
        status = await process.status()
        for one in status["replicas"]:
            assert (one["events"], one["state"], one["errors"]) == ("live", "ready", 0)
        assert status["totals"]["errors"] == 0
        counts: Counter[str] = Counter()
        for start in range(300, 420, 6):
            answers = await asyncio.gather(*(complete(process, [start + number, 400] * 50) for number in range(6)))
            counts.update(answer.headers["x-hitherto-replica"] for answer in answers)
        assert len(counts) == 2 and min(counts.values()) >= 20, counts


async def test_numbers_beyond_the_engines_limits_are_refused_as_it_does(engines):
    async with gateway(*engines) as process:
        for path, body in (
            bodies.complete("hello", n=16_385),
            bodies.complete("hello", max_tokens=100_000),
            bodies.chat(bodies.user("hi"), max_completion_tokens=100_000),
            bodies.respond("hi", max_output_tokens=100_000),
            bodies.message(bodies.user("hi"), max_tokens=100_000),
        ):
            ours = await process.client.post(path, json={"model": "tiny", **body})
            theirs = await process.client.post(engines[0].url + path, json={"model": "tiny", **body})
            assert (ours.status_code, theirs.status_code) == (400, 400)
            said, told = (answer.json()["error"]["message"] for answer in (ours, theirs))
            said, told = (words.replace("max_completion_tokens", "max_tokens") for words in (said, told))
            assert told.startswith(said), (said, told)


async def test_a_response_that_is_announced_is_not_begun(engines):
    """0.32: `response.created` comes after 21 ms of 200; what is learned must be the first token's time."""
    async with gateway(engines[0]) as process:
        body = {"model": "tiny", "input": "word " * 700, "stream": True, "max_output_tokens": 2}
        begun, came = monotonic(), {}
        async with process.client.stream("POST", "/v1/responses", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    came.setdefault(line.removeprefix("event: "), monotonic() - begun)
        announced, item = came["response.created"], came["response.output_item.added"]
        print(f"announced after {1e3 * announced:.0f} ms, first token after {1e3 * item:.0f} ms")
        assert item - announced < 0.5 * announced

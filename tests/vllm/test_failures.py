"""What real engines answer when something is wrong with a request, and what the gateway makes of it."""

import asyncio
from time import monotonic

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
        page = (await process.admin.get("/metrics")).text
        assert 'hitherto_requests_total{path="completions",status="4xx"} 41.0' in page
        assert all(
            line.endswith(" 0.0")
            for line in page.splitlines()
            if line.startswith(("hitherto_ttft_seconds_count", "hitherto_replica_ttft_seconds_count"))
        )
        status = await process.status()
        assert {one["events"] for one in status["replicas"]} == {"live"} and {
            one["state"] for one in status["replicas"]
        } == {"ready"}
        assert {one["errors"] for one in status["replicas"]} == {0} and status["totals"]["errors"] == 0
        counts: dict[str, int] = {}
        for start in range(0, 120, 6):
            answers = await asyncio.gather(
                *(complete(process, [300 + start + number, 400] * 50) for number in range(6))
            )
            for answer in answers:
                where = answer.headers["x-hitherto-replica"]
                counts[where] = counts.get(where, 0) + 1
        print("afterwards", counts)
        assert len(counts) == 2 and min(counts.values()) >= 20, counts


async def test_numbers_beyond_the_engines_limits_are_refused_as_it_does(engines):
    async with gateway(*engines) as process:
        for path, body in (
            ("/v1/completions", {"prompt": "hello", "n": 16_385}),
            ("/v1/completions", {"prompt": "hello", "max_tokens": 100_000}),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 100_000},
            ),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 100_000}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100_000}),
        ):
            ours = await process.client.post(path, json={"model": "tiny", **body})
            theirs = await process.client.post(engines[0].url + path, json={"model": "tiny", **body})
            assert (ours.status_code, theirs.status_code) == (400, 400)
            words = [
                answer.json()["error"]["message"].replace("max_completion_tokens", "max_tokens")
                for answer in (ours, theirs)
            ]
            assert words[1].startswith(words[0]), words


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

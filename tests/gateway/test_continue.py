"""Streams whose engine breaks off in the middle, before a real gateway and simulated engines: another engine goes on,
and the client cannot tell."""

import json

import pytest
import pytest_asyncio

from .running import running

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
QUESTION = "What does the harbour master say about the tide? "


def body(path: str, number: int = 0, **fields) -> dict:
    """A greedy request for a stream of 40 tokens, with usage."""
    asked, limit = f"{number} " + QUESTION * 6, "max_tokens"
    given = {"messages": [{"role": "user", "content": asked}]}
    if path.endswith("/responses"):
        given, limit = {"input": asked}, "max_output_tokens"
    elif path == "/v1/completions":
        given = {"prompt": asked}
    options = {"stream_options": {"include_usage": True}} if path.endswith("completions") else {}
    return {"model": "sim", "stream": True, "temperature": 0, limit: 40, **options, **given, **fields}


def events(text: str) -> list:
    """Data of the stream's events."""
    told = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    return [one if one == "[DONE]" else json.loads(one) for one in told]


def as_a_whole(told: list) -> tuple:
    """What a stream says once names and times are left out, and pieces of text are put together."""
    text, ids, rest = "", set(), []
    for one in told:
        if one == "[DONE]":
            rest.append(one)
            continue
        one = json.loads(json.dumps(one))
        ids |= {found for found in (one.pop("id", None), one.get("item_id"), one.pop("created", None)) if found}
        one.pop("sequence_number", None)
        piece = None
        if one.get("object") in ("chat.completion.chunk", "text_completion") and one["choices"]:
            choice = one["choices"][0]
            piece = choice["delta"].pop("content", None) if "delta" in choice else choice.pop("text")
        elif one.get("type") == "content_block_delta":
            piece = one["delta"].pop("text")
        elif one.get("type") == "response.output_text.delta":
            piece = one.pop("delta")
        text += piece or ""
        if piece is None or (one.get("choices") and one["choices"][0]["finish_reason"]):
            rest.append(one)
    return text, ids, without_names(rest)


# Of a message `input_tokens` too: what was cached is told apart.
HIDDEN = (
    "id item_id created_at cached_tokens created_cache_tokens cache_read_input_tokens cache_creation_input_tokens "
    "cache_write_tokens system_fingerprint input_tokens"
).split()


def without_names(told):
    if isinstance(told, dict):
        return {name: without_names(value) for name, value in told.items() if name not in HIDDEN}
    return [without_names(one) for one in told] if isinstance(told, list) else told


def difference(one, other, where="") -> str:
    """The first place in which two streams' insides differ, for people; "" if there is none."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((found for name in one if (found := difference(one[name], other[name], f"{where}.{name}"))), "")
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return next(
            (found for at in range(len(one)) if (found := difference(one[at], other[at], f"{where}[{at}]"))), ""
        )
    return "" if one == other else f"{where}: {one!r} != {other!r}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(engines):
    urls = [engine.url for engine in engines]
    async with running("--replica-url", *urls, "--model", "sim", "--continue-streams", "exact") as gateway:
        await gateway.ready(len(engines))
        yield gateway


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_breaks_off_reads_as_if_it_had_not(gateway, engines, path):
    before = await gateway.counted("hitherto_continued_streams_total")
    whole = events((await gateway.client.post(path, json=body(path))).text)
    for engine in engines:
        (await gateway.client.post(f"{engine.url}/faults", json={"die_mid_stream": 1})).raise_for_status()
    answer = await gateway.client.post(path, json=body(path))  # both break it off, one after the other
    text, ids, rest = as_a_whole(events(answer.text))
    assert not difference((text, rest), as_a_whole(whole)[::2]), answer.text
    assert len(text) > 100 and len({one for one in ids if isinstance(one, str)}) <= 2
    assert await gateway.counted("hitherto_continued_streams_total") == before + 2
    assert await gateway.counted("hitherto_streams_not_continued_total") == 0
    assert await gateway.counted("hitherto_reservations") == 0

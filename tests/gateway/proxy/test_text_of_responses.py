"""With --continue-streams text: /v1/responses, where an engine tells only at the end what prompt it had."""

import json

import orjson
import pytest

from ..http.talk import eventually, read_request
from .replies import SSE_HEAD, chunk, post
from .stack import stack
from .test_continuing import PIPELINE
from .test_ends_without_reason import END, OPENS, RESPONSES, fields, text_of, word

SAMPLED = fields(RESPONSES, temperature=1)
PROMPT = PIPELINE.prepare(RESPONSES, SAMPLED).tokens


def engine(counts, seen: list):
    """Writes "ab" and breaks off; where it is given token ids it writes "cd" to the end, and says that its prompt had
    `counts(ids)` of them."""

    async def script(reader, writer):
        while True:
            request = json.loads((await read_request(reader))[1])
            ids = (request.get("kv_transfer_params") or {}).get("prompt_token_ids")
            seen.append(ids)
            texts = ("a", "b") if ids is None else ("c", "d")
            writer.write(SSE_HEAD + chunk(OPENS[RESPONSES]) + b"".join(chunk(word(RESPONSES, one)) for one in texts))
            await writer.drain()
            if ids is None:
                return
            told = {
                "id": "2",
                "status": "completed",
                "output": [],
                "usage": {"input_tokens": counts(ids), "output_tokens": 2},
            }
            last = {"type": "response.completed", "sequence_number": 9, "response": told}
            writer.write(chunk(b"event: response.completed\ndata: " + orjson.dumps(last) + b"\n\n") + END)

    return script


async def ask(s) -> bytes:
    talk = await s.talk()
    await talk.say(post(SAMPLED, RESPONSES.encode()))
    body = (await talk.response())[2]
    await eventually(lambda: s.idle() and not s.proxy.conductor.continuing.kept)
    return body


async def test_who_used_the_ids_goes_on():
    seen = []
    async with stack(*[engine(len, seen)] * 2, pipeline=PIPELINE, continue_streams="text") as s:
        for _ in range(3):
            body = await ask(s)
            assert text_of(RESPONSES, body) == "abcd" and b"response.completed" in body and b"broke off" not in body
        assert len([ids for ids in seen if ids is not None]) == 3 and len(seen[1]) > PROMPT


@pytest.mark.parametrize("counts", [lambda ids: 3, lambda ids: PROMPT], ids=["another prompt", "the client's"])
async def test_who_did_not_ends_with_an_error_and_is_not_asked_once_more(counts):
    seen = []
    async with stack(*[engine(counts, seen)] * 2, pipeline=PIPELINE, continue_streams="text") as s:
        for _ in range(4):
            body = await ask(s)
            assert b"broke off" in body and b"response.completed" not in body
        assert len([ids for ids in seen if ids is not None]) == 2, "each process once"
        assert s.metrics.streams_not_continued.total(reason="differs") == 2
        assert s.metrics.streams_not_continued.total(reason="unlike") == 2

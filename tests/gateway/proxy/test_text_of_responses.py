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


def engine(counts, seen: list, *, strange: bytes = b""):
    """Writes "ab" and breaks off; where it is given token ids it writes "cd", `strange` and the end, and says that its
    prompt had `counts(ids)` of them, or nothing of that for None."""

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
            counted = counts(ids)
            usage = None if counted is None else {"input_tokens": counted, "output_tokens": 2}
            told = {"id": "2", "status": "completed", "output": [], "usage": usage}
            last = {"type": "response.completed", "sequence_number": 9, "response": told}
            writer.write(strange and chunk(strange))
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


@pytest.mark.parametrize(
    "counts", [lambda ids: 3, lambda ids: PROMPT, lambda ids: None], ids=["another prompt", "the client's", "none"]
)
async def test_who_did_not_ends_with_an_error_and_is_not_asked_once_more(counts, caplog):
    seen = []
    async with stack(*[engine(counts, seen)] * 2, pipeline=PIPELINE, continue_streams="text") as s:
        for _ in range(4):
            body = await ask(s)
            assert b"broke off" in body and b"response.completed" not in body
        assert len([ids for ids in seen if ids is not None]) == 2, "each process once"
        assert s.metrics.streams_not_continued.total(reason="differs") == 2
        assert s.metrics.streams_not_continued.total(reason="unlike") == 2
        warned = [one.getMessage() for one in caplog.records if "by token ids" in one.getMessage()]
        assert len(warned) == 2 and all(sum(id in one for one in warned) == 1 for id in s.proxy.backends)


async def test_who_writes_what_is_not_known_here_may_go_on_with_others():
    """That says nothing of the ids."""
    seen, reasons = [], b'{"type":"response.reasoning_text.delta","delta":"x","sequence_number":8}'
    strange = b"event: response.reasoning_text.delta\ndata: " + reasons + b"\n\n"
    async with stack(*[engine(len, seen, strange=strange)] * 2, pipeline=PIPELINE, continue_streams="text") as s:
        for _ in range(4):
            assert b"broke off" in await ask(s)
        assert len([ids for ids in seen if ids is not None]) == 4
        assert s.metrics.streams_not_continued.total(reason="differs") == 4

"""How many calls, files and changes of file a request passes: from the client's socket to the replica's and back, and
until all is learned from its answer."""

import asyncio
import itertools
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from gateway.prompt.pipeline import Pipeline
from replicas.simulated.model import sim_model_dir

from ..http.talk import read_request
from .legs import HANDED, Side, disaggregated, says
from .replies import answers, post, reply
from .stack import stack

ROOT = Path(__file__).parents[3]
ROOMS = tuple(f"{ROOT / room}/" for room in ("gateway", "cachemap", "policies", "replicas"))
PIPELINE = Pipeline(sim_model_dir(), "m", 16)
CHAT = orjson.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "Which way did the white rabbit go? " * 40}]}
)
TOKENS = PIPELINE.prepare("/v1/chat/completions", CHAT, None).tokens
ANSWER = orjson.dumps(
    {
        "id": "a",
        "choices": [{"message": {"role": "assistant", "content": "Down."}}],
        "usage": {"prompt_tokens": TOKENS, "completion_tokens": 2},
    }
)


@asynccontextmanager
async def plain():
    async with stack(answers(ANSWER), pipeline=PIPELINE, policy="least_time") as s:
        yield s


@asynccontextmanager
async def retried():
    """Each request is refused once."""
    refuses = itertools.cycle([True, False])

    async def script(reader, writer):
        while True:
            await read_request(reader)
            writer.write(reply(b"{}", b"500 Internal Server Error") if next(refuses) else reply(ANSWER))

    async with stack(script, script, pipeline=PIPELINE) as s:
        yield s


@asynccontextmanager
async def in_two_legs():
    computed = HANDED.replace(b'"prompt_tokens":95', b'"prompt_tokens":%d' % TOKENS)
    async with disaggregated(Side(says(reply(computed))), Side(says(reply(ANSWER))), pipeline=PIPELINE) as s:
        yield s


async def passed_by(s, talk) -> tuple[list[str], int]:
    """The file of each call that is made for a request, and how many are made until the client has its answer."""
    passed, counts = [], s.metrics.requests.values
    before = counts["chat", "2xx"]

    def note(frame, event, _):
        if event == "call" and (file := frame.f_code.co_filename).startswith(ROOMS):
            passed.append((file, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        assert (await talk.ask(post(CHAT)))[0] == 200
        while counts["chat", "2xx"] == before:  # its end is counted last
            await asyncio.sleep(0)
    finally:
        sys.setprofile(None)
    end = max(at for at, (file, name) in enumerate(passed) if file.endswith("http/downstream.py") and name == "finish")
    return [str(Path(file).relative_to(ROOT)) for file, _ in passed], end + 1


# The most calls until the client has its answer; until all is learned from it: calls, files, changes of file. A plain
# chat passed 34 files when one object was in nine of them.
@pytest.mark.parametrize(
    ("way", "answered", "calls", "files", "changes"),
    [(plain, 107, 131, 25, 81), (retried, 253, 285, 36, 182), (in_two_legs, 164, 196, 31, 111)],
    ids=["plain", "a retry", "two legs"],
)
async def test_a_chat_passes_few_files_in_few_calls(way, answered, calls, files, changes):
    async with way() as s:
        talk = await s.talk()
        for _ in range(200):  # until templates are compiled and prefixes known
            await talk.ask(post(CHAT))
        # Now and then one is rendered by the template itself, to compare.
        passed, until = min([await passed_by(s, talk) for _ in range(5)], key=lambda one: len(one[0]))
        legs = s.metrics.legs.total(leg="decode", outcome="complete")
    assert {"gateway/http/downstream.py", "gateway/http/upstream.py", "policies/router.py"} <= {*passed}
    assert (legs > 0) is (way is in_two_legs)
    changed = sum(one != other for one, other in itertools.pairwise(passed))
    assert until <= answered and len(passed) <= calls and len({*passed}) <= files and changed <= changes

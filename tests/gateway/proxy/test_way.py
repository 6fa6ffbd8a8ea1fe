"""How many files and calls a plain chat passes from the client's socket to the replica's and back, and until all is
learned from its answer."""

import asyncio
import itertools
import sys
from pathlib import Path

import orjson

from gateway.prompt.pipeline import Pipeline
from replicas.simulated.model import sim_model_dir

from .replies import answers, post
from .stack import stack

ROOT = Path(__file__).parents[3]
ROOMS = tuple(f"{ROOT / room}/" for room in ("gateway", "cachemap", "policies", "replicas"))
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Which way did the white rabbit go? " * 40}]}
ANSWER = {
    "id": "a",
    "choices": [{"message": {"role": "assistant", "content": "Down."}}],
    "usage": {"prompt_tokens": 0, "completion_tokens": 2},
}
# Until the client has its answer, and until all is learned from it. It was 34 files when this was one object in nine
# files. The costs are one of them where an answer comes in one piece: they say how long that takes.
MOST_FILES, MOST_CALLS = 23, 107
MOST_FILES_IN_ALL, MOST_CALLS_IN_ALL, MOST_CHANGES_OF_FILE = 25, 131, 81


async def passed_by(s, talk, body) -> tuple[list[str], int]:
    """The file of each call that is made for a request, and how many are made until the client has its answer."""
    passed, counts = [], s.metrics.requests.values
    before = counts["chat", "2xx"]

    def note(frame, event, _):
        if event == "call" and (file := frame.f_code.co_filename).startswith(ROOMS):
            passed.append((file, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        assert (await talk.ask(post(body)))[0] == 200
        while counts["chat", "2xx"] == before:  # its end is counted last
            await asyncio.sleep(0)
    finally:
        sys.setprofile(None)
    end = max(at for at, (file, name) in enumerate(passed) if file.endswith("http/downstream.py") and name == "finish")
    return [str(Path(file).relative_to(ROOT)) for file, _ in passed], end + 1


async def test_a_plain_chat_passes_few_files_in_few_calls():
    pipeline = Pipeline(sim_model_dir(), "m", 16)
    body = orjson.dumps(CHAT)
    ANSWER["usage"]["prompt_tokens"] = pipeline.prepare("/v1/chat/completions", body, None).tokens
    async with stack(answers(orjson.dumps(ANSWER)), pipeline=pipeline, policy="least_time") as s:
        talk = await s.talk()
        for _ in range(200):  # until templates are compiled and prefixes known
            await talk.ask(post(body))
        # Now and then one is rendered by the template itself, to compare.
        calls, answered = min([await passed_by(s, talk, body) for _ in range(5)], key=lambda one: len(one[0]))
    files = set(calls[:answered])
    assert {"gateway/http/downstream.py", "gateway/http/upstream.py", "policies/router.py"} <= files
    assert len(files) <= MOST_FILES, sorted(files)
    assert answered <= MOST_CALLS
    assert len({*calls}) <= MOST_FILES_IN_ALL and len(calls) <= MOST_CALLS_IN_ALL
    assert sum(one != other for one, other in itertools.pairwise(calls)) <= MOST_CHANGES_OF_FILE

"""How many files and calls a plain chat passes from the client's socket to the replica's and back."""

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
# It was 34 when this was one object in nine files; what an engine learns from usage, once its client has the answer, is
# not counted. The costs are one of them where an answer comes in one piece: they say how long that takes.
MOST_FILES = 22
MOST_CALLS = 112


async def passed_by(talk, body) -> list[str]:
    """The file of each call that is made until the client has its answer."""
    passed = []

    def note(frame, event, _):
        if event == "call" and (file := frame.f_code.co_filename).startswith(ROOMS):
            passed.append((file, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        assert (await talk.ask(post(body)))[0] == 200
    finally:
        sys.setprofile(None)
    end = max(at for at, (file, name) in enumerate(passed) if file.endswith("http/downstream.py") and name == "finish")
    return [str(Path(file).relative_to(ROOT)) for file, _ in passed[: end + 1]]


async def test_a_plain_chat_passes_few_files_in_few_calls():
    pipeline = Pipeline(sim_model_dir(), "m", 16)
    body = orjson.dumps(CHAT)
    ANSWER["usage"]["prompt_tokens"] = pipeline.prepare("/v1/chat/completions", body, None).tokens
    async with stack(answers(orjson.dumps(ANSWER)), pipeline=pipeline, policy="least_time") as s:
        talk = await s.talk()
        for _ in range(200):  # until templates are compiled and prefixes known
            await talk.ask(post(body))
        # Now and then one is rendered by the template itself, to compare.
        calls = min([await passed_by(talk, body) for _ in range(5)], key=len)
    files = set(calls)
    assert {"gateway/http/downstream.py", "gateway/http/upstream.py", "policies/router.py"} <= files
    assert len(files) <= MOST_FILES, sorted(files)
    assert len(calls) <= MOST_CALLS

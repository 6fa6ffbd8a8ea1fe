"""What takes long is not done on the event loop, nor does it keep the interpreter for itself in a thread."""

import gc
import json
import shutil
import threading
import time

import orjson
import pytest

from gateway.prompt.offload import TakesLong, event_loop
from gateway.prompt.pipeline import OFFLOAD_BYTES, Pipeline
from gateway.prompt.tokens.tokenizer import Tokenizer
from replicas.simulated.model import sim_model_dir

from . import folders
from .reference import HERE

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ONE_LETTER = "x" * 39_000
BLANKS = "x" + " " * 39_000 + "x"
WORDS = "the quick brown fox jumps over the lazy dog and " * 800
HANZI = "\u4f60\u597d\u4e16\u754c" * 3_200
LISTS = [[]] * 12_000


def user(content, **more):
    return {"messages": [{"role": "user", "content": content}], **more}


def turns(count):
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i}"} for i in range(count)]


def calls(arguments, count=1):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call] * count}]


@pytest.fixture(scope="module", params=[None, "parts.jinja"], ids=["plain", "parts"])
def pipeline(request):
    return Pipeline(sim_model_dir(), "m", 16, chat_template=HERE / request.param if request.param else None)


def briefly(pipeline, path, body):
    assert len(body) <= OFFLOAD_BYTES
    event_loop.holds = True
    try:
        return pipeline.prepare(path, body)
    finally:
        event_loop.holds = False


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        (CHAT, user(ONE_LETTER)),
        (CHAT, user(BLANKS)),
        (CHAT, user([{"type": "text", "text": BLANKS}])),
        (RESPONSES, {"input": ONE_LETTER}),
        (MESSAGES, user(ONE_LETTER, max_tokens=1)),
        (COMPLETIONS, {"prompt": ONE_LETTER}),
        (COMPLETIONS, {"prompt": ["x" * 1900] * 20}),
        (COMPLETIONS, {"prompt": [7] * 19_000}),
        (COMPLETIONS, {"prompt": [[7]] * 9_000}),
        (CHAT, user(HANZI)),
        (CHAT, {"messages": turns(900)}),
        (RESPONSES, {"input": turns(900)}),
        (MESSAGES, {"messages": turns(900), "max_tokens": 1}),
        (CHAT, user([{"type": "text", "text": "a"}] * 1200)),
        (CHAT, {"messages": calls("{}", 400)}),
        (CHAT, {"messages": calls({"a": LISTS})}),
        (CHAT, {"messages": [{"role": "assistant", "content": "x", "reasoning": LISTS}]}),
        (CHAT, user("x", tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": LISTS}}}])),
        (CHAT, user("x", chat_template_kwargs={"a": LISTS})),
    ],
)
def test_what_takes_long_is_given_up_on_the_event_loop_and_done_in_a_thread(pipeline, path, request_):
    pipeline.prefixes.forget()
    body = orjson.dumps({"model": "m", **request_})
    for _ in range(6):  # the fifth would be compiled
        with pytest.raises(TakesLong):
            briefly(pipeline, path, body)
    assert pipeline.prepare(path, body).mode == "exact"


def test_what_is_known_or_short_is_not(pipeline):
    talk = [{"role": "system", "content": WORDS[:9_000]}, *turns(40)]
    parameters = {"properties": {f"a{n}": {"type": "string"} for n in range(20)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(8)]
    for request_ in ({"messages": talk}, {"messages": talk, "tools": tools}, user('[{"a": 1, "b": [' * 1_200)):
        body = orjson.dumps({"model": "m", **request_})
        for _ in range(40):  # by Jinja, compiled, checked
            assert briefly(pipeline, CHAT, body).mode == "exact"


def test_a_long_conversation_that_is_known_is_prepared_on_the_event_loop():
    pipeline = Pipeline(sim_model_dir(), "m", 16)
    body = orjson.dumps({"model": "m", "messages": turns(200)})
    given_up = 0
    for _ in range(60):
        try:
            briefly(pipeline, CHAT, body)
        except TakesLong:
            given_up += 1
            pipeline.prepare(CHAT, body)
    # by Jinja and compiled, then those that are held against Jinja
    assert pipeline.renderers["default"].by_plan and given_up == 5 + 32


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A model that fastokens cannot load, as are all with the pre-tokenizer Metaspace."""
    folder = tmp_path_factory.mktemp("metaspace")
    split = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    (folder / "tokenizer.json").write_text(json.dumps(folders.sentencepiece(normalizer=None, pre=split)))
    shutil.copy(sim_model_dir() / "chat_template.jinja", folder)
    return Pipeline(folder, "m", 16)


def test_the_slower_tokenizer_gets_less_on_the_event_loop(slow):
    assert slow.tokenizer.backend == "tokenizers"
    for path, request_ in ((CHAT, user(WORDS[:8_000])), (COMPLETIONS, {"prompt": [WORDS[:400]] * 20})):
        with pytest.raises(TakesLong):
            briefly(slow, path, orjson.dumps({"model": "m", **request_}))
    for request_ in (user(WORDS[:4_000]), user("\u00e9" + WORDS[:4_000])):
        assert briefly(slow, CHAT, orjson.dumps({"model": "m", **request_})).mode == "exact"


@pytest.mark.parametrize(("backend", "times"), [("fastokens", 1_000), ("tokenizers", 12)])
def test_a_text_that_takes_long_leaves_the_interpreter_to_others(backend, times):
    """Each takes some 0.2 s of an idle core."""
    tokenizer = Tokenizer(sim_model_dir(), backend)
    text = WORDS * times
    gc.collect()
    begun, done, turns = threading.Event(), threading.Event(), 0

    def tokenize():
        begun.set()
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=tokenize)
    thread.start()
    begun.wait()
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 10  # of hundreds; while the interpreter is held, one or two

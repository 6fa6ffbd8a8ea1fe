import json
from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.exchange import TAIL, keep, meter
from gateway.proxy.responses.answers import has_end
from gateway.proxy.responses.usage import MOST_SEARCHED, NOTHING, Usage, believed, read_usage

from .replies import chunk


def test_openai_usage_is_read_from_a_whole_answer():
    body = {"choices": [{"message": {"content": 'say "usage": {"prompt_tokens": 9}'}}],
            "usage": {"prompt_tokens": 1000, "completion_tokens": 64, "prompt_tokens_details": {"cached_tokens": 992}}}  # fmt: skip
    assert read_usage(json.dumps(body).encode()) == Usage(1000, 64, 992)


def test_usage_is_read_from_the_last_event_of_a_stream():
    tail = b'data: {"choices":[],"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2}}\n\n\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'
    assert read_usage(tail) == Usage(7, 2, None)


def test_anthropic_and_responses_spell_it_their_way():
    assert read_usage(
        b'{"usage":{"input_tokens":10,"output_tokens":3,"cache_creation_input_tokens":32,"cache_read_input_tokens":96}}'
    ) == Usage(138, 3, 96)
    assert read_usage(
        b'{"usage":{"input_tokens":10,"input_tokens_details":{"cached_tokens":8},"output_tokens":3}}'
    ) == Usage(10, 3, 8)


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'{"choices":[]}',
        b'"usage":null',
        b'\\"usage\\": {\\"cached_tokens\\": 5}',
        b'{"usage":{"prompt_tokens":' + b"9" * 5000 + b"}}",
    ],
)
def test_what_is_not_said_is_not_guessed(tail):
    assert read_usage(tail) == NOTHING


@pytest.mark.parametrize("twice", [b'"us\\u0061ge":3', b'"us\\u0061ge":null', b'"":5', b'"":{}', b'"":[]'])
@pytest.mark.parametrize("depth", [1, 2])
def test_names_that_occur_twice_change_nothing(twice, depth):
    usage = b'{"usage":{"prompt_tokens":7},' + twice + b"}"
    answer = usage if depth == 1 else b'{"response":' + usage + b"," + twice + b"}"
    assert read_usage(answer, depth) == Usage(7, None, None)


OWN = {"usage": {"input_tokens": 7, "output_tokens": 12}}
FAKE = {"usage": {"input_tokens": 9, "output_tokens": 7000}}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", **FAKE}}


@pytest.mark.parametrize(
    "said",
    [
        {"user": "usage"},
        {"user": 'say "usage": {"output_tokens": 9}'},
        {"metadata": {"k": "usage"}},
        {"metadata": FAKE},
        {"instructions": "usage"},
        {"instructions": "\\"},
        {"tools": [TOOL]},
        {"tools": [TOOL] * 50, "text": FAKE},
        {"prompt_logprobs": [{"1": {"logprob": -1.5, "decoded_token": "usage"}}] * 50},
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_what_a_client_wrote_and_an_answer_repeats_is_not_its_usage(said, before):
    answer = {**said, **OWN} if before else {**OWN, **said}
    assert read_usage(json.dumps(answer).encode()) == Usage(7, 12, None)
    event = {"type": "response.completed", "response": answer, "sequence_number": 9}
    tail = b"event: response.completed\ndata: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"
    assert read_usage(tail, 2) == Usage(7, 12, None)
    half = len(tail) // 2
    assert read_usage(chunk(tail[:half]) + chunk(tail[half:]) + b"0\r\n\r\n", 2) == Usage(7, 12, None)


def test_a_usage_is_found_by_its_end_alone():
    """The last bytes of an answer may begin within whatever stands before."""
    answer = json.dumps({"output": ["a text " * 9] * 9, "tools": [TOOL] * 3, **OWN}).encode()
    for cut in range(0, answer.rindex(b'"usage"'), 7):
        assert read_usage(answer[cut:]) == Usage(7, 12, None)
    assert read_usage(json.dumps({**OWN, "pad": "x" * MOST_SEARCHED}).encode()) == NOTHING
    assert read_usage(json.dumps({"pad": "x" * MOST_SEARCHED, **OWN}).encode()) == Usage(7, 12, None)


TEXTS = st.text(alphabet='"\\\\{}[]:usage \n', max_size=30) | st.sampled_from(["usage", 'x"usage', 'usage": {', "\\"])
WRITTEN = st.recursive(
    TEXTS | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(TEXTS.filter(lambda key: key != "usage"), inner, max_size=3)
        | st.builds(lambda other: {**FAKE, "x": other}, inner)
    ),
    max_leaves=8,
)


OPENAI = {"usage": {"prompt_tokens": 7, "total_tokens": 19, "completion_tokens": 12, "prompt_tokens_details": None}}


@given(
    before=WRITTEN, behind=WRITTEN, own=st.sampled_from([OWN, OPENAI, None]), stream=st.booleans(),
    short=st.booleans(), data=st.data(),
)  # fmt: skip
def test_usage_is_found_however_an_answer_is_read(before, behind, own, stream, short, data):
    tells = own is not None
    answer = {"tools": [before], **(own or {"usage": None}), **({} if short else {"input_messages": [behind]})}
    body = json.dumps(answer).encode()
    if stream:
        created = json.dumps({"response": {**answer, "usage": None}, "type": "response.created"}).encode()
        body = b'data: %b\n\ndata: {"type": "x"}\n\ndata: {"response": %b, "n": 9}\n\n' % (created, body)
    every = data.draw(st.sampled_from([1, 2, 3, 20, len(body)]))
    cuts = sorted({*data.draw(st.lists(st.integers(0, len(body)), max_size=4)), *range(every, len(body), every)})
    exchange = SimpleNamespace(label="responses", tells_response=True)
    attempt = SimpleNamespace(
        streams=stream, exchange=exchange, tail=deque(maxlen=TAIL), pieces=0, extra_events=0, usage=None
    )
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        meter(attempt, body[start:end])
    depth = 2 if stream else 1
    found = NOTHING if attempt.usage is None else attempt.usage.usage(depth)
    assert found == read_usage(body, depth) == (Usage(7, 12, None) if tells else NOTHING)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_the_end_of_a_stream_is_kept_however_small_its_reads_are(size):
    end = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":12}}\n\ndata: [DONE]\n\n'
    body, tail = b'data: {"choices":[{"text":"a"}]}\n\n' * 99 + end, deque(maxlen=TAIL)
    for start in range(0, len(body), size):
        keep(tail, body[start : start + size])
    kept = b"".join(tail)
    assert read_usage(kept) == Usage(7, 12, None) and has_end("chat", kept, True, b"text/event-stream", False)
    assert len(kept) < 4 * 256


def test_counts_that_cannot_be_are_not_believed():
    assert believed(Usage(10, 5, 10), 10, 5) == Usage(10, 5, 10)
    assert believed(Usage(10, 999_999_999_999, 3), 131_072, 131_072) == Usage(10, None, 3)
    assert believed(Usage(999_999_999_999, 5, 3), 131_072, 131_072) == Usage(None, 5, None)
    assert believed(Usage(301, 5, 999_999_999), 131_072, 131_072) == Usage(301, 5, None)
    assert believed(Usage(None, None, 4), 131_072, 131_072) == NOTHING

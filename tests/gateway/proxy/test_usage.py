import json

import pytest

from gateway.proxy.answers import NOTHING, Usage, read_usage


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

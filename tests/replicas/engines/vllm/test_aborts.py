"""Answers of vLLM that were cut short, in each API; the bytes are what 0.32's own models and serializers make of an
abort."""

import pytest

from replicas.engines.dialect import ANY_PATH
from replicas.engines.vllm import VLLM

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
USAGE = b'"usage":{"input_tokens":7,"output_tokens":3}'
MESSAGE = b'{"id":"msg_1","type":"message","role":"assistant","content":[%s],"model":"m",%s' + USAGE + b"}"
START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"1","type":"message","role":"assistant",'
    b'"content":[],"model":"m","stop_reason":null,"stop_sequence":null,' + USAGE + b"}}\n\n"
)
TEXT = b'{"type":"text","text":"x"}'
TOOL = b'{"type":"tool_use","id":"1","name":"f","input":{"delta":{"stop_reason":null},"model":"m","usage":{}}}'
DELTA = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":%s,"stop_sequence":null},'
    + USAGE
    + b'}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'
)
RESPONSE = b'{"id":"resp_1","metadata":%s,"model":"m","object":"response","output":[],"status":"%s","usage":null}'
CANCELLED, ONLY_SAID = RESPONSE % (b"{}", b"cancelled"), RESPONSE % (b'{"status":"cancelled"}', b"completed")
CREATED = b"event: response.created\ndata: {}\n\n"
COMPLETED = b'event: response.completed\ndata: {"response":%s,"sequence_number":9,"type":"response.completed"}\n\n'


@pytest.mark.parametrize(
    ("path", "answer", "aborted"),
    [
        (CHAT, b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"abort"}]}', True),
        (COMPLETIONS, b'data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}\n\ndata: [DONE]\n\n', True),
        (CHAT, b'{"choices":[{"text":"\\"finish_reason\\":\\"abort\\"","finish_reason":"stop"}]}', False),
        (MESSAGES, START, False),
        (MESSAGES, START + DELTA % b"null", True),
        (MESSAGES, DELTA % b"null", True),
        (MESSAGES, START + DELTA % b'"end_turn"', False),
        (MESSAGES, MESSAGE % (TEXT, b""), True),
        (MESSAGES, MESSAGE % (TEXT, b'"stop_reason":"max_tokens",'), False),
        (MESSAGES, MESSAGE % (TOOL, b'"stop_reason":"tool_use",'), False),
        (RESPONSES, CANCELLED, True),
        (RESPONSES, ONLY_SAID, False),
        (RESPONSES, CREATED + COMPLETED % CANCELLED, True),
        (RESPONSES, CREATED + COMPLETED % ONLY_SAID, False),
        (RESPONSES, CANCELLED[40:], False),
        ("/v1/responses/resp_1/cancel", CANCELLED, False),
    ],
)
def test_an_aborted_answer_is_known_in_each_api(path, answer, aborted):
    says = VLLM.aborted.get(path) or VLLM.aborted[ANY_PATH]
    assert bool(says(answer)) is aborted

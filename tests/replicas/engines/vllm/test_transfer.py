"""The bodies of two legs, as NIXL's connector reads them."""

import orjson
import pytest

from replicas.engines.vllm.transfer import Nixl, pull_from_peer

NIXL = Nixl()
TEXT = {"model": "m", "temperature": 0.5, "stop": ["x"], "seed": 7}


@pytest.mark.parametrize(
    "path, given, first",
    [
        ("/v1/chat/completions", {"max_tokens": 9}, {"max_tokens": 1}),
        ("/v1/chat/completions", {"max_completion_tokens": 9}, {"max_completion_tokens": 1}),
        ("/v1/chat/completions", {}, {"max_completion_tokens": 1}),
        ("/v1/chat/completions", {"max_tokens": 9, "max_completion_tokens": 8}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/completions", {"n": 1, "echo": True, "logprobs": 3}, {"n": 1, "max_tokens": 1}),
        ("/v1/messages", {"max_tokens": 99, "stream": True}, {"max_tokens": 1}),
        ("/v1/responses", {"max_output_tokens": 99, "store": True}, {"max_output_tokens": 1, "store": False}),
        ("/v1/responses", {}, {"max_output_tokens": 1, "store": False}),
        ("/v1/chat/completions", {"stream": True, "stream_options": {}, "min_tokens": 5, "return_token_ids": True},
         {"max_completion_tokens": 1}),
    ],
)  # fmt: skip
def test_the_first_leg_is_the_same_prompt_for_one_token_in_one_piece(path, given, first):
    body = orjson.loads(NIXL.first_body(path, orjson.dumps(TEXT | given)))
    assert body.pop("kv_transfer_params") == {"do_remote_decode": True, "do_remote_prefill": False}
    assert body == TEXT | {"stream": False} | first


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"{", b'"x"', b'{"n": 2}', b'{"use_beam_search": true}', b'{"background": true}'),
        *(b'{"kv_transfer_params": {"do_remote_decode": true}}', b'{"kv_transfer_params": null}'),
    ],
)
def test_what_can_have_no_legs(body):
    assert NIXL.first_body("/v1/completions", b'{"model": "m"}') is not None
    assert NIXL.first_body("/v1/completions", body) is None


PARAMETERS = {"do_remote_prefill": True, "remote_block_ids": [[4, 5]], "of": {"a": "newer", "version": [1, None, 2.5]}}


def test_the_parameters_go_into_the_second_leg_as_they_came():
    parameters = NIXL.parameters(orjson.dumps({"choices": [], "kv_transfer_params": PARAMETERS}))
    body = b' {"stream": true,  "messages": [], "seed": 12345678901234567890123 }'
    second = NIXL.second_body(body, parameters)
    assert second.endswith(body[2:]) and orjson.loads(second.replace(b"12345678901234567890123", b"1")) == {
        "kv_transfer_params": PARAMETERS, "stream": True, "messages": [], "seed": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "told",
    [None, [], "x", {}, PARAMETERS | {"remote_block_ids": []}, PARAMETERS | {"do_remote_prefill": False}],
)
def test_an_answer_of_an_engine_that_kept_nothing(told):
    assert NIXL.parameters(orjson.dumps({"choices": [], "kv_transfer_params": told})) is None


@pytest.mark.parametrize("answer", [b"", b"[1]", b'{"kv_transfer_params": {', b"\xff"])
def test_what_is_no_answer_at_all(answer):
    with pytest.raises(ValueError, match="JSON"):
        NIXL.parameters(answer)


def test_a_peer_pull_is_said_in_front_of_what_the_client_wrote():
    body = orjson.dumps(TEXT)
    told = pull_from_peer(body, "[fd00::7]:5711", "abc")
    source = {"kv_request_id": "abc", "remote_host": "fd00::7", "remote_port": 5711}
    assert told.endswith(body[1:])
    assert orjson.loads(told) == TEXT | {"kv_transfer_params": {"remote_kv_source": source}}
    assert pull_from_peer(told, "h:5710", "def") is None, "another gateway has said where it comes from"

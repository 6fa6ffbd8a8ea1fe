"""The bodies of two legs, as TensorRT-LLM and llm-d's sidecar read them."""

import orjson
import pytest

from replicas.engines import TRANSFERS

TRT, LLMD = TRANSFERS["tensorrt-llm"], TRANSFERS["llm-d"]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"model": "m", "messages": [], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
GIVEN = {"request_type": "context_only", "ctx_request_id": 7, "disagg_request_id": 7, "first_gen_tokens": [3],
         "encoded_opaque_state": "AAE=", "of": {"a": ["newer", None]}}  # fmt: skip


def answer(finish="not_finished", given=GIVEN, **more):
    return orjson.dumps(
        {"object": "chat.completion", "choices": [{"index": 0, "finish_reason": finish, "disaggregated_params": given}]}
        | more
    )


def test_the_context_leg_is_the_same_request_in_one_piece_with_an_id_of_its_own():
    made = [orjson.loads(TRT.first_body(CHAT, orjson.dumps(BODY))) for _ in range(50)]
    told = [body.pop("disaggregated_params") for body in made]
    assert all(body == {"model": "m", "messages": [], "max_tokens": 9, "stream": False} for body in made)
    assert {one["request_type"] for one in told} == {"context_only"}
    ids = {one["disagg_request_id"] for one in told}
    assert len(ids) == 50 and all(1 << 42 <= number < 1 << 63 for number in ids)


def test_the_generation_leg_has_what_the_context_server_said_and_the_prompts_ids():
    second = TRT.second_body(orjson.dumps(BODY), TRT.parameters(answer(prompt_token_ids=[1, 2, 3])))
    assert orjson.loads(second) == BODY | {
        "disaggregated_params": GIVEN | {"request_type": "generation_only"},
        "prompt_token_ids": [1, 2, 3],
    }


def test_a_completions_prompt_stays_as_it_is():
    parameters = TRT.parameters(answer(object="text_completion", prompt_token_ids=[1, 2, 3]))
    assert "prompt_token_ids" not in orjson.loads(TRT.second_body(b'{"prompt":"x"}', parameters))


@pytest.mark.parametrize("given", [None, [], {}, {"request_type": "context_only"}])
def test_a_server_that_kept_nothing(given):
    assert TRT.parameters(answer(given=given)) is None


def test_an_answer_that_ended_with_its_first_token_has_no_second_leg():
    assert TRT.parameters(answer("stop")) == b"" and TRT.parameters(answer("length"))


@pytest.mark.parametrize("said", [b"", b"[1]", b"{", b'{"choices":[]}', b'{"choices":[{},{}]}', b'{"choices":[1]}'])
def test_what_is_no_answer_at_all(said):
    with pytest.raises(ValueError, match="no JSON object|not one choice"):
        TRT.parameters(said)


@pytest.mark.parametrize("more", [{"n": 2}, {"use_beam_search": True}, {"disaggregated_params": None}])
def test_what_can_have_no_legs(more):
    assert TRT.first_body(CHAT, orjson.dumps(BODY | more)) is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{"])
def test_what_is_no_object_can_have_none_either(body):
    assert TRT.first_body(COMPLETIONS, body) is None


def test_a_sidecar_gets_the_clients_own_body():
    body = b' {"seed": 12345678901234567890123, "messages": []}'
    assert LLMD.first_body(CHAT, body) is body and LLMD.second_body(body, b"") is body
    for name in (b'"kv_transfer_params"', b'"use_beam_search"', b'"background"', b'"bootstrap_room"'):
        assert LLMD.first_body(CHAT, b"{%b: {}}" % name) is None

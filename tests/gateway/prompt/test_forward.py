"""Ids in a body: put where the engine looks, the client's bytes around them as they came."""

import json
from array import array

import pytest

from gateway.prompt.forward import LEAST_TOKENS, with_ids
from replicas.engines.vllm import VLLM

AROUND = VLLM.chat_token_ids
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = "all the world is a stage and all the men and women merely players " * 50


def prepared(sim, path, body: bytes):
    return sim[0].prepare(path, body)


def ids(prompt) -> list[int]:
    return array("I", prompt.token_ids).tolist()


def chat(**more) -> dict:
    return {"model": "sim", "messages": [{"role": "user", "content": WORDS}], **more}


@pytest.mark.parametrize("before", [b"", b" \r\n\t"])
def test_a_chats_bytes_stay_as_they_are_behind_the_ids(sim, before):
    body = before + json.dumps(chat(temperature=0.70, stop=["\u00e9"]), indent=1).encode()
    prompt = prepared(sim, CHAT, body)
    made = with_ids(body, prompt, AROUND)
    assert prompt.kind
    assert made.endswith(body[len(before) + 1 :]) and made.startswith(before + b"{")
    assert json.loads(made) == {**json.loads(body), "kv_transfer_params": {"prompt_token_ids": ids(prompt)}}


TEXTS = [WORDS, WORDS + "\\", '"prompt": "' + WORDS, WORDS + '\\"', "\u00e9\U0001f600" + WORDS, "\\\\\\\n" + WORDS + '"']  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii", [True, False])
def test_a_completions_text_gives_way_to_the_ids_and_nothing_else_moves(sim, text, ascii):
    head, tail = (
        b'{"model":"sim", "max_tokens": 1e1, "prompt" :\n ',
        b' , "user":"\\"prompt\\": \\"no\\"", "seed": 0.0}',
    )
    head = head.replace(b"1e1", b"10")
    body = head + json.dumps(text, ensure_ascii=ascii).encode() + tail
    prompt = prepared(sim, COMPLETIONS, body)
    assert prompt.kind
    assert with_ids(body, prompt, AROUND) == head + json.dumps(ids(prompt), separators=(",", ":")).encode() + tail


@pytest.mark.parametrize("more", [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"prompt": "x"}}}}},
    {"user": "prompt"},
])  # fmt: skip
def test_a_second_prompt_in_a_completion_leaves_it_as_received(sim, more):
    body = json.dumps({"prompt": WORDS, **more}).encode()
    assert with_ids(body, prepared(sim, COMPLETIONS, body), AROUND) is None


def test_a_key_in_a_spelling_of_its_own_leaves_a_completion_as_received(sim):
    body = b'{"pr\\u006fmpt": %b, "stream_options": {"prompt": "another"}}' % json.dumps(WORDS).encode()
    prompt = prepared(sim, COMPLETIONS, body)
    assert prompt.kind and with_ids(body, prompt, AROUND) is None


def test_a_field_the_client_gave_after_all_counts(sim):
    body = b'{"kv_transfer_p\\u0061rams": null, "messages": %b}' % json.dumps(chat()["messages"]).encode()
    prompt = prepared(sim, CHAT, body)
    assert not prompt.kind
    assert json.loads(with_ids(body, prompt, AROUND))["kv_transfer_params"] is None


@pytest.mark.parametrize("more", [
    {"echo": True}, {"kv_transfer_params": {"do_remote_decode": True}}, {"kv_transfer_params": None},
    {"truncate_prompt_tokens": 600}, {"return_token_offsets": True}, {"a_field_of_next_year": 1},
])  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_may_need_the_text_is_left_alone(sim, path, more):
    body = json.dumps({**(chat() if path == CHAT else {"prompt": WORDS}), **more}).encode()
    prompt = prepared(sim, path, body)
    assert prompt.tokens >= LEAST_TOKENS and not prompt.kind


def test_media_ids_lists_short_prompts_and_other_paths_are_left_alone(sim):
    media = [{"type": "text", "text": WORDS}, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    for path, body in [
        (CHAT, {"messages": [{"role": "user", "content": media}]}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        (COMPLETIONS, {"prompt": [7] * LEAST_TOKENS}),
        (COMPLETIONS, {"prompt": [WORDS, WORDS]}),
        ("/v1/responses", {"input": WORDS}),
        ("/v1/messages", {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 5}),
        ("/v1/embeddings", {"input": WORDS}),
        ("/tokenize", {"prompt": WORDS}),
    ]:
        assert not prepared(sim, path, json.dumps(body).encode()).kind, (path, body)

"""A client's own fields that tell engines where a prompt's cache goes: refused of tenants, at every path that leads to
an engine, and passed on as they are where there are no keys."""

import hashlib
import json
from contextlib import asynccontextmanager

import pytest

from gateway.prompt.prompt import PROMPT_PATHS
from gateway.proxy.paths import UNREAD_PROMPTS
from gateway.tenants.keys import Keys
from replicas.engines.handover import FIELDS, HEADERS

from ..prompt.api.test_named import FIELD, FILE, FORM, form
from .replies import answers, post
from .stack import stack

PATHS = sorted({*PROMPT_PATHS, *UNREAD_PROMPTS, "/v1/chat/completions/render", "/v1/messages/count_tokens", "/v1/mine"})
ASK = {
    "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi",
    "tokens": [1], "token_ids": [1],
}  # fmt: skip
LEGS_ID = b"___prefill_addr_10.0.0.9:80___decode_addr_10.0.0.8:80_1"
HANDLE = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1]], "remote_host": "10.0.0.9"}


@asynccontextmanager
async def engine(tmp_path, keys=True, salt=None):
    """A stack whose engine takes whatever it is sent, and a function that asks it as a tenant."""
    seen, file = [], tmp_path / "keys.yaml"
    entry = {"name": "a", "sha256": hashlib.sha256(b"sk-a").hexdigest(), **({"cache_salt": salt} if salt else {})}
    file.write_text(f"- {json.dumps(entry)}\n")
    async with stack(answers(seen=seen), keys=Keys(file) if keys else None, allow_paths=["/v1/mine"]) as s:

        async def ask(path, body, *extra, content_type=b"application/json"):
            talk = await s.talk()
            lines = b"".join(b"%b: %b\r\n" % line for line in (*extra, (b"authorization", b"Bearer sk-a")))
            whole = post(body if isinstance(body, bytes) else json.dumps(body).encode(), path.encode(), lines)
            status, _, answer = await talk.ask(whole.replace(b"application/json", content_type))
            return status, answer

        yield s, seen, ask


TAKE_NO_SALT = ("/cohere/v2/chat", "/v2/embed")  # refused for that with 403


@pytest.mark.parametrize(
    "path, salt",
    [(one, salt) for one in PATHS for salt in (None, "tenant-0123456789") if not salt or one not in TAKE_NO_SALT],
)
async def test_a_tenants_request_with_such_a_field_is_refused_at_every_path(tmp_path, path, salt):
    async with engine(tmp_path, salt=salt) as (s, seen, ask):
        for field in FIELDS:
            status, answer = await ask(path, {**ASK, field: HANDLE})
            error = json.loads(answer)["error"]
            assert status == 400 and field in error["message"]
            if path.startswith("/v1/messages"):
                assert error["type"] == "invalid_request_error" and json.loads(answer)["type"] == "error"
            else:
                assert (error["param"], error["code"]) == (field, "field_not_allowed")
        whole = json.dumps(ASK)[:-1]
        for body in (
            whole + r', "kv\u005ftransfer_params": {"a": 1}}',
            whole + ', "kv_transfer_params": null, "kv_transfer_params": {"a": 1}}',
            whole + ', "vllm_xargs": {"kv_transfer_params": "a"}}',
            whole + ', "sampling_params": {"extra_args": {"kv_transfer_params": {"a": 1}}}}',
            whole + ', "top_p": NaN, "kv_transfer_params": {"a": 1}}',
            whole + ', "a": "' + "x" * 50_000 + '", "kv_transfer_params": {"a": 1}}',
        ):
            status, answer = await ask(path, body.encode())
            assert status == 400 and b"kv_transfer_params" in answer, body[-100:]
        for header in HEADERS:
            status, answer = await ask(path, ASK, (header, b"10.0.0.9:80"))
            assert status == 400 and header in answer
        status, answer = await ask(path, ASK, (b"x-request-id", LEGS_ID))
        assert status == 400 and b"x-request-id" in answer
        assert not seen and s.idle()


@pytest.mark.parametrize("path", PATHS)
async def test_a_tenants_other_requests_reach_the_engine_as_before(tmp_path, path):
    async with engine(tmp_path) as (s, seen, ask):
        body = ASK | {"kv_transfer_params": None, "user": 'says "kv_transfer_params": 1'}
        body |= {"vllm_xargs": {"session_id": "a"}}
        assert (await ask(path, body, (b"x-request-id", b"an-id")))[0] == 200
        assert [json.loads(one[1]) for one in seen] == [body]


@pytest.mark.parametrize("path", PATHS)
async def test_without_keys_nothing_is_refused(tmp_path, path):
    async with engine(tmp_path, keys=False) as (s, seen, ask):
        body = {**ASK, **dict.fromkeys(FIELDS, HANDLE), "vllm_xargs": {"kv_transfer_params": "a"}}
        headers = [(name, b"10.0.0.9:80") for name in HEADERS]
        assert (await ask(path, body, *headers, (b"x-request-id", LEGS_ID)))[0] == 200
        ((head, received),) = seen
        assert json.loads(received) == body and LEGS_ID in head and all(name in head for name in HEADERS)


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/mine"])
async def test_what_forms_hand_on_to_the_engine_is_looked_at(tmp_path, path):
    xargs = FIELD % b"vllm_xargs"
    async with engine(tmp_path) as (s, seen, ask):
        body = form(FILE, (xargs, rb'{"kv\u005ftransfer_params": "a"}'))
        status, answer = await ask(path, body, content_type=FORM.encode())
        assert status == 400 and b"vllm_xargs.kv_transfer_params" in answer and not seen
        assert (await ask(path, form(FILE, (xargs, b'{"session_id": "a"}')), content_type=FORM.encode()))[0] == 200


async def test_one_that_cannot_be_prepared_is_refused_all_the_same(tmp_path, monkeypatch):
    """A mistake of the gateway's, after which it would go by load."""
    async with engine(tmp_path) as (s, seen, ask):
        monkeypatch.setattr(s.proxy.models.routes, "prepare", lambda *_: 1 / 0)
        assert (await ask("/v1/chat/completions", {**ASK, "kv_transfer_params": HANDLE}))[0] == 400
        assert (await ask("/v1/chat/completions", ASK))[0] == 200 and len(seen) == 1


async def test_a_model_that_nobody_is_known_to_serve_makes_no_difference(tmp_path):
    async with engine(tmp_path) as (s, seen, ask):
        body = {**ASK, "model": "loaded-later", "kv_transfer_params": HANDLE}
        status, answer = await ask("/v1/chat/completions", body)
        assert status == 400 and b"field_not_allowed" in answer

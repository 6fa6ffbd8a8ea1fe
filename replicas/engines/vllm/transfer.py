"""What vLLM's NIXL connector is told: keep this prompt's KV cache, and fetch it from there.

Read in the sources of 0.32 (`distributed/kv_transfer/kv_connector/v1/nixl`) and tried against them (`tests/vllm`). The
replica that computed a prompt answers with `kv_transfer_params`, which go unchanged into the request that is to decode;
its engine then reads the blocks by itself. They are kept for `kv_lease_duration`, 30 s by default, which a request that
waits in the decoding engine's queue extends. An engine that refuses or drops the second request has the blocks freed,
so its parameters are good for another replica only where none of it was sent.
"""

from __future__ import annotations

from typing import Any

import orjson

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
_FIELD = "kv_transfer_params"
# What limits the answer of each API; the first is written where the client gives none.
_LIMITS = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
}
# What speaks of the rest of the answer: it would be refused beside a limit of one token, or makes the answer larger.
_LATER = ("stream_options", "min_tokens", "return_token_ids", "logprobs", "top_logprobs", "echo")
_KEPT = {"do_remote_decode": True, "do_remote_prefill": False}


class Nixl:
    """NIXL, one leg after the other. `replicas.engines.dialect.Transfer` says what each part is."""

    id = "nixl"
    name = "NIXL"
    header = b""
    paths = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
    lease_seconds = 30.0

    def first_body(self, path: str, body: bytes) -> bytes | None:
        request = json_object(body)
        # One that brings such parameters is another gateway's leg; several sequences cannot share one transfer.
        if request is None or _FIELD in request or request.get("n") not in (None, 1):
            return None
        if request.get("use_beam_search") or request.get("background"):
            return None
        limits = _LIMITS[path]
        for name in _LATER:
            request.pop(name, None)
        request |= dict.fromkeys([name for name in limits if name in request] or limits[:1], 1)
        request |= {"stream": False, _FIELD: _KEPT}
        if path == RESPONSES:
            request["store"] = False
        return orjson.dumps(request)

    def parameters(self, answer: bytes) -> bytes | None:
        told = json_object(answer)
        if told is None:
            raise ValueError("it is no JSON object")
        given = told.get(_FIELD)
        # Without blocks there is nothing to fetch: the engine freed them already, or keeps none.
        if not isinstance(given, dict) or not given.get("do_remote_prefill") or not given.get("remote_block_ids"):
            return None
        return orjson.dumps(given)

    def fetched_from(self, parameters: bytes) -> str:
        told = json_object(parameters) or {}
        return f"{told['remote_host']}:{told.get('remote_port')}" if told.get("remote_host") else ""

    def second_body(self, body: bytes, parameters: bytes) -> bytes:
        return with_first(body, b'"%b":%b' % (_FIELD.encode(), parameters))


NIXL = Nixl()


def with_first(body: bytes, members: bytes) -> bytes:
    """A JSON object with these members in front, as it was received else: the prompt is not written again."""
    at = body.index(b"{") + 1
    return b"".join((body[:at], members, b",", body[at:]))


def json_object(text: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None

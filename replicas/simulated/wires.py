"""How a simulated engine is told to keep a prompt's cache for another one, or to fetch it: the wire of each engine.

What is kept and fetched is the same in all of them (`transfers`), and what names it is NIXL's parameters.
"""

from __future__ import annotations

from typing import Any, Protocol

import aiohttp
import orjson
from aiohttp import web

from .tokens import RequestError

PREFILLER = "x-prefiller-host-port"
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Wire(Protocol):
    """Without state."""

    async def read(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        """What NIXL's parameters of this request would be, if it has any. Raises RequestError."""

    def tell(
        self, answer: dict[str, Any], kept: dict[str, Any] | None, body: dict[str, Any], prompt: list[int]
    ) -> None:
        """Put what was kept into the answer to `body`."""


class Nixl:
    """vLLM's `kv_transfer_params`."""

    async def read(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        return body.get("kv_transfer_params")

    def tell(
        self, answer: dict[str, Any], kept: dict[str, Any] | None, body: dict[str, Any], prompt: list[int]
    ) -> None:
        answer["kv_transfer_params"] = kept


class Sidecar(Nixl):
    """An engine with llm-d's sidecar before it, which has the prompt computed by the prefiller that the header names,
    and answers with what that says where it fails; 403 for one on this machine's port 1, as if it were not allowed."""

    async def read(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        prefiller = request.headers.get(PREFILLER)
        if prefiller is None:
            return await super().read(request, body)
        if prefiller.endswith(":1"):
            raise RequestError("Forbidden: prefill target not allowed by SSRF protection", 403, "Forbidden")
        given = [name for name in LIMITS if name in body] or ["max_output_tokens" if "input" in body else "max_tokens"]
        asked = {name: value for name, value in body.items() if name not in ("stream_options", "min_tokens")}
        asked |= dict.fromkeys(given, 1) | {"stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"http://{prefiller}{request.path}", data=orjson.dumps(asked)) as answer,
            ):
                raw = await answer.read()
        except aiohttp.ClientError:
            raise RequestError("", 502, "BadGateway") from None
        if answer.status != 200:
            raise RequestError(raw.decode(errors="replace"), answer.status, "PrefillFailed")
        return orjson.loads(raw).get("kv_transfer_params")


class TensorRtLlm:
    """TensorRT-LLM's `disaggregated_params`, of which nobody else reads what `encoded_opaque_state` has."""

    async def read(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        given = body.get("disaggregated_params")
        if given is None:
            return None
        if given.get("request_type") == "context_only":
            body["max_tokens"], number = 1, given.get("disagg_request_id")
            if not isinstance(number, int) or not 1 << 42 <= number < 1 << 63:
                raise RequestError(f"disagg_request_id {number!r} is none of a disaggregated server's")
            return {"do_remote_decode": True}
        if given.get("request_type") != "generation_only" or not given.get("first_gen_tokens"):
            raise RequestError(f"request_type {given.get('request_type')!r}")
        return orjson.loads(given["encoded_opaque_state"])

    def tell(
        self, answer: dict[str, Any], kept: dict[str, Any] | None, body: dict[str, Any], prompt: list[int]
    ) -> None:
        if kept is None:
            return
        choice = answer["choices"][0]
        choice["finish_reason"] = "not_finished" if choice["finish_reason"] == "length" else choice["finish_reason"]
        choice["disaggregated_params"] = {
            "request_type": "context_only",
            "first_gen_tokens": [1],
            "ctx_request_id": body["disaggregated_params"]["disagg_request_id"],
            "disagg_request_id": body["disaggregated_params"]["disagg_request_id"],
            "encoded_opaque_state": orjson.dumps(kept).decode(),
        }
        answer["prompt_token_ids"] = prompt


WIRES: dict[str, type[Wire]] = {"nixl": Nixl, "llm-d": Sidecar, "tensorrt-llm": TensorRtLlm}

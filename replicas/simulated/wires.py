"""How a simulated engine is told to keep a prompt's cache for another one, or to fetch it: the wire of each engine.

What is kept and fetched is the same in all of them (`transfers`), and what names it is NIXL's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import orjson
from aiohttp import web

from .tokens import RequestError

PREFILLER = "x-prefiller-host-port"
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Wire(Protocol):
    """Without state."""

    ids: bool  # it tells its engine's id at /query

    async def read(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        """What NIXL's parameters of this request would be, if it has any. Raises RequestError."""

    def tell(
        self, answer: dict[str, Any], kept: dict[str, Any] | None, body: dict[str, Any], prompt: list[int]
    ) -> None:
        """Put what was kept into the answer to `body`."""


class Nixl:
    """vLLM's `kv_transfer_params`."""

    ids = False

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

    ids = False

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


ROOM = "room"  # what the parameters of legs that are sent at once have in NIXL's place


class Silent:
    """An engine whose answer says nothing of what it kept."""

    ids = False

    def tell(
        self, answer: dict[str, Any], kept: dict[str, Any] | None, body: dict[str, Any], prompt: list[int]
    ) -> None:
        """Nothing."""


class Mooncake(Silent):
    """vLLM's `kv_transfer_params` with Mooncake's connector. What is computed is kept for whoever comes."""

    ids = True

    async def read(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        given = body.get("kv_transfer_params") or {}
        name = given.get("transfer_id")
        if not name:
            return None
        if given.get("do_remote_decode"):
            return {"do_remote_decode": True, ROOM: name, "waits": False}
        at = str(given.get("remote_bootstrap_addr", "")).removeprefix("http://")
        return {"do_remote_prefill": True, ROOM: name, "at": at, "engine": given.get("remote_engine_id")}


@dataclass(frozen=True)
class Bootstrap(Silent):
    """SGLang's `bootstrap_room`. An engine has one role, and takes no request without a room."""

    computes: bool

    async def read(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        room = body.get("bootstrap_room")
        if room is None:
            raise RequestError("Invalid request: Disaggregated request received without bootstrap room id.")
        if not isinstance(room, int) or not 0 <= room < 1 << 63:
            raise RequestError(f"bootstrap_room {room!r} is no room")
        if not self.computes:
            at = f"{body.get('bootstrap_host')}:{body.get('bootstrap_port')}"
            return {"do_remote_prefill": True, ROOM: str(room), "at": at}
        body |= {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0}
        return {"do_remote_decode": True, ROOM: str(room), "waits": True}


WIRES: dict[str, Wire] = {
    "nixl": Nixl(),
    "llm-d": Sidecar(),
    "tensorrt-llm": TensorRtLlm(),
    "mooncake": Mooncake(),
    "sglang-prefill": Bootstrap(computes=True),
    "sglang-decode": Bootstrap(computes=False),
}

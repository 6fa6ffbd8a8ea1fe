"""The parameters by which a request makes a simulated engine keep or fetch a prompt's cache, for each connector.

Keeping and fetching are the same for all of them (`transfers`), with NIXL's parameters.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
from aiohttp import web

from .tokens import RequestError

PREFILLER = "x-prefiller-host-port"
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Nixl:
    """Reader of vLLM's `kv_transfer_params`; it keeps no state between requests."""

    meets = False  # True: in rooms; the engine reports its id at /query, and answers have no parameters

    async def read(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the request's parameters in NIXL's form, or None. Raises RequestError."""
        return body.get("kv_transfer_params")


class Sidecar(Nixl):
    """An engine behind llm-d's sidecar, which lets the prefiller in the header compute the prompt.

    If the prefiller fails, the answer is the prefiller's; a prefiller on port 1 gets 403, like one that is not allowed.
    """

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


ROOM = "room"  # the parameter that names a room


class Mooncake(Nixl):
    """Mooncake's connector, as in vLLM's `kv_transfer_params`. Prompts are kept for any engine that fetches them."""

    meets = True

    async def read(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        given = body.get("kv_transfer_params") or {}
        name = given.get("transfer_id")
        if not name:
            return None
        if given.get("do_remote_decode"):
            return {"do_remote_decode": True, ROOM: name}
        at = str(given.get("remote_bootstrap_addr", "")).removeprefix("http://")
        return {"do_remote_prefill": True, ROOM: name, "at": at, "engine": given.get("remote_engine_id")}


WIRES: dict[str, Nixl] = {"nixl": Nixl(), "llm-d": Sidecar(), "mooncake": Mooncake()}

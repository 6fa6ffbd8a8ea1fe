"""Transfers of prompts' KV caches between simulated engines: one computes a prompt and keeps it, another fetches it.

Three ways in which real deployments pass on a prompt are imitated.
NIXL (vLLM's connector): the prompt is computed first. The answer has the parameters with which to fetch it.
Mooncake (vLLM's connector): both engines get the request at the same time, each with the same transfer name. The
    decoding engine waits until the prefill engine has computed the prompt.
llm-d (its sidecar): a header names the prefill engine. The decoding engine has it compute the prompt first, then
    proceeds as with NIXL.

The protocol between the engines is not that of vLLM: the fetching engine sends an HTTP POST to the other one, which
then forgets the prompt. Only the fact that the prompt was computed is kept: its blocks are in the prefix cache like any
others, and may be evicted.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from .tokens import RequestError

LEASE = 30.0  # s, vLLM's kv_lease_duration
PATIENCE = 480.0  # s, from Mooncake's connector
TOKEN_SECONDS = 10e-6  # 128 KiB a token over 100 Gbit/s
FETCH_SECONDS = 5.0  # timeout of NIXL's handshake with an engine that does not answer
PREFILLER = "x-prefiller-host-port"
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
Prompts = list[tuple[int, int | None]]  # for each sequence: its tokens, and how many were found cached


class NotThere(Exception):
    """An error: the other engine has no such prompt, or does not answer.

    The request then fails, as in vLLM with the policy `fail`.
    """


class Transfers:
    """The prompts that this engine computes or keeps for other engines, by the name of the transfer.

    `wire`: the protocol by which requests say what to transfer: nixl, llm-d or mooncake; None: nothing is transferred.
    `kind`: stands for vLLM's compatibility hash; engines exchange caches only if their kinds are equal.
    """

    def __init__(self, wire: str | None = None, kind: str = "") -> None:
        self.wire, self._kind = wire, kind
        self.meets = wire == "mooncake"
        self._engine = uuid.uuid4().hex
        self._kept: dict[str, asyncio.Future[Prompts]] = {}

    @property
    def open(self) -> int:
        """The number of transfers under way: the prompt is not yet computed, or not yet fetched by the other engine."""
        return len(self._kept)

    async def read(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        """Return the request's transfer parameters in NIXL's form, {} if it has none. Raises RequestError."""
        given = body.get("kv_transfer_params") or {}
        if self.wire is None:
            return {}
        if self.meets:
            at = str(given.get("remote_bootstrap_addr", "")).removeprefix("http://")
            to_fetch = {"remote_request_id": given.get("transfer_id"), "at": at}
            given = given | to_fetch | {"do_remote_prefill": not given.get("do_remote_decode")}
            return given if given.get("transfer_id") else {}
        prefiller = request.headers.get(PREFILLER) if self.wire == "llm-d" else None
        return given if prefiller is None else await self._of_prefiller(prefiller, request.path, body)

    @staticmethod
    async def _of_prefiller(prefiller: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Let the prefiller compute the prompt, as llm-d's sidecar does; return the transfer parameters of its answer.

        Raises RequestError, with the prefiller's status, if the prefiller fails.
        """
        if prefiller.endswith(":1"):  # stands for a prefiller that is not allowed
            raise RequestError("Forbidden: prefill target not allowed by SSRF protection", 403, "Forbidden")
        given = [name for name in LIMITS if name in body] or ["max_output_tokens" if "input" in body else "max_tokens"]
        asked = {name: value for name, value in body.items() if name not in ("stream_options", "min_tokens")}
        asked |= dict.fromkeys(given, 1) | {"stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        try:
            status, raw = await _post(f"http://{prefiller}{path}", None, data=orjson.dumps(asked))
        except NotThere:
            raise RequestError("", 502, "BadGateway") from None
        if status != 200:
            raise RequestError(raw.decode(errors="replace"), status, "PrefillFailed")
        return orjson.loads(raw).get("kv_transfer_params") or {}

    def _enter(self, name: str) -> asyncio.Future[Prompts]:
        if name not in self._kept:
            self._kept[name] = asyncio.get_running_loop().create_future()
        return self._kept[name]

    def _close(self, name: str) -> None:
        if (computed := self._kept.pop(name, None)) is not None:
            computed.cancel()

    def _keep(self, name: str, prompts: Prompts, seconds: float) -> None:
        self._enter(name).set_result(prompts)
        asyncio.get_running_loop().call_later(seconds, self._close, name)

    def keep(self, tokens: int, blocks: int, address: tuple[str, int], cached: int) -> dict[str, Any]:
        """Keep a computed prompt for another engine; return the parameters with which that engine can fetch it.

        `tokens`, `blocks`: the prompt's length. `address`: this engine's host and port. `cached`: how many tokens of
        the prompt were found in the cache.
        """
        name = uuid.uuid4().hex
        self._keep(name, [(tokens, cached)], LEASE)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, blocks + 1))],
            "remote_engine_id": self._engine,
            "remote_request_id": name,
            "remote_host": address[0],
            "remote_port": address[1],
            "tp_size": 1,
            "remote_num_tokens": tokens,
            "remote_prefill_cached_tokens": cached,
            "transfer_mode": "pull",
        }

    async def compute(self, name: str, computing: Callable[[], Awaitable[Prompts | None]]) -> None:
        """Compute the prompts of a Mooncake transfer, and keep them for the decoding engine.

        That engine may wait for them already, or ask later. `name`: the name of the transfer. `computing()`: computes
        the prompts and returns them, or None if they must not be kept.
        """
        computed, kept = self._enter(name), False
        try:
            prompts = await computing()
            if kept := prompts is not None and not computed.cancelled():
                self._keep(name, prompts, PATIENCE)
        finally:
            if not kept:
                self._close(name)

    async def hand_over(self, name: str, kind: str) -> Prompts:
        """Return the prompts that this engine keeps for a transfer, and forget them. Raises NotThere.

        With Mooncake's connector, wait until they are computed. `name`: the name of the transfer. `kind`: the cache
        format of the fetching engine, which has to equal this engine's.
        """
        if kind != self._kind or not (self.meets or name in self._kept):
            raise NotThere
        computed = self._enter(name)
        try:
            return await asyncio.wait_for(asyncio.shield(computed), PATIENCE)
        except TimeoutError:
            raise NotThere from None
        except asyncio.CancelledError as cancelled:
            if computed.cancelled():
                raise NotThere from cancelled
            raise
        finally:
            self._close(name)

    async def fetch(self, parameters: dict[str, Any]) -> Prompts:
        """Fetch the prompts that another engine keeps or computes. Raises NotThere."""
        at = parameters.get("at") or f"{parameters.get('remote_host')}:{parameters.get('remote_port')}"
        if self.meets and parameters.get("remote_engine_id") not in (None, engine_id(at.rpartition(":")[2])):
            raise NotThere
        url = f"http://{at}/kv/{parameters.get('remote_request_id')}"
        status, raw = await _post(url, PATIENCE if self.meets else FETCH_SECONDS, params={"kind": self._kind})
        if status != 200:
            raise NotThere
        prompts = [(tokens, cached) for tokens, cached in orjson.loads(raw)]
        if not self.meets:  # the request says what the other engine had found
            prompts = [(tokens, parameters.get("remote_prefill_cached_tokens")) for tokens, _ in prompts]
        await asyncio.sleep(sum(tokens for tokens, _ in prompts) * TOKEN_SECONDS)
        return prompts


def engine_id(port: int | str) -> str:
    """Return the engine id that Mooncake's bootstrap server reports for the engine on this port."""
    return f"engine-{port}"


async def _post(url: str, seconds: float | None, **sent: Any) -> tuple[int, bytes]:
    """Send a POST, and return the answer's status and body. Raises NotThere if no answer comes.

    `seconds`: until the answer has to be complete; None: no limit. `sent`: further arguments of aiohttp's `post`.
    """
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(seconds)) as session,
            session.post(url, **sent) as answer,
        ):
            return answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise NotThere from error

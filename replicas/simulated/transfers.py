"""Prompts' caches passed between engines, as by vLLM's NIXL connector: one engine keeps them, another fetches them.

The protocol is this engine's own: the fetching engine posts to the other over HTTP, which then forgets the prompt. Only
the fact that the prompt was computed is kept: its blocks are in the prefix cache like any others, and may be evicted.
"""

import asyncio
import time
import uuid
from typing import Any

import aiohttp

LEASE = 30.0  # s, vLLM's kv_lease_duration
TOKEN_SECONDS = 10e-6  # 128 KiB a token over 100 Gbit/s
FETCH_SECONDS = 5.0  # timeout of NIXL's handshake with an engine that does not answer


class NotThere(Exception):
    """The other engine has nothing, or does not answer: with vLLM's policy `fail` the request fails."""


class Transfers:
    """The prompts that this engine keeps for others. Times are on the monotonic clock."""

    def __init__(self, lease: float = LEASE, kind: str = "") -> None:
        """Keep no prompt yet. Engines exchange caches only if their `kind` is equal, like vLLM's compatibility hash."""
        self._lease, self.kind = lease, kind
        self._kept: dict[str, tuple[int, float]] = {}
        self._engine = uuid.uuid4().hex

    def keep(self, tokens: int, blocks: int, address: tuple[str, int], cached: int) -> dict[str, Any]:
        """Keep a computed prompt; return the transfer parameters of its answer. `cached`: its tokens found cached."""
        now = time.monotonic()
        for name in [name for name, (_, due) in self._kept.items() if due < now]:
            del self._kept[name]
        name = uuid.uuid4().hex
        self._kept[name] = tokens, now + self._lease
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

    @property
    def kept(self) -> int:
        """The number of prompts kept now."""
        now = time.monotonic()
        return sum(due >= now for _, due in self._kept.values())

    def hand_over(self, name: str) -> int | None:
        """Return the tokens of a kept prompt and forget it; None if it is not kept, or its lease has ended."""
        tokens, due = self._kept.pop(name, (0, 0.0))
        return tokens if due >= time.monotonic() else None

    async def fetch(self, parameters: dict[str, Any]) -> int:
        """Fetch a prompt that another engine keeps; return its tokens. Raises NotThere."""
        url = f"http://{parameters.get('remote_host')}:{parameters.get('remote_port')}/kv/{parameters.get('remote_request_id')}"
        timeout = aiohttp.ClientTimeout(FETCH_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(url, params={"kind": self.kind}) as answer,
            ):
                if answer.status != 200:
                    raise NotThere
                tokens = int((await answer.json())["tokens"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            raise NotThere from error
        await asyncio.sleep(tokens * TOKEN_SECONDS)
        return tokens

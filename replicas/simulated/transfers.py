"""Prompts' caches passed from engine to engine, as vLLM's NIXL connector does: what one kept, another fetches.

The wire is this engine's own: the one that fetches asks the other over HTTP, which forgets the prompt then. What is
kept is that the prompt was computed: its blocks stay in the prefix cache as any, and may be evicted.
"""

import asyncio
import time
import uuid
from typing import Any

import aiohttp

LEASE = 30.0  # s, of vLLM's kv_lease_duration
TOKEN_SECONDS = 10e-6  # 128 KiB a token over 100 Gbit/s
FETCH_SECONDS = 5.0  # of NIXL's handshake with an engine that does not answer


class NotThere(Exception):
    """The other engine has nothing, or does not answer: with vLLM's policy `fail` the request fails."""


class Transfers:
    """What this engine keeps for others. Times are of the monotonic clock."""

    def __init__(self, lease: float = LEASE, kind: str = "") -> None:
        """`kind`: what another engine has to be alike in, as vLLM's compatibility hash."""
        self._lease, self.kind = lease, kind
        self._kept: dict[str, tuple[int, float]] = {}
        self._engine = uuid.uuid4().hex

    def keep(self, tokens: int, blocks: int, address: tuple[str, int], cached: int) -> dict[str, Any]:
        """Keep a prompt that was computed, but for what was `cached`; returns what its first leg's answer says of
        that."""
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
        """How many prompts are kept now."""
        now = time.monotonic()
        return sum(due >= now for _, due in self._kept.values())

    def hand_over(self, name: str) -> int | None:
        """The tokens of a prompt that is kept, and is not any more; None if it is not, or no more."""
        tokens, due = self._kept.pop(name, (0, 0.0))
        return tokens if due >= time.monotonic() else None

    async def fetch(self, parameters: dict[str, Any]) -> int:
        """Fetch what another engine keeps; returns its tokens. Raises NotThere."""
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

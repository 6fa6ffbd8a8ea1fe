"""What requests leave behind in the gateway's process: every memory of it has a budget, whatever clients send."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest

from .running import Running, running

MB = 1_000_000
CHAT = "/v1/chat/completions"


@pytest.fixture
async def gateway():
    async with running("--launch", "1") as gateway:
        await gateway.ready(1)
        yield gateway


def body(**fields) -> bytes:
    return json.dumps({"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, **fields}).encode()


def resident(gateway: Running) -> int:
    """Bytes of memory that the gateway's process has."""
    return int(Path(f"/proc/{gateway.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def grown(gateway: Running, path: str, bodies: Iterable[bytes]) -> float:
    """Bytes by which the process is larger after these requests than after the first ten of them."""
    before = 0
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:
        for count, one in enumerate(bodies):
            if count == 10:
                before = resident(gateway)
            reply = await client.post(path, content=one, headers={"content-type": "application/json"})
            assert reply.status_code < 500, reply.text[:500]
    return resident(gateway) - before


async def test_tools_and_template_variables_are_not_kept(gateway):
    """Of a shape, seen once or compiled, there is a digest of them and nothing else."""
    shapes = [body(chat_template_kwargs={"unused": "x" * 2 * MB + str(i)}) for i in range(50)]
    assert await grown(gateway, CHAT, [shapes[0]] * 10 + shapes) < 40 * MB

"""Load for gateways that are watched: streams with usage, of two classes, that go on until they are told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import httpx

WORDS = ["quality", "mercy", "strained", "droppeth", "gentle", "rain", "heaven", "twice", "blest"]
SYSTEM = " ".join(random.Random(1).choices(WORDS, k=150))


def body(number: int, tokens: int, words: int) -> dict:
    question = " ".join(random.Random(number).choices(WORDS, k=words))
    return {
        "model": "sim", "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
    }  # fmt: skip


class Load:
    """Clients of one gateway; `async with`. What they get is theirs to bear: faults are meant to hurt."""

    def __init__(
        self,
        url: str,
        clients: int = 2,
        tokens: int = 24,
        pause: float = 0.05,
        words: int = 40,
        headers: dict | None = None,
    ):
        self.clients, self.tokens, self.pause, self.words = clients, tokens, pause, words
        self.statuses: dict[int, int] = {}
        self._client = httpx.AsyncClient(base_url=url, timeout=30, headers=headers)
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task] = []

    async def one(self, number: int, **headers: str) -> int:
        given = {"x-customer-tier": "premium"} if number % 2 else {}
        async with self._client.stream(
            "POST", "/v1/chat/completions", json=body(number, self.tokens, self.words), headers={**given, **headers}
        ) as answer:
            async for _ in answer.aiter_raw():
                pass
        self.statuses[answer.status_code] = self.statuses.get(answer.status_code, 0) + 1
        return answer.status_code

    async def _go_on(self) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                await self.one(next(self._numbers))
            await asyncio.sleep(self.pause)

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._go_on()) for _ in range(self.clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

"""One worker as the control process knows it: a process, a channel, what it was told and what it has said."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any

from .channel import Channel, pair

# What a worker has seen of a replica that it has not spoken of yet.
NOTHING: dict[str, Any] = {"sent_at": None, "idle": 0, "modelled": 0}


class Member:
    """`heard` is when it last said something, `assigned` how many connections it got, `live` whether it takes any."""

    def __init__(self, index: int, process: asyncio.subprocess.Process):
        self.index, self.process = index, process
        self.channel: Channel = None  # type: ignore[assignment]
        self.begun = self.heard = monotonic()
        self.live = False
        self.drained = asyncio.Event()
        self.assigned = self.requests = self.cut = 0
        self.held = 0  # bytes of requests
        self.seen: dict[str, dict[str, Any]] = {}  # of each replica, what it said last
        self.joined, self.reason = False, "not heard yet"
        self.model_dir: str | None = None  # whose tokenizer it has
        self._tables: dict[str, Any] = {}  # what it was told last
        self._ways: dict[str, Any] = {}
        self._facts: dict[str, dict[str, Any]] = {}

    @classmethod
    async def start(cls, index: int, on_message: Callable[[Member, dict[str, Any]], None], on_end: Callable[[Member], None]) -> Member:
        """A process of its own. OSError if there can be none."""
        ours, its = pair()
        with its:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway.workers.worker", str(its.fileno()),
                pass_fds=[its.fileno()], stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        self = cls(index, process)
        self.channel = Channel(ours, lambda message, _: on_message(self, message), lambda: on_end(self))
        return self

    def kill(self) -> None:
        try:
            self.process.kill()
        except ProcessLookupError:
            pass

    def tell(self, tables: dict[str, Any], ways: dict[str, Any], facts: dict[str, dict[str, Any]]) -> None:
        """Whatever is not as it was told: where the map's tables lie, how prompts are made, what each replica is."""
        send = self.channel.send
        for tier, arrays in tables.items():
            if self._tables.get(tier) != arrays:
                send({"do": "table", "tier": tier, "types": [dtype for dtype, _, _ in arrays]}, [descriptor for _, descriptor, _ in arrays])
                self._tables[tier] = arrays
        if self._ways != ways:
            self._ways = ways
            send({"do": "pipeline", **ways})
        for id in self._facts.keys() - facts.keys():
            del self._facts[id]
            self.seen.pop(id, None)
            send({"do": "gone", "id": id})
        for id, one in facts.items():
            if self._facts.get(id) != one:
                self._facts[id] = one
                send({"do": "replica", "facts": one})

"""The progress of an engine: whether it computes, since an engine that answers /health may hang.

vLLM's API server reports healthy as long as the process that computes exists. When that process hangs (a kernel, a
collective, a stopped process), the only signs are that requests wait and no counter in /metrics changes. So while
requests wait, the counters have to change. They do with every engine step, even within a long prefill, whose blocks
fill the cache chunk by chunk. A step of some seconds, or a kernel compiled at its first use (15 s were seen), is no
hang.

Only `computes` and `asked` do I/O: they request two tokens, one of prefill and one of decode.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from replicas.deadline import within
from replicas.metrics import Scrape

# Seconds without a step until an engine gets no more requests, and until a launched engine is restarted.
STALLED, HUNG = 20.0, 120.0
# Statuses of a failing engine, or of a proxy in front of one. vLLM answers 501 if its model has no completions.
ILL = (500, 502, 504)
MOST_READ = 65536  # bytes of an answer of two tokens


@dataclass(slots=True)
class _Rank:
    """One data-parallel rank: its last counters, and since when it has had work while they did not change."""

    counters: tuple[float | None, ...] = ()
    since: float | None = None

    def still(self, now: float) -> float:
        return 0.0 if self.since is None else now - self.since


class Progress:
    """The progress of one process of one engine. When another process answers, a new object is needed."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []

    def look(self, now: float, scrape: Scrape, waited: float) -> None:
        """Compare the figures of a /metrics page with those of the page before, for each data-parallel rank.

        `waited`: seconds that the gateway's oldest unanswered prompt has been with the engine.
        """
        scrapes = scrape.ranks or (scrape,)
        if len(scrapes) != len(self._ranks):
            self._ranks = [_Rank() for _ in scrapes]
        for rank, one in zip(self._ranks, scrapes):
            counters = one.counters
            if counters != rank.counters or one.generated is None:
                rank.counters, rank.since = counters, None
            elif one.running or one.waiting:
                rank.since = now if rank.since is None else rank.since
            elif rank.still(now) < STALLED:  # a hung rank still hangs when its requests went elsewhere
                # An engine that hangs since it was idle does not count its waiting requests in /metrics. Only the
                # gateway knows of these, but not at which rank they wait.
                known = waited > 0 and len(scrapes) == 1
                rank.since = max(now if rank.since is None else rank.since, now - waited) if known else None

    def answered(self) -> None:
        """Restart the count of seconds without progress, since the engine was seen to compute."""
        self._ranks = []

    def still(self, now: float) -> float:
        """Return for how many seconds the engine, or one of its ranks, has had work and made no progress."""
        return max((rank.still(now) for rank in self._ranks), default=0.0)

    def stalled(self, now: float) -> bool:
        return self.still(now) >= STALLED

    def hung(self, now: float) -> bool:
        return self.still(now) >= HUNG


async def computes(session: aiohttp.ClientSession, url: str, model: str, deadline: float) -> bool:
    """Return whether the engine answers a request for two tokens with a status that no failing engine gives.

    `deadline`: seconds until the answer has to be there.
    """
    return await asked(session, url, model, deadline) not in (0, *ILL, 503)


async def asked(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    deadline: float,
    aborted: Callable[[bytes], object] = lambda answer: False,
) -> int:
    """Request two tokens for a prompt of one token; return the answer's status.

    The result is 0 if there was no answer within `deadline` seconds, and 500 if the answer shows that the engine
    aborted the request. `aborted`: tests the bytes of an answer for that.
    """
    body = json.dumps({"model": model, "prompt": [1], "max_tokens": 2})
    options: dict[str, Any] = {"headers": {"content-type": "application/json"}, "allow_redirects": False}

    async def ask() -> int:
        timeout = aiohttp.ClientTimeout()
        async with session.post(f"{url}/v1/completions", data=body, timeout=timeout, **options) as response:
            begins = await response.content.read(MOST_READ) if response.status == 200 else b""
            return 500 if aborted(begins) else response.status

    try:
        return await within(deadline, ask())
    except (TimeoutError, OSError, aiohttp.ClientError):
        return 0

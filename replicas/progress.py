"""Whether an engine that answers /health computes as well.

vLLM's API server says it is healthy as long as the process that computes exists. When that one hangs (a kernel, a
collective, a stopped process), nothing tells but that requests wait and no counter moves. So: while requests
wait, the engine's own counters have to change. They do with every step, also within a long prefill, whose blocks
fill the cache chunk by chunk; a step of some seconds, or a kernel compiled at its first use (15 s were seen), is no
hang.

Pure but for `computes`, which asks for two tokens: prefill and decode.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from replicas.deadline import within
from replicas.metrics import Scrape

# Seconds without a step: until it gets no more requests, and until one of our own is started again.
STALLED, HUNG = 20.0, 120.0
# Statuses of an engine that fails, or of a proxy before one. With 501 vLLM says that its model makes no completions.
ILL = (500, 502, 504)
MOST_READ = 65536  # bytes of an answer of two tokens


@dataclass(slots=True)
class _Rank:
    """One data-parallel rank: what its counters said, and since when they have said it with work to do."""

    counters: tuple = ()
    since: float | None = None

    def still(self, now: float) -> float:
        return 0.0 if self.since is None else now - self.since


class Progress:
    """Of one incarnation of one engine; make a new one for the next."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []

    def look(self, now: float, scrape: Scrape, waited: float) -> None:
        """`waited`: seconds for which the gateway's oldest unanswered prompt has been with the engine."""
        scrapes = scrape.ranks or (scrape,)
        if len(scrapes) != len(self._ranks):
            self._ranks = [_Rank() for _ in scrapes]
        for rank, one in zip(self._ranks, scrapes):
            counters = one.counters
            if counters != rank.counters or one.generated is None:
                rank.counters, rank.since = counters, None
            elif one.running or one.waiting:
                rank.since = now if rank.since is None else rank.since
            elif rank.still(now) < STALLED:  # who hangs and has lost its requests to others still hangs
                # One that hung while idle never heard of what waits: of that, only the gateway knows, and not at which
                # rank.
                known = waited > 0 and len(scrapes) == 1
                rank.since = max(now if rank.since is None else rank.since, now - waited) if known else None

    def answered(self) -> None:
        """It was seen to compute."""
        self._ranks = []

    def still(self, now: float) -> float:
        """Seconds for which it has had work and done nothing."""
        return max((rank.still(now) for rank in self._ranks), default=0.0)

    def stalled(self, now: float) -> bool:
        return self.still(now) >= STALLED

    def hung(self, now: float) -> bool:
        return self.still(now) >= HUNG


async def computes(session: aiohttp.ClientSession, url: str, model: str, deadline: float) -> bool:
    """Whether the engine answers a prompt of one token with two more, or at least says why it would not."""
    return await asked(session, url, model, deadline) not in (0, *ILL, 503)


async def asked(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    deadline: float,
    aborted: Callable[[bytes], object] = lambda answer: False,
) -> int:
    """The status of its answer to such a prompt; 0 if there was none within `deadline` seconds, and 500 for one that it
    `aborted`."""
    body = json.dumps({"model": model, "prompt": [1], "max_tokens": 2})
    try:
        return await within(deadline, _post(session, f"{url}/v1/completions", body, aborted))
    except (TimeoutError, OSError, aiohttp.ClientError):
        return 0


async def _post(session: aiohttp.ClientSession, url: str, body: str, aborted: Callable[[bytes], object]) -> int:
    headers = {"content-type": "application/json"}
    async with session.post(
        url, data=body, headers=headers, timeout=aiohttp.ClientTimeout(), allow_redirects=False
    ) as response:
        begins = await response.content.read(MOST_READ) if response.status == 200 else b""
        return 500 if aborted(begins) else response.status

"""Load: what one replica has to do right now."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

# Times that are not known are finite, for they are factors of sums: 30,000 years off, on either side of any clock.
FAR = 1e12
UNTIMED = -FAR  # the time of what is asked without a clock: of what is queued, nothing is done yet

# Fields of a `Load` that are all 0 where the first of them is: no prompts have no tokens, no streams no context.
ZERO_TOGETHER = (("prefilling", "prefill_tokens", "begun", "begun_tokens"), ("decoding", "context_tokens"))


@dataclass(slots=True)
class Load:
    """What one replica has to do right now; the ledger keeps it, a scrape fills the three in the middle."""

    requests: int = 0  # reserved and not released
    prefilling: int = 0  # of these, first byte not seen yet
    prefill_tokens: int = 0  # their uncached tokens
    decoding: int = 0  # of these, past the first byte
    context_tokens: int = 0  # prompt tokens of the decoding ones
    waiting: int = 0  # the engine's own waiting queue, last scrape; 0 if it was not reported
    kv_usage: float = 0.0  # share of its KV blocks in use by running requests, 0..1; 0 if it was not reported
    capacity_tokens: float = inf  # what its blocks hold, in this ledger's tokens; infinite: not known to be short
    since: float = FAR  # when it began the prompts it computes now, by the clock of `Demand.now`; FAR: not known
    begun: int = 0  # how many of `prefilling` these are (not known: all); those that came later wait for the next step
    begun_tokens: int = 0  # and how many of `prefill_tokens`
    recent: float = 0.0  # choices that fell on it, the later the heavier: what counts is its share of all replicas' sum

    def copy(self) -> Load:
        """As it is now. `dataclasses.replace` takes five times as long."""
        return Load(
            self.requests,
            self.prefilling,
            self.prefill_tokens,
            self.decoding,
            self.context_tokens,
            self.waiting,
            self.kv_usage,
            self.capacity_tokens,
            self.since,
            self.begun,
            self.begun_tokens,
            self.recent,
        )

    def scraped(self, waiting: int | None, kv_usage: float | None) -> None:
        """Take over a scrape; either may be missing.

        The capacity follows from what the ledger counts now and the share of blocks that takes, so prompts
        that share blocks are allowed for. Below half full the quotient says little and nobody needs it.
        """
        self.waiting, self.kv_usage = waiting or 0, kv_usage or 0.0
        held = self.context_tokens + self.prefill_tokens
        if self.kv_usage < 0.5 or not held:
            self.capacity_tokens = inf
            return
        capacity = held / self.kv_usage
        self.capacity_tokens = capacity if self.capacity_tokens == inf else (self.capacity_tokens + capacity) / 2

    def timed(self, now: float | None) -> None:
        """The step that computes its prompts began at `now`, with all that wait; None: nobody knows when."""
        self.since = FAR if now is None else now
        self.begun, self.begun_tokens = self.prefilling, self.prefill_tokens

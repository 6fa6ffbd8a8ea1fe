"""The plain types a policy sees and answers with. Tokens are counts, times are seconds."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, Sequence

from .costs import Costs


@dataclass(slots=True)
class Load:
    """What one replica has to do right now; the ledger keeps it, a scrape fills the last two."""
    requests: int = 0         # reserved and not released
    prefilling: int = 0       # of these, first byte not seen yet
    prefill_tokens: int = 0   # their uncached tokens
    decoding: int = 0         # of these, past the first byte
    context_tokens: int = 0   # prompt tokens of the decoding ones
    waiting: int | None = None      # the engine's own waiting queue, last scrape
    kv_usage: float | None = None   # share of its KV blocks in use by running requests, 0..1
    capacity_tokens: float | None = None   # what its blocks hold, in this ledger's tokens; None: not known to be short

    def copy(self) -> Load:
        """As it is now. `dataclasses.replace` takes five times as long, once a request."""
        return Load(self.requests, self.prefilling, self.prefill_tokens, self.decoding, self.context_tokens,
                    self.waiting, self.kv_usage, self.capacity_tokens)

    def scraped(self, waiting: int | None, kv_usage: float | None) -> None:
        """Take over a scrape; either may be missing.

        The capacity follows from what the ledger counts now and the share of blocks that takes, so prompts
        that share blocks are allowed for. Below half full the quotient says little and nobody needs it.
        """
        self.waiting, self.kv_usage = waiting, kv_usage
        held = self.context_tokens + self.prefill_tokens
        if kv_usage is None or kv_usage < 0.5 or not held:
            self.capacity_tokens = None
            return
        capacity = held / kv_usage
        self.capacity_tokens = capacity if self.capacity_tokens is None else (self.capacity_tokens + capacity) / 2


@dataclass(slots=True)
class Demand:
    """What one request asks for."""
    tokens: int                     # prompt tokens
    block_size: int = 16
    root: int = 0                   # hash of the first block, 0 if the prompt has no full block
    session: str | None = None
    max_tokens: int | None = None


@dataclass(slots=True)
class Candidate:
    """One replica that could serve the request."""
    replica: str
    overlap: int                             # prompt tokens whose KV it holds, < Demand.tokens
    load: Load
    costs: Costs
    lower: tuple[tuple[str, int], ...] = ()  # further tokens in slower tiers, after the overlap


class Choice(NamedTuple):
    index: int                                # into the candidates
    reason: str
    terms: list[dict[str, float]] | None = None   # seconds, one dict a candidate, when explained


class Policy(Protocol):
    """A pure choice: the same candidates, seed and history give the same answer.

    `candidates` is never empty; the caller answers 503 before it asks a policy about nothing.
    """
    name: str

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice: ...

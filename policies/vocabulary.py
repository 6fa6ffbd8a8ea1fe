"""The plain types a policy sees and answers with. Tokens are counts, times are seconds."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, Sequence

from .costs import Costs


@dataclass(slots=True)
class Load:
    """What one replica has to do right now; the ledger keeps it, a scrape fills the three in the middle."""
    requests: int = 0         # reserved and not released
    prefilling: int = 0       # of these, first byte not seen yet
    prefill_tokens: int = 0   # their uncached tokens
    decoding: int = 0         # of these, past the first byte
    context_tokens: int = 0   # prompt tokens of the decoding ones
    waiting: int | None = None      # the engine's own waiting queue, last scrape
    kv_usage: float | None = None   # share of its KV blocks in use by running requests, 0..1
    capacity_tokens: float | None = None   # what its blocks hold, in this ledger's tokens; None: not known to be short
    since: float | None = None   # when it began the prompts it computes now, by the clock of `Demand.now`; None: not known
    begun: int = 0               # how many of `prefilling` these are; those that came later wait for the next step
    begun_tokens: int = 0        # and how many of `prefill_tokens`
    recent: float = 0.0          # choices that fell on it, the later the heavier: what counts is its share of all replicas' sum

    def copy(self) -> Load:
        """As it is now. `dataclasses.replace` takes five times as long, once a request."""
        return Load(self.requests, self.prefilling, self.prefill_tokens, self.decoding, self.context_tokens,
                    self.waiting, self.kv_usage, self.capacity_tokens, self.since, self.begun, self.begun_tokens, self.recent)

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
    now: float | None = None        # seconds, of whichever clock its ledger is told; None: loads are taken as of no age
    hashes: Sequence[int] = ()      # chained, of the prompt's full blocks


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
    reason: str = ""                          # in words; where it is not asked to explain, a policy may leave it out
    terms: list[dict[str, float]] | None = None   # seconds, one dict a candidate, when explained


class Bid(NamedTuple):
    """A candidate's cost as a linear form in its load, for a decision made where the load of all gateways is
    known: see `cost`. The unit is the policy's own; a bid is compared with bids of the same policy only."""
    own: float                      # its own prefill after the overlap this gateway knows of
    pace: float                     # own prefill here / `own_after` the same overlap
    fixed: float = 0.0
    least: float = 0.0              # the cost is never below this
    per_request: float = 0.0
    if_prefilling: float = 0.0
    per_prefill_token: float = 0.0
    if_decoding: float = 0.0
    per_stream: float = 0.0
    per_context_token: float = 0.0
    own_per_stream: float = 0.0     # x own prefill x streams
    own_per_waiting: float = 0.0    # x own prefill x prompts without a first token

    def cost(self, load: Load, own: float) -> float:
        """With this load there, and `own` for the prefill. The same arithmetic is in the Redis script."""
        linear = (self.per_request * load.requests + self.per_prefill_token * load.prefill_tokens
                  + self.per_stream * load.decoding + self.per_context_token * load.context_tokens)
        steps = self.if_prefilling * (load.prefilling > 0) + self.if_decoding * (load.decoding > 0)
        held_up = self.own_per_stream * load.decoding + self.own_per_waiting * load.prefilling
        return max(self.least, own * (1 + held_up) + self.fixed + linear + steps)


class Policy(Protocol):
    """A pure choice: the same candidates, seed and history give the same answer.

    `candidates` is never empty; the caller answers 503 before it asks a policy about nothing.
    """
    name: str

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice: ...


class Bidder(Policy, Protocol):
    """A policy whose choice is the least of costs that are linear in the load."""
    slack: tuple[float, float]    # costs up to least x slack[0] + slack[1] are equal; one of them at random

    def bids(self, demand: Demand, candidates: Sequence[Candidate]) -> list[Bid | None]:
        """One for each candidate; None: not to be chosen."""
        ...

    def own_after(self, demand: Demand, overlap: int, candidates: Sequence[Candidate]) -> float:
        """The own prefill of a replica of pace 1 that holds `overlap` of the prompt's tokens."""
        ...

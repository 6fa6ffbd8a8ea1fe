"""The plain types that a policy takes and returns. Tokens are counts, times are seconds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol

from .costs import Costs, Lower
from .ledger import UNTIMED, Load


@dataclass(slots=True)
class Demand:
    """The properties of one request that a policy chooses by."""

    tokens: int  # prompt tokens
    block_size: int = 16
    root: int = 0  # hash of the first block, 0 if the prompt has no full block
    session: str | None = None
    max_tokens: int | None = None
    now: float = UNTIMED  # seconds, by the clock of the ledger
    hashes: Sequence[int] = ()  # chained hashes of the prompt's full blocks
    draw: float = 0.0  # 0 <= draw < 1, drawn once per request: breaks ties between candidates
    reads_cache: bool = True  # whether a cached prefix is used; with prompt logprobs, say, all is computed
    path: str = ""  # path of the API that it is posted to
    space: int = 0  # the space of these tokens and blocks: candidates of another space hold none of them
    also: Demand | None = None  # the same request in the tokens and blocks of another space, if candidates are of two
    streams: bool = True  # whether the first token of its answer is seen when it is made, not with the last one
    writes: bool = True  # whether its answer has decoded tokens; an embedding or a score has none
    output: float = 0.0  # expected tokens of its answer, set by the Router
    residual: int = 0  # expected tokens still to come of it at a random moment, set by the Router


class Pull(NamedTuple):
    """The part of a prompt that a replica fetches from another's memory instead of computing it."""

    source: str  # the other replica
    tokens: int
    seconds: float  # predicted


@dataclass(slots=True)
class Candidate:
    """One replica that could serve the request."""

    replica: str
    overlap: int  # prompt tokens whose KV it holds in its first tier, < Demand.tokens
    load: Load
    costs: Costs
    lower: Lower = ()  # further tokens in slower tiers, right after the overlap; with it < Demand.tokens
    slot: int = -1  # its slot in the prefix map; -1: none
    # API paths whose requests are computed by this rank of its engine; None: all
    rank_paths: Collection[str] | None = None
    space: int = 0  # the space of tokens and blocks in which its cache is known
    pull: Pull | None = None  # the source of the last run of `lower`, if that is of the tier PEER
    seats: float = inf  # requests that its engine runs at once, see `Seats`; infinite: not known to be short

    @property
    def fetch_seconds(self) -> float:
        """Seconds to fetch the tokens in slower tiers."""
        seconds = self.costs.group.fetch.seconds(self.lower)
        return seconds + self.pull.seconds if self.pull is not None else seconds

    @property
    def cached(self) -> int:
        """Prompt tokens in all tiers, which need not be computed."""
        return self.overlap + sum([tokens for _, tokens in self.lower])


class Choice(NamedTuple):
    """A policy's choice among the candidates."""

    index: int  # type: ignore[assignment]  # into the candidates; hides tuple.index, which nobody calls
    reason: str = ""  # in words; may be empty unless `explain` was set
    terms: list[dict[str, float]] | None = None  # cost terms in seconds, one dict a candidate, if explained
    lesson: Any = None  # what the policy learns if this choice is made; private to it, see `Policy`
    # candidates of which this one has the least `cost`: a ledger with a later load may choose again; None: final
    among: Sequence[int] | None = None
    future: float = 0.0  # argument `future` of that cost
    after: float = 1.0  # argument `after` of that cost
    ttft: float | None = None  # predicted seconds to the first token there, if computed


def pick(equals: Sequence[int], draw: float) -> int:
    """Return one of several equally good indices, each as likely, by a number 0 <= draw < 1."""
    return equals[int(draw * len(equals))]


class Policy(Protocol):
    """A pure choice: it depends on the demand and the candidates alone, and changes nothing.

    `choose` takes at least one candidate; with `explain`, its choice has a reason and, if the policy weighs costs,
    their terms. A policy that learns from placements has a second method, which callers look up once:

            def placed(self, demand: Demand, candidates: Sequence[Candidate], choice: Choice) -> None

    It is called once per placement, after the request was reserved on candidate `choice.index`. Likewise
    `first(replica, demand)` is called at the request's first token, `ended(replica, demand)` at its end, and
    `gone(replica)` when a replica has lost its cache. A policy that chooses the least of a cost has it as `cost:
    least_cost.Cost`, `in_seconds = True` if that is its unit, and `leg_cost` if two legs are weighed against one by
    another cost. In a user's own rule these are used only if they are those of `LeastTime`.
    """

    name: str

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice: ...

"""The plain types a policy sees and answers with. Tokens are counts, times are seconds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol

from .costs import Costs, Lower
from .ledger import UNTIMED, Load


@dataclass(slots=True)
class Demand:
    """What one request asks for."""

    tokens: int  # prompt tokens
    block_size: int = 16
    root: int = 0  # hash of the first block, 0 if the prompt has no full block
    session: str | None = None
    max_tokens: int | None = None
    now: float = UNTIMED  # seconds, of whichever clock its ledger is told
    hashes: Sequence[int] = ()  # chained, of the prompt's full blocks
    draw: float = 0.0  # 0 <= draw < 1, drawn once per request: candidates that are equal are told apart by it
    reads_cache: bool = True  # its prompt is found in a cache; of one with logprobs, say, all is computed
    path: str = ""  # of the API that it is posted to
    space: int = 0  # whose tokens and blocks these are: a candidate of another space has none of them
    also: Demand | None = None  # the same request in the tokens and blocks of another space, if candidates are of two
    streams: bool = True  # the first token of its answer is seen when it is made, not with the last one
    writes: bool = True  # its answer has tokens that are decoded; an embedding or a score has none
    output: float = 0.0  # tokens that its answer is expected to have; the Router says so
    residual: int = 0  # and how many are still to come, seen at a random moment while it comes


class Pull(NamedTuple):
    """What a replica fetches of a prompt from another's memory instead of computing it. `seconds`: as predicted."""

    source: str  # the other replica
    tokens: int
    seconds: float


@dataclass(slots=True)
class Candidate:
    """One replica that could serve the request."""

    replica: str
    overlap: int  # prompt tokens whose KV it holds in its first tier, < Demand.tokens
    load: Load
    costs: Costs
    lower: Lower = ()  # further tokens in slower tiers, right after the overlap; with it < Demand.tokens
    slot: int = -1  # where the map of prefixes has it; -1: nowhere, or no more
    # where requests are computed by this rank of its engine; None: everywhere
    rank_paths: Collection[str] | None = None
    space: int = 0  # in which tokens and blocks its cache is known
    pull: Pull | None = None  # where the last run of `lower` is of the tier PEER: from whom
    seats: float = inf  # requests that its engine runs at once, see `Seats`; infinite: not known to be short

    @property
    def fetch_seconds(self) -> float:
        """What it takes to fetch the tokens in slower tiers."""
        seconds = self.costs.group.fetch.seconds(self.lower)
        return seconds + self.pull.seconds if self.pull is not None else seconds

    @property
    def cached(self) -> int:
        """Prompt tokens that it need not compute, in all tiers."""
        return self.overlap + sum([tokens for _, tokens in self.lower])


class Choice(NamedTuple):
    index: int  # type: ignore[assignment]  # into the candidates; hides tuple.index, which nobody calls
    reason: str = ""  # in words; where it is not asked to explain, a policy may leave it out
    terms: list[dict[str, float]] | None = None  # seconds, one dict a candidate, when explained
    lesson: Any = None  # what the policy learns if this choice is made; its own, see `Policy.placed`
    # whom it is the least of by the policy's `cost`, for whoever knows a later load; None: it stands
    among: Sequence[int] | None = None
    future: float = 0.0  # the `future` of that cost
    after: float = 1.0  # and its `after`
    ttft: float | None = None  # seconds to the first token there, if those were weighed


def pick(equals: Sequence[int], draw: float) -> int:
    """Return one of several that are equally good, each as likely, by a number 0 <= draw < 1."""
    return equals[int(draw * len(equals))]


class Policy(Protocol):
    """A pure choice: asked twice about the same demand and candidates it gives the same answer, and asking changes
    nothing.

    `candidates` is never empty; the caller answers 503 before it asks a policy about nothing. A policy that learns from
    what it placed has a second method, which callers look up once:

        def placed(self, demand: Demand, candidates: Sequence[Candidate], choice: Choice) -> None

    told once per placement, after the request was reserved on candidate `choice.index`; likewise
    `first(replica, demand)` at its first token, `ended(replica, demand)` at its end and `gone(replica)` when a replica
    has lost all that it held. One whose choice is the least of a cost has that as `cost: least_cost.Cost`, and
    `in_seconds = True` where that is its unit; `leg_cost`, if two legs are weighed against one by another. Of a rule in
    a file of its own these are used only where they are those of `LeastTime`.
    """

    name: str

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice: ...

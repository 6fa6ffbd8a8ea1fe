"""The plain types that a routing policy takes and returns: request, candidate replica, choice.

Tokens are counts, times are seconds. A *space* is the tokenizer, chat template and block size of a served model: tokens
and block hashes can be compared only within one space. A *tier* is a place where a replica keeps KV cache: the GPU
first, then slower ones (host memory, disk, remote).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol

from .costs import Costs, Lower
from .ledger import UNTIMED, Load


@dataclass(slots=True)
class Demand:
    """The properties of one request by which a policy chooses a replica."""

    tokens: int  # prompt tokens
    block_size: int = 16
    root: int = 0  # hash of the first block, 0 if the prompt has no full block
    session: str | None = None
    max_tokens: int | None = None
    now: float = UNTIMED  # the present time in seconds, by the clock of the ledger
    hashes: Sequence[int] = ()  # chained hashes of the prompt's full blocks
    draw: float = 0.0  # 0 <= draw < 1, drawn once per request: breaks ties between candidates
    reads_cache: bool = True  # whether the engine may use a cached prefix; it may not with prompt logprobs, for example
    path: str = ""  # path of the API that the request is posted to
    space: int = 0  # number of the space (tokenizer, template, block size) of these tokens and blocks
    also: Demand | None = None  # the same request in the tokens and blocks of another space, if candidates are of two
    streams: bool = True  # whether the answer is streamed, so that its first token is seen before the last one
    writes: bool = True  # whether the answer has decoded tokens; an embedding or a score has none
    output: float = 0.0  # expected tokens of the answer, set by the Router
    residual: int = 0  # tokens expected to be still to come at a random moment of the answer, set by the Router


class Pull(NamedTuple):
    """A fetch of a prompt's beginning from another replica's memory, in place of computing it."""

    source: str  # the replica that has the tokens in its memory
    tokens: int
    seconds: float  # the predicted duration of the fetch


@dataclass(slots=True)
class Candidate:
    """One replica that could serve a request.

    The Router sets three fields for each request: `overlap` and `lower`, the prompt tokens that the replica holds
    in its first tier (GPU memory) and in slower ones, and `pull`, those that it would fetch from another replica's
    memory.
    """

    replica: str
    overlap: int  # leading prompt tokens whose KV cache it holds in its first tier, < Demand.tokens
    load: Load
    costs: Costs
    lower: Lower = ()  # the tokens after the overlap that it holds in slower tiers; overlap + lower < Demand.tokens
    slot: int = -1  # its index in the prefix map; -1: it is not in the map
    # API paths whose requests are computed by this data-parallel rank of its engine; None: all paths
    rank_paths: Collection[str] | None = None
    space: int = 0  # number of the space (tokenizer, template, block size) of the blocks in its cache
    pull: Pull | None = None  # where the last entry of `lower` comes from, if that entry is of the tier PEER
    max_num_seqs: float = (
        inf  # requests that its engine runs at once, learned by `MaxNumSeqs`; infinite: no limit noticed yet
    )

    @property
    def fetch_seconds(self) -> float:
        """The predicted seconds to bring the tokens in slower tiers, or in another replica's memory, to the GPU."""
        seconds = self.costs.group.fetch.seconds(self.lower)
        return seconds + self.pull.seconds if self.pull is not None else seconds

    @property
    def cached(self) -> int:
        """The prompt tokens that the replica holds in all tiers together and need not compute."""
        return self.overlap + sum([tokens for _, tokens in self.lower])


class Choice(NamedTuple):
    """A policy's choice of one of the candidate replicas for a request."""

    index: int  # type: ignore[assignment]  # of the chosen candidate; hides tuple.index, which nobody calls
    reason: str = ""  # the reason for the choice in words; may be empty unless `explain` was set
    terms: list[dict[str, float]] | None = None  # cost terms in seconds, one dict per candidate, if `explain` was set
    lesson: Any = None  # data for `Policy.placed` to learn from once the request is placed; only the policy reads it
    # The indices of the candidates among which this one has the least `Policy.cost`. A ledger shared by several
    # gateways may choose among them again by the present load. None: the choice is final.
    among: Sequence[int] | None = None
    future: float = 0.0  # argument `future` of the policy's cost
    after: float = 1.0  # argument `after` of the policy's cost
    ttft: float | None = None  # predicted seconds to the first token on the chosen candidate, if computed


def pick(equals: Sequence[int], draw: float) -> int:
    """Return one element of `equals`, each equally likely.

    `draw`: a random number, 0 <= draw < 1, which decides.
    """
    return equals[int(draw * len(equals))]


class Policy(Protocol):
    """A rule that chooses a replica for a request by the request and the candidates alone; `choose` changes nothing.

    `choose` is given at least one candidate. With `explain`, its result has a reason and, if the policy compares costs,
    their terms.

    A policy may have further methods, which callers look up once:
    `placed(demand, candidates, choice)`: called once per placement, after the request was reserved on candidate
    `choice.index`.
    `first(replica, demand)`, `ended(replica, demand)`: called at a request's first token, and at its end.
    `gone(replica)`: called when a replica has lost its cache.

    A policy that chooses the least of a cost has these attributes (a user's own rule only if they are those of
    `LeastTime`):
    `cost`: the `least_cost.Cost`; `in_seconds`: True if its unit is seconds.
    `leg_cost`: the cost by which serving a request on two replicas is compared with one, if it differs from `cost`.
    """

    name: str

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice: ...

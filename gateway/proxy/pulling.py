"""Prompts whose beginning a replica takes from another's memory: who can, what a request is told, what became of it.

What that costs and when it is worth it is `policies.pulls`; how a request says it, the engine's dialect (`PeerPull`).
Who takes part names its side channel behind its URL (`#peer=HOST:PORT`); without two such replicas nothing here is
asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING

from policies import Candidate, Placement, Router
from replicas import TAKES_TRAFFIC
from replicas.engines.transfer import PATHS

from .backend import Backend
from .exchange import Attempt, Exchange
from .retries import PULL_FAILED

if TYPE_CHECKING:
    from ..ops.metrics import Metrics
    from ..prompt import Prompt


class Pulls:
    def __init__(self, backends: Mapping[str, Backend], router: Router, metrics: Metrics):
        self._backends, self._router, self._metrics = backends, router, metrics
        self.any = False  # whether two replicas can
        self._peers: list[Backend] = []

    def changed(self) -> None:
        """Some replica's state changed, or which there are."""
        self._peers = [
            one
            for one in self._backends.values()
            if one.replica.peer and one.replica.dialect.peer_pull is not None and one.replica.state in TAKES_TRAFFIC
        ]
        self.any = len(self._peers) > 1

    def peers(self, asker: object) -> list[Candidate]:
        """Who may take its prompt from whom. Nobody, where it is computed by one that is told nothing, is to stay as it
        came, or is several prompts."""
        if not isinstance(asker, Exchange) or asker.stays_whole or asker.is_continued:
            return []
        prompt = asker.prompt
        if prompt is None or prompt.several or prompt.copies != 1:
            return []
        return self.peers_for(prompt)

    def peers_for(self, prompt: Prompt) -> list[Candidate]:
        return [one.candidate for one in self._peers if self._may_take(one, prompt)]

    def _may_take(self, backend: Backend, prompt: Prompt) -> bool:
        how = backend.replica.dialect.peer_pull
        if backend.replica.cached_tokens is False:  # whether a pull came it would not tell
            return False
        return how is not None and prompt.path in PATHS and backend.replica.takes_rank(prompt.path)

    def body(self, exchange: Exchange, placement: Placement) -> bytes | None:
        """What its replica is sent. None: the client's own body, and nothing is pulled."""
        pull = placement.pull
        assert pull is not None
        source = self._backends.get(pull.source)
        how = self._backends[placement.candidate.replica].replica.dialect.peer_pull
        told = None
        if source is not None and source.replica.peer and how is not None:
            told = how.body(exchange.request.body, source.replica.peer, token_hex(12))
        if told is None:  # it left meanwhile, or the request is another gateway's leg
            self._router.drop_pull(placement)
        return told

    def failed(self, exchange: Exchange, attempt: Attempt, kind: str) -> None:
        """The attempt failed before its answer. If that may be the transfer's fault the pair is left out for a while,
        and the request asked again without a pull."""
        pull = attempt.placement.pull
        if pull is not None and kind in PULL_FAILED:
            exchange.stays_whole = True
            self._metrics.peer_pulls.inc(attempt.backend.id, "failed")
            self._router.pulls.failed(pull.source, attempt.placement.candidate.replica, monotonic())


def ended(router: Router, metrics: Metrics, placement: Placement, cached: int) -> bool:
    """A replica that was to pull found so many prompt tokens in all; whether what it was to pull came."""
    came = router.pulled(placement, cached, monotonic())
    metrics.peer_pulls.inc(placement.candidate.replica, "complete" if came else "missed")
    return came

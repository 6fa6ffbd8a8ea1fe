"""Pulls: a replica fetches the KV cache of a prompt's beginning from another replica's memory, instead of computing it.

This module finds the replicas that can do so, has the request's body written, and records the outcome. `policies.pulls`
predicts the seconds of a pull and decides when one is worth these, and the engine's dialect writes the body
(`EngineDialect.peer_pull`). The URL of each replica that takes part names the address at which others reach its memory
(`#peer=HOST:PORT`). With fewer than two such replicas nothing here is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING

from policies import Candidate, Placement, Router
from replicas import TAKES_TRAFFIC
from replicas.engines.transfer import PATHS

from ..backend import Backend
from ..exchange import Attempt, Exchange
from ..failures.retries import PULL_FAILED
from .askers import Asker

if TYPE_CHECKING:
    from ...ops.metrics import Metrics
    from ...prompt import Prompt


class Pulls:
    """The replicas that can pull the KV cache of prompt prefixes from each other."""

    def __init__(self, backends: Mapping[str, Backend], router: Router, metrics: Metrics):
        self._backends, self._router, self._metrics = backends, router, metrics
        self.any = False  # whether at least two replicas can pull
        self._peers: list[Backend] = []

    def changed(self) -> None:
        """Update the list of replicas that can pull caches from each other, after replicas or their states changed."""
        self._peers = [
            one
            for one in self._backends.values()
            if one.replica.peer and one.replica.dialect.peer_pull is not None and one.replica.state in TAKES_TRAFFIC
        ]
        self.any = len(self._peers) > 1

    def peers(self, asker: Asker) -> list[Candidate]:
        """Return the replicas that may pull the cache of a request's prompt from each other, as candidates.

        There are none for a request whose `stays_whole` is set, for example because it resumes a stream or because
        another proxy forwards it.
        """
        return [] if asker.stays_whole or asker.prompt is None else self.peers_for(asker.prompt)

    def peers_for(self, prompt: Prompt) -> list[Candidate]:
        """Return the candidates that may pull the cache of this prompt from each other."""
        if prompt.several or prompt.copies != 1:
            return []
        return [one.candidate for one in self._peers if self._may_take(one, prompt)]

    def _may_take(self, backend: Backend, prompt: Prompt) -> bool:
        how = backend.replica.dialect.peer_pull
        if backend.replica.cached_tokens is False:  # it would not report whether a pull succeeded
            return False
        return how is not None and prompt.path in PATHS and backend.replica.takes_rank(prompt.path)

    def body(self, exchange: Asker, placement: Placement) -> bytes | None:
        """Return the request body that makes a replica pull, or None if it cannot pull and gets the client's body.

        In the second case the placement's reserved load is raised by the tokens that have to be computed instead.
        """
        pull = placement.pull
        assert pull is not None
        source = self._backends.get(pull.source)
        how = self._backends[placement.candidate.replica].replica.dialect.peer_pull
        told = None
        if source is not None and source.replica.peer and how is not None:
            told = how(exchange.request.body, source.replica.peer, token_hex(12))
        if told is None:  # the peer left meanwhile, or the request is a leg of another gateway
            self._router.drop_pull(placement)
        return told

    def failed(self, exchange: Exchange, attempt: Attempt, kind: str) -> None:
        """Handle the failure of an attempt before its first byte, if a pull may have caused it.

        The request is then repeated without a pull. The two replicas, the puller and the one that has the cache of the
        prompt's beginning, are not used for pulls together for a while.

        `kind`: the kind of failure.
        """
        pull = attempt.placement.pull
        if pull is not None and kind in PULL_FAILED:
            exchange.stay_whole()
            self._metrics.peer_pulls.inc(attempt.backend.id, "failed")
            self._router.pulls.failed(pull.source, attempt.placement.candidate.replica, monotonic())


def ended(router: Router, metrics: Metrics, placement: Placement, cached: int) -> bool:
    """Record the outcome of a pull after a complete answer; return whether all of the pulled tokens came.

    `cached`: all prompt tokens that the engine found cached, those of the pull included.
    """
    came = router.pulled(placement, cached, monotonic())
    metrics.peer_pulls.inc(placement.candidate.replica, "complete" if came else "missed")
    return came

"""Whose fault it is that an answer is an error: the replica's, or the request's.

One answer cannot tell. An engine answers 500 when its core is dead, and also to a chat template of the client's that
raises. The next replica's answer tells:

  it answers the request                 the first replica failed by its own fault, and that counts against it
  it refuses the request (400, 413, 422) the request is at fault
  it fails the request in the same way   the request is at fault, so it counts against neither and no third is asked

So it is with 401, 403 and 404: a client's key or model may be wrong, and the replica's own may be. A replica that
refuses all it is asked within a millisecond would else look idle and get everything.

A replica that is full (429 and 503) says nothing of the request, so two that are full agree on nothing, and it is not
ill. It is asked last for as long as its `Retry-After` says (`Backend.full_until`).

Where nobody else could be asked, nothing is known, and nothing counts against the replica. Each such failure is told
to the replica's watcher, which asks the engine something of its own after a few (`replicas.health`, rule 6).

Two engines that are both broken agree as well. So an engine that has failed MOST_AGREED requests in a row is no
witness: what it fails is tried on a third replica, until it has answered something again.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_AGREED = 3
REFUSALS = frozenset((400, 413, 422))
# Failures that an engine answers with. Other 5xx come from a proxy before it, or mean that it is full.
SAME = frozenset(("status 500", "error answer"))
DOUBTFUL = frozenset((401, 403, 404, 429))
OVERLOADED = frozenset(("status 429", "status 503"))
REQUEST = "request"  # the kind of an error that is known to be the request's fault
# Refusals of engines that clients get since no other replica answered, by status: their `reason` in figures and log.
PASSED_ON = {429: "engines_full", 401: "engines_unauthorized", 403: "engines_unauthorized"}
REFUSED_ALIKE = frozenset(f"status {status}" for status in DOUBTFUL) - OVERLOADED


class UnattributedError(NamedTuple):
    """One answer that was an error. Ranks of one `engine` are one witness. `witness`: whether its word counts."""

    replica: str
    engine: str
    kind: str
    witness: bool


class Record:
    """What one replica has done of late. `failures`: requests in a row that it has failed; whoever sees it answer one
    sets that to 0."""

    __slots__ = ("failures",)

    def __init__(self) -> None:
        self.failures = 0

    @property
    def is_witness(self) -> bool:
        return self.failures < MOST_AGREED


def agree(unattributed_errors: Sequence[UnattributedError]) -> bool:
    """Whether the last one says of the request what another engine has said."""
    *before, last = unattributed_errors
    return any(one.engine != last.engine and _alike(one.kind, last.kind) for one in before)


def _alike(one: str, other: str) -> bool:
    return (one in SAME and other in SAME) or (one in REFUSED_ALIKE and one == other)


def settled(unattributed_errors: Sequence[UnattributedError]) -> bool:
    """Whether no third replica has to be asked: two witnesses agree."""
    return unattributed_errors[-1].witness and agree(
        [*(one for one in unattributed_errors[:-1] if one.witness), unattributed_errors[-1]]
    )

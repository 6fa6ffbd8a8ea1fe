"""The rules by which an error answer is attributed to the replica or to the request; pure functions.

One error answer does not show whose fault it is: an engine answers 500 when its core is dead, and also if a client's
chat template raises. What the next replica does decides:

  it answers the request                   the first replica is at fault, and the error counts against it
  it refuses the request (400, 413, 422)   the request is at fault
  it fails the request in the same way     the request is at fault: neither replica is blamed, and no third is tried

These rules also hold for 401, 403 and 404: the client's key or model may be wrong, or the replica's own configuration.
Otherwise a replica that refuses every request within a millisecond would look idle and get all of them.

A full replica (429, 503) is not unhealthy, and its error says nothing about the request: two full replicas do not show
that the request is at fault. A full replica is tried last for the time in its `Retry-After` (`Backend.full_until`).

If no other replica could be tried, nobody is blamed. Each such failure is reported to the replica's watcher, which
sends the engine a test request after a few of them (`replicas.health`, rule 6).

Two broken engines also fail a request in the same way. So an engine that has failed MOST_AGREED requests in a row is
not accepted as a witness: requests that it fails are tried on a third replica, until it has answered a request again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_AGREED = 3
REFUSALS = frozenset((400, 413, 422))
# Kinds of errors that an engine itself writes, and that count as the same one. Other 5xx come from a proxy in front of
# the engine, or mean that the engine is full.
SAME = frozenset(("status 500", "error answer"))
DOUBTFUL = frozenset((401, 403, 404, 429))  # refusals that may be due to the replica's configuration or its load
OVERLOADED = frozenset(("status 429", "status 503"))
REQUEST = "request"  # the kind of an error that is known to be the request's fault
# Status -> `reason` in metrics and logs, for engines' refusals that clients get since no other replica answered.
PASSED_ON = {429: "engines_full", 401: "engines_unauthorized", 403: "engines_unauthorized"}
REFUSED_ALIKE = frozenset(f"status {status}" for status in DOUBTFUL) - OVERLOADED


class UnattributedError(NamedTuple):
    """An error answer for which it is not known yet whether the replica or the request is at fault.

    `engine`: the process that answered; several replicas, its data-parallel ranks, may be of one engine. `kind`: the
    kind of failure, a key of `retries.KINDS`. `witness`: whether the error counts as evidence that the request is at
    fault. It does not if the engine has failed several requests in a row, or if a decoder may only have failed to fetch
    the prompt's KV cache.
    """

    replica: str
    engine: str
    kind: str
    witness: bool


def agree(unattributed_errors: Sequence[UnattributedError]) -> bool:
    """Return whether the last of these errors agrees with an earlier one of another engine.

    Errors agree if both are of the engine's own making (500, or an error in a 200), or both are the same 401, 403 or
    404.
    """
    *before, last = unattributed_errors
    return any(one.engine != last.engine and _alike(one.kind, last.kind) for one in before)


def _alike(one: str, other: str) -> bool:
    return (one in SAME and other in SAME) or (one in REFUSED_ALIKE and one == other)


def request_at_fault(unattributed_errors: Sequence[UnattributedError]) -> bool:
    """Return whether the request itself is at fault, because two engines failed it alike; no third is tried then.

    Errors of engines that have failed several requests in a row do not count (`UnattributedError.witness`).
    """
    return unattributed_errors[-1].witness and agree(
        [*(one for one in unattributed_errors[:-1] if one.witness), unattributed_errors[-1]]
    )

"""Finds the replicas that take longer per output token than the others of their model, by their answers.

Routing learns of such a replica within a few answers and then avoids it, but tries it again every few seconds. A small
share of requests therefore keeps taking many times as long, and no mean over all replicas shows that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

TIMES = 3.0  # a replica is slow if it takes this many times as long, which is more than batch sizes explain
LEAST_TOKENS = 64.0  # tokens that a replica must write within a window: with fewer, one odd answer would decide


class Slow(NamedTuple):
    """A replica that is slow compared with the other replicas of its model.

    `each`: its seconds per output token. `others`: the median of the others. `times`: the first divided by the second.
    `since`: when it became slow, in seconds of the wall clock.
    """

    times: float
    each: float
    others: float
    since: float


class Pace:
    """The comparison of replicas' speeds. `look` compares them; `slow` has the replicas that are slow now, by id."""

    def __init__(self) -> None:
        self.slow: dict[str, Slow] = {}

    def look(
        self, now: float, groups: Collection[Collection[str]], windows: Collection[Mapping[str, tuple[float, float]]]
    ) -> list[str]:
        """Compare the replicas of each group with each other, and return those that were slow and no longer are.

        `now`: the wall clock, in seconds. `groups`: the ids of replicas that serve the same models. `windows`: for
        several windows of time, the shortest first, each replica's output tokens and the seconds that they took. A
        replica is judged by the first window in which it wrote enough. If it wrote too little in all of them, its last
        verdict stays.
        """
        found: dict[str, Slow] = {}
        recovered = []
        for group in groups:
            paces = {id: one for id in group if (one := _judged(id, windows)) is not None}
            for id in group:
                if id in self.slow and (id not in paces or len(paces) < 2):
                    found[id] = self.slow[id]
            ranked = sorted(paces, key=paces.__getitem__)
            middle = (len(ranked) - 2) // 2  # the median of the others, the lower one of two
            for place, id in enumerate(ranked if len(ranked) > 1 else ()):
                known, others = self.slow.get(id), paces[ranked[middle + (place <= middle)]]
                if paces[id] >= TIMES * others:
                    since = known.since if known is not None else now
                    found[id] = Slow(paces[id] / others, paces[id], others, since)
                elif known is not None:
                    recovered.append(id)
        self.slow = found
        return recovered


def _judged(id: str, windows: Collection[Mapping[str, tuple[float, float]]]) -> float | None:
    """Return how many seconds a replica takes per output token, or None if it wrote too little to tell."""
    for window in windows:
        tokens, seconds = window.get(id, (0.0, 0.0))
        if tokens >= LEAST_TOKENS and seconds > 0:
            return seconds / tokens
    return None


def status(slow: Slow | None, now: float) -> dict[str, Any] | None:
    """Return what a replica's entry in a status says about its slowness, or None if it is not slow.

    Its `text` is a sentence whose subject is the replica's name. `now`: the wall clock, in seconds.
    """
    if slow is None:
        return None
    seconds = max(0.0, now - slow.since)
    span = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return {
        "times": round(slow.times, 2),
        "seconds_per_token": round(slow.each, 6),
        "others_seconds_per_token": round(slow.others, 6),
        "for_seconds": round(seconds, 1),
        "text": f"takes {times(slow)} as long per token as the others for {span} ({1e3 * slow.each:.1f} ms, others "
        f"{1e3 * slow.others:.1f} ms): look at what else runs on its machine and at its clocks, or drain it",
    }


def times(slow: Slow) -> str:
    return f"{slow.times:.0f} x"

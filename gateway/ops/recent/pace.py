"""The replicas that write slower than the others of their model, judged by the answers that they delivered.

Routing learns of such a replica within a few answers and then avoids it, but tries it again every few seconds. So a
small share of requests keeps taking many times as long, and no mean over the fleet shows that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

TIMES = 3.0  # a replica is slow if it takes so many times as long: more than different batch sizes explain
LEAST_TOKENS = 64.0  # tokens that a replica must write within a window: with fewer, one odd answer would decide


class Slow(NamedTuple):
    """A replica that is slow: how many times as long as the others it takes per token, and since when.

    `each`, `others`: seconds per token of this replica and of the others; `since`: the wall clock's time.
    """

    times: float
    each: float
    others: float
    since: float


class Pace:
    """The comparison of replicas: call `look` with what each one wrote; `slow` has those that are slow now."""

    def __init__(self) -> None:
        self.slow: dict[str, Slow] = {}

    def look(
        self, now: float, groups: Collection[Collection[str]], windows: Collection[Mapping[str, tuple[float, float]]]
    ) -> list[str]:
        """Compare the replicas of each group with each other, and return those that were slow and no longer are.

        `windows`: by replica the tokens that it wrote and the seconds that they took, the shortest window first. Each
        replica is judged by the first window in which it wrote enough; a replica that wrote too little in all of them
        keeps its last verdict while it is in a group.
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
    """Return how many seconds a replica takes per token, or None if it wrote too little to tell."""
    for window in windows:
        tokens, seconds = window.get(id, (0.0, 0.0))
        if tokens >= LEAST_TOKENS and seconds > 0:
            return seconds / tokens
    return None


def status(slow: Slow | None, now: float) -> dict[str, Any] | None:
    """Return the entry of a replica's status about its slowness, with a sentence to follow the replica's name."""
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

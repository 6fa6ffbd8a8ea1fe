"""The growth of the counters in the last 15 minutes, in slots of 5 s for the gateway and of 20 s for each replica.

Requests pay nothing for it: once a second the counters are looked at, and their growth since the last look is added to
the present slot. Slots begin at whole multiples of the wall clock, so that the slots of several workers can be added
up. They take 102 kB for the gateway, and 26 kB for each replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from policies.admission import REFUSED

from ..gains import Gains
from ..metrics import Metrics, quantile

SLOT, SLOTS = 5, 180  # seconds of a slot, and how many slots: 15 minutes
REPLICA_SLOT, REPLICA_SLOTS = 20, 45  # the same for the slots of each replica
MINUTE = 60  # seconds: the window shown first
PIECE = 64  # series added between two yields
POINT = 3  # slots per point of a curve
ERRORS = ("5xx", "cut")
# Reasons of refusals that the page has a line for, and the column of each. 401: a key unknown to the gateway.
REJECTED = {"engines_full": "full", "engines_unauthorized": "unauthorized", "401": "keyless"}

_BOUNDS = Metrics.ttft_seconds.bounds  # the bounds of all three histograms that are read
_BUCKETS = len(_BOUNDS) + 2  # with the count above the last bound, and the sum
TTFT, E2E = slice(0, _BUCKETS), slice(_BUCKETS, 2 * _BUCKETS)
# Columns with sums over a slot, then columns with the greatest value within it.
SUMS = (
    "requests",
    "errors",
    "aborted",
    "rejected",
    "prompt",
    "predicted",
    "reported_prompt",
    "reported_cached",
    "refused",
    *REJECTED.values(),
    "answered",  # complete answers of a replica, and their times
    "answer_seconds",
    "decode_seconds",
    "decode_tokens",
)
PEAKS = ("inflight", "queued", "waiting")
AT = {name: 2 * _BUCKETS + place for place, name in enumerate((*SUMS, *PEAKS))}
_COUNTS = ("requests", "errors", "aborted", "rejected", "refused", *REJECTED.values(), *PEAKS)
WIDTH = 2 * _BUCKETS + len(AT)
_ADDED = 2 * _BUCKETS + len(SUMS)  # columns that are added up; the others are peaks

Row = Sequence[float]


class Figures:
    """The slots of one process. Call `look` once a second with the wall clock's time."""

    def __init__(self, metrics: Metrics, now: float) -> None:
        self._metrics = metrics
        self._rows = np.zeros((SLOTS, WIDTH))
        self._replicas: dict[str, np.ndarray] = {}
        self._slot, self._replica_slot = int(now // SLOT), int(now // REPLICA_SLOT)
        self._gains = {name: Gains() for name in {**_OF_GATEWAY, **_OF_REPLICA}}
        self.since = now

    def look(self, now: float, inflight: int, queued: int, waiting: int) -> None:
        """Add what the counters grew by since the last look.

        `inflight`, `queued`, `waiting`: requests sent and not ended, in the gateway's queue, and in engines' queues.
        """
        for _ in self.pieces(now, inflight, queued, waiting):
            pass

    def pieces(self, now: float, inflight: int, queued: int, waiting: int) -> Iterator[None]:
        """Do as `look`, but yield after every PIECE series, as 1,024 busy replicas take 20 to 40 ms in all."""
        self._turn(now)
        done = 0
        row = self._rows[self._slot % SLOTS]
        for name, gains in self._gains.items():
            of_gateway, of_replica = _OF_GATEWAY.get(name), _OF_REPLICA.get(name)
            for key, gain in gains.look(getattr(self._metrics, name)):
                labels = (key,) if isinstance(key, str) else key
                if of_gateway is not None:
                    for place in of_gateway(labels):
                        row[place] += gain
                if of_replica is not None:
                    own = self._of(labels[0])
                    for place in of_replica(labels):
                        own[place] += gain
                done += 1
                if done % PIECE == 0:
                    yield
        for name, value in zip(PEAKS, (inflight, queued, waiting), strict=True):
            row[AT[name]] = max(row[AT[name]], value)

    def _turn(self, now: float) -> None:
        """Clear the slots that have begun since the last look."""
        slot, replica_slot = int(now // SLOT), int(now // REPLICA_SLOT)
        for one in range(max(self._slot + 1, slot - SLOTS + 1), slot + 1):
            self._rows[one % SLOTS] = 0.0
        for one in range(max(self._replica_slot + 1, replica_slot - REPLICA_SLOTS + 1), replica_slot + 1):
            for rows in self._replicas.values():
                rows[one % REPLICA_SLOTS] = 0.0
        self._slot, self._replica_slot = max(self._slot, slot), max(self._replica_slot, replica_slot)

    def _of(self, replica: str) -> np.ndarray:
        rows = self._replicas.get(replica)
        if rows is None:
            rows = self._replicas[replica] = np.zeros((REPLICA_SLOTS, WIDTH))
        found: np.ndarray = rows[self._replica_slot % REPLICA_SLOTS]
        return found

    def forget(self, replica: str) -> None:
        self._replicas.pop(replica, None)

    def kept(self) -> dict[str, Any]:
        """Return the data for `told`, perhaps in another process: slots by number, sums by replica."""
        first = self._slot - SLOTS + 1
        rows = {slot: self._rows[slot % SLOTS] for slot in range(first, self._slot + 1)}
        return {
            "since": self.since,
            "slot": self._slot,
            "rows": {str(slot): row.tolist() for slot, row in rows.items() if row.any()},
            "replicas": {id: rows.sum(axis=0).tolist() for id, rows in self._replicas.items()},
            "replicas_minute": {id: rows.tolist() for id, rows in self._latest(MINUTE).items()},
        }

    def _latest(self, seconds: int) -> dict[str, np.ndarray]:
        """Return the sums over the last `seconds`, by replica."""
        first = self._replica_slot - seconds // REPLICA_SLOT + 1
        places = [slot % REPLICA_SLOTS for slot in range(first, self._replica_slot + 1)]
        return {id: rows[places].sum(axis=0) for id, rows in self._replicas.items()}

    def written(self, seconds: int) -> dict[str, tuple[float, float]]:
        """Return by replica how many tokens after the first ones it wrote in the last `seconds`, and their time."""
        rows = self._latest(seconds)
        return {id: (float(row[AT["decode_tokens"]]), float(row[AT["decode_seconds"]])) for id, row in rows.items()}


Columns = list[int | slice]


def _by_status(labels: tuple[str, ...]) -> Columns:
    """Return the columns of a request that ended with this status, the last of its labels."""
    status = labels[-1]
    kinds = {"errors": status in ERRORS, "aborted": status == "aborted", "rejected": status == "4xx"}
    return [AT["requests"], *(AT[name] for name, is_so in kinds.items() if is_so)]


def _always(*columns: int | slice) -> Callable[[tuple[str, ...]], Columns]:
    found = [*columns]
    return lambda labels: found


# Metrics, and the columns to which their growth is added. The first label of a replica's metric is the replica's id.
_TOKENS: dict[str, Callable[[tuple[str, ...]], Columns]] = {
    "prompt_tokens": _always(AT["prompt"]),
    "predicted_cached_tokens": _always(AT["predicted"]),
    "reported_prompt_tokens": _always(AT["reported_prompt"]),
    "reported_cached_tokens": _always(AT["reported_cached"]),
}
_OF_GATEWAY = {
    **_TOKENS,
    "ttft_seconds": _always(TTFT),
    "request_seconds": _always(E2E),
    "requests": _by_status,
    "admission": lambda labels: [AT["refused"]] if labels[0] == REFUSED else [],
    "rejections": lambda labels: [AT[REJECTED[labels[0]]]] if labels[0] in REJECTED else [],
}
_OF_REPLICA = {
    **_TOKENS,
    "replica_ttft_seconds": _always(
        TTFT
    ),  # its own time only, without the gateway's queue and failed attempts elsewhere
    "replica_requests": lambda labels: [*_by_status(labels), *([AT["answered"]] if labels[-1] == "2xx" else [])],
    "replica_answer_seconds": _always(AT["answer_seconds"]),
    "replica_decode_seconds": _always(AT["decode_seconds"]),
    "replica_decode_tokens": _always(AT["decode_tokens"]),
}


# --- from what is kept to what is shown


def merged(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the data that several workers kept."""
    return {
        "since": min(one["since"] for one in several),
        "slot": max(one["slot"] for one in several),
        "rows": _added(one["rows"] for one in several),
        "replicas": _added(one["replicas"] for one in several),
        "replicas_minute": _added(one["replicas_minute"] for one in several),
    }


def _added(each: Iterable[Mapping[str, Row]]) -> dict[str, Row]:
    sums: dict[str, Row] = {}
    for one in each:
        for key, row in one.items():
            sums[key] = [a + b for a, b in zip(sums[key], row, strict=True)] if key in sums else row
    return sums


def told(kept: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return what is shown of the data that `kept` returned, at the wall clock's time `now`.

    These are figures of the last minute and of the whole window, for the gateway and each replica, and curves. None
    stands for a figure of which nothing was observed.
    """
    rows = np.zeros((SLOTS, WIDTH))
    for slot, row in kept["rows"].items():
        if 0 <= (place := int(slot) - kept["slot"] + SLOTS - 1) < SLOTS:
            rows[place] = row
    points = rows.reshape(SLOTS // POINT, POINT, WIDTH)
    curve = np.concatenate([points[:, :, :_ADDED].sum(axis=1), points[:, :, _ADDED:].max(axis=1)], axis=1)
    seen = max(0.0, min(float(SLOT * SLOTS), now - kept["since"]))
    return {
        "seconds": round(seen, 1),
        "window_seconds": SLOT * SLOTS,
        "whole": _summed(rows),
        "minute_seconds": min(seen, float(MINUTE)),
        "minute": _summed(rows[-MINUTE // SLOT :]),
        "point_seconds": SLOT * POINT,
        "curves": _turned([_told(row) for row in curve]),
        "replicas": {id: _told(np.array(row)) for id, row in kept["replicas"].items()},
        "replicas_minute": {id: _told(np.array(row)) for id, row in kept["replicas_minute"].items()},
    }


def _summed(rows: np.ndarray) -> dict[str, float | None]:
    return _told(np.concatenate([rows[:, :_ADDED].sum(axis=0), rows[:, _ADDED:].max(axis=0)]))


def _told(row: np.ndarray) -> dict[str, float | None]:
    return {
        "ttft_p50": _quantile(row[TTFT], 0.5),
        "ttft_p99": _quantile(row[TTFT], 0.99),
        "e2e_p50": _quantile(row[E2E], 0.5),
        "e2e_p99": _quantile(row[E2E], 0.99),
        "hit_predicted": _share(row, "predicted", "prompt"),
        "hit_reported": _share(row, "reported_cached", "reported_prompt"),
        "answer_mean": _share(row, "answer_seconds", "answered"),
        "tpot": _share(row, "decode_seconds", "decode_tokens"),
        **{name: float(row[AT[name]]) for name in _COUNTS},
    }


def _turned(rows: Sequence[Mapping[str, float | None]]) -> dict[str, list[float | None]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _share(row: np.ndarray, part: str, whole: str) -> float | None:
    return float(row[AT[part]] / row[AT[whole]]) if row[AT[whole]] else None


def _quantile(counts: np.ndarray, share: float) -> float | None:
    return quantile(_BOUNDS, counts[:-1].tolist(), share)

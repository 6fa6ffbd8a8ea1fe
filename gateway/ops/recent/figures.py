"""The growth of the metrics' counters in the last 15 minutes, by time slot, for the live page.

A slot is 5 s long for the whole gateway, and 20 s for each replica. Requests do no work for these figures: once a
second the counters are read, and their growth since the last reading is added to the present slot. Slots begin at whole
multiples of their length on the wall clock, so that the slots of several workers can be added up. They take 102 kB for
the gateway, and 26 kB for each replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from policies.admission import REFUSED

from ..gains import Gains
from ..metrics import Metrics, quantile

SLOT, SLOTS = 5, 180  # seconds of a slot, and how many slots: 15 minutes
REPLICA_SLOT, REPLICA_SLOTS = 20, 45  # the same for the slots of each replica
MINUTE = 60  # seconds: the window shown first
PIECE = 64  # series of metrics whose growth is added between two yields
POINT = 3  # slots that are combined to a point of a curve
ERRORS = ("5xx", "cut")
# The reasons of refusals that the page shows on a line of their own, and each one's column. 401: an unknown API key.
REJECTED = {"engines_full": "full", "engines_unauthorized": "unauthorized", "401": "keyless"}

_BOUNDS = Metrics.ttft_seconds.bounds  # the bounds of all three histograms that are read
_BUCKETS = len(_BOUNDS) + 2  # with the count above the last bound, and the sum
TTFT, E2E = slice(0, _BUCKETS), slice(_BUCKETS, 2 * _BUCKETS)
# Columns with sums over a slot, then columns with the greatest value within it. The last four sums are of the complete
# answers of a replica.
_REQUESTS = ("requests", "errors", "aborted", "rejected", "refused", *REJECTED.values())
_TOKENS = ("prompt", "predicted", "reported_prompt", "reported_cached")
SUMS = (*_REQUESTS, *_TOKENS, "answered", "answer_seconds", "decode_seconds", "decode_tokens")
PEAKS = ("inflight", "queued", "waiting")
AT = {name: 2 * _BUCKETS + place for place, name in enumerate((*SUMS, *PEAKS))}
WIDTH = 2 * _BUCKETS + len(AT)
_ADDED = 2 * _BUCKETS + len(SUMS)  # columns that are added up; the others are peaks

# By metric, the column to which its growth is added; None: it depends on the labels (`_columns`). Metrics that begin
# with `replica_` are added to the replica's rows; their TTFT is without the gateway's queue and failed attempts at
# other replicas. Others that end with `_tokens` are added to the rows of both the gateway and the replica, the rest to
# the gateway's. The first label of a replica's metric is the replica's id.
_COLUMN: dict[str, int | slice | None] = {
    "prompt_tokens": AT["prompt"],
    "predicted_cached_tokens": AT["predicted"],
    "reported_prompt_tokens": AT["reported_prompt"],
    "reported_cached_tokens": AT["reported_cached"],
    "ttft_seconds": TTFT,
    "request_seconds": E2E,
    "requests": None,
    "admission": None,
    "rejections": None,
    "replica_ttft_seconds": TTFT,
    "replica_requests": None,
    "replica_answer_seconds": AT["answer_seconds"],
    "replica_decode_seconds": AT["decode_seconds"],
    "replica_decode_tokens": AT["decode_tokens"],
}

Row = Sequence[float]


def _columns(name: str, labels: tuple[str, ...]) -> list[int | slice]:
    """Return the columns of a row to which the growth of a series is added.

    Used for metrics whose series go to different columns by their labels, such as the status of a request. `name`: the
    metric. `labels`: the values of the series' labels.
    """
    if name == "admission":
        return [AT["refused"]] if labels[0] == REFUSED else []
    if name == "rejections":
        return [AT[REJECTED[labels[0]]]] if labels[0] in REJECTED else []
    status = labels[-1]
    kinds = {"errors": status in ERRORS, "aborted": status == "aborted", "rejected": status == "4xx"}
    kinds["answered"] = status == "2xx" and name == "replica_requests"
    return [AT["requests"], *(AT[kind] for kind, is_so in kinds.items() if is_so)]


class Slots:
    """A table of figures with a row for each of the last `count` time slots, each of which lasts `seconds`.

    The row of a new time slot takes the place of the oldest row.
    """

    def __init__(self, seconds: int, count: int) -> None:
        self.seconds, self.count = seconds, count
        self.rows, self.numbers = np.zeros((count, WIDTH)), np.full(count, -1)

    def row(self, now: float) -> np.ndarray:
        """Return the row of the time slot that contains `now`; a new slot's row is all zeros.

        `now`: the wall clock, in seconds.
        """
        number = int(now // self.seconds)
        at = number % self.count
        if self.numbers[at] < number:
            self.numbers[at], self.rows[at] = number, 0.0
        found: np.ndarray = self.rows[at]
        return found

    def last(self, now: float, seconds: int) -> np.ndarray:
        """Return a boolean array: for each row, whether its time slot is within the last `seconds`.

        `now`: the wall clock, in seconds.
        """
        found: np.ndarray = self.numbers > int(now // self.seconds) - seconds // self.seconds
        return found

    def sum(self, now: float, seconds: int) -> np.ndarray:
        """Return the sum of the rows whose time slots are within the last `seconds`."""
        found: np.ndarray = self.rows[self.last(now, seconds)].sum(axis=0)
        return found


class Figures:
    """The figures of one process by time slot. Call `look` once a second with the wall clock's time."""

    def __init__(self, metrics: Metrics, now: float) -> None:
        self._metrics = metrics
        self._slots, self._replicas = Slots(SLOT, SLOTS), dict[str, Slots]()
        self._gains = {name: Gains() for name in _COLUMN}
        self.since = self._now = now

    def look(self, now: float, inflight: int, queued: int, waiting: int) -> None:
        """Add the growth of the counters since the last look to the present time slot.

        `now`: the wall clock, in seconds.
        `inflight`: the number of requests that are sent to replicas and have not ended.
        `queued`: the number that wait in the gateway's queue.
        `waiting`: the number that wait in engines' queues.
        """
        for _ in self.pieces(now, inflight, queued, waiting):
            pass

    def pieces(self, now: float, inflight: int, queued: int, waiting: int) -> Iterator[None]:
        """Do the work of `look`, with the same arguments, in pieces, with a yield after every PIECE series.

        In all it takes 20 to 40 ms with 1,024 busy replicas, so the caller lets the event loop run in between.
        """
        self._now, done = now, 0
        row = self._slots.row(now)
        for name, gains in self._gains.items():
            column = _COLUMN[name]
            for labels, gain in gains.look(getattr(self._metrics, name)):
                rows = [] if name.startswith("replica_") else [row]
                if not rows or name.endswith("_tokens"):
                    rows.append(self._replicas.setdefault(labels[0], Slots(REPLICA_SLOT, REPLICA_SLOTS)).row(now))
                for place in _columns(name, labels) if column is None else (column,):
                    for one in rows:
                        one[place] += gain
                done += 1
                if done % PIECE == 0:
                    yield
        for name, value in zip(PEAKS, (inflight, queued, waiting), strict=True):
            row[AT[name]] = max(row[AT[name]], value)

    def forget(self, replica: str) -> None:
        self._replicas.pop(replica, None)

    def kept(self) -> dict[str, Any]:
        """Return the figures as JSON data, for `told`, which may run in another process.

        They are rows by time slot for the gateway, and sums for each replica.
        """
        now, slots = self._now, self._slots
        known = slots.last(now, SLOT * SLOTS) & slots.rows.any(axis=1)
        rows = zip(slots.numbers[known].tolist(), slots.rows[known].tolist(), strict=True)
        return {
            "since": self.since,
            "slot": int(now // SLOT),
            "rows": {str(number): row for number, row in rows},
            "replicas": {id: one.sum(now, SLOT * SLOTS).tolist() for id, one in self._replicas.items()},
            "replicas_minute": {id: one.sum(now, MINUTE).tolist() for id, one in self._replicas.items()},
        }

    def written(self, seconds: int) -> dict[str, tuple[float, float]]:
        """Return, by replica, the output tokens of the last `seconds`, and the seconds of decoding that they took.

        The first token of each answer is left out, since prefill makes it.
        """
        sums = {id: one.sum(self._now, seconds) for id, one in self._replicas.items()}
        return {id: (float(row[AT["decode_tokens"]]), float(row[AT["decode_seconds"]])) for id, row in sums.items()}


# --- from what is kept to what is shown


def merged(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the figures of several workers (`Figures.kept`), and return them in the same form."""
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
    """Return the figures that the live page shows, from the data of `Figures.kept`.

    They cover the last minute and the whole 15 minutes, for the gateway and for each replica, and have curves over
    time. None stands for a figure without observations. `now`: the wall clock, in seconds.
    """
    rows = np.zeros((SLOTS, WIDTH))
    for slot, row in kept["rows"].items():
        if 0 <= (place := int(slot) - kept["slot"] + SLOTS - 1) < SLOTS:
            rows[place] = row
    points = rows.reshape(SLOTS // POINT, POINT, WIDTH)
    curve = np.concatenate([points[:, :, :_ADDED].sum(axis=1), points[:, :, _ADDED:].max(axis=1)], axis=1)
    curves = [_told(row) for row in curve]
    seen = max(0.0, min(float(SLOT * SLOTS), now - kept["since"]))
    return {
        "seconds": round(seen, 1),
        "window_seconds": SLOT * SLOTS,
        "whole": _summed(rows),
        "minute_seconds": min(seen, float(MINUTE)),
        "minute": _summed(rows[-MINUTE // SLOT :]),
        "point_seconds": SLOT * POINT,
        "curves": {name: [point[name] for point in curves] for name in curves[0]},
        "replicas": {id: _told(np.array(row)) for id, row in kept["replicas"].items()},
        "replicas_minute": {id: _told(np.array(row)) for id, row in kept["replicas_minute"].items()},
    }


def _summed(rows: np.ndarray) -> dict[str, float | None]:
    return _told(np.concatenate([rows[:, :_ADDED].sum(axis=0), rows[:, _ADDED:].max(axis=0)]))


def _told(row: np.ndarray) -> dict[str, float | None]:
    return {
        "ttft_p50": quantile(_BOUNDS, row[TTFT][:-1].tolist(), 0.5),
        "ttft_p99": quantile(_BOUNDS, row[TTFT][:-1].tolist(), 0.99),
        "e2e_p50": quantile(_BOUNDS, row[E2E][:-1].tolist(), 0.5),
        "e2e_p99": quantile(_BOUNDS, row[E2E][:-1].tolist(), 0.99),
        "hit_predicted": _share(row, "predicted", "prompt"),
        "hit_reported": _share(row, "reported_cached", "reported_prompt"),
        "answer_mean": _share(row, "answer_seconds", "answered"),
        "tpot": _share(row, "decode_seconds", "decode_tokens"),
        **{name: float(row[AT[name]]) for name in (*_REQUESTS, *PEAKS)},
    }


def _share(row: np.ndarray, part: str, whole: str) -> float | None:
    return float(row[AT[part]] / row[AT[whole]]) if row[AT[whole]] else None

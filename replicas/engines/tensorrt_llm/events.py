"""TensorRT-LLM's cache events, fetched over HTTP: a JSON list of what happened since they were fetched last.

Each has a number, in a row, and a window: of all its tokens in a layer with full attention, fewer in one with a sliding
window. A block that moves to another level of the cache is `updated`, one that is `removed` is on no level any more.
Blocks that are not full are told of, too, and left out: they may grow, and another one takes their place then.
"""

import json
from array import array
from collections.abc import Iterator
from time import time
from typing import Any

from replicas.engines.dialect import EventRecords

_TIERS = ("gpu", "cpu")  # by cache level; below is a disk


class Decoder:
    """Makes batches of the types in `records`, of what one engine answers in turn."""

    def __init__(self, records: EventRecords, block_size: int) -> None:
        self._records, self._size = records, block_size
        self._next: int | None = None  # the number of the next event
        self._skipped = False  # numbers were missing in the answer that is read
        self._window: int | None = None  # the largest
        self._levels: dict[int, int] = {}  # of blocks that are not on the GPU

    def decode(self, payload: bytes) -> Any:
        try:
            told = json.loads(payload)
        except ValueError as error:
            raise self._records.EventError(f"no JSON: {error}") from None
        if not isinstance(told, list):
            raise self._records.EventError("no list of events")
        self._skipped = False
        events: list[Any] = []
        passed_over: list[str] = []
        for one in told:
            try:
                events += self._read(one)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                passed_over.append(f"an event that cannot be read: {type(error).__name__}: {error}"[:120])
        return self._records.Batch(time(), events, passed_over, self._skipped)

    def _read(self, one: dict[str, Any]) -> Iterator[Any]:
        number, data, window = int(one["event_id"]), one["data"], one.get("window_size")
        if self._next is not None and number != self._next:  # some were lost, or it is another process
            self._skipped |= number > self._next
            self._levels.clear()
            yield self._records.Cleared()
        self._next = number + 1
        if one.get("attention_dp_rank"):
            raise ValueError("another rank of attention data parallelism")
        if window is not None:
            self._window = max(self._window or 0, window)
            if window < self._window:
                return
        if data["type"] == "stored":
            yield from self._stored(data)
        elif data["type"] == "removed":
            yield from (self._removed(key, self._levels.pop(key, 0)) for key in data["block_hashes"])
        elif data["type"] == "updated":
            yield from self._moved(data["block_hash"], data.get("cache_level"))
        elif data["type"] != "created":
            raise ValueError(f"unknown type {str(data['type'])[:40]!r}")

    def _stored(self, data: dict[str, Any]) -> Iterator[Any]:
        parent = data["parent_hash"]
        for block in data["blocks"]:
            tokens, key, level = block["tokens"], block["block_hash"], block.get("cache_level") or 0
            if len(tokens) < self._size:
                return  # the last one, not full
            extra = _beside(block)
            ids = array("I", [token["token_id"] for token in tokens]).tobytes()
            yield self._records.Stored(
                [key], parent, ids, len(tokens), _tier(level), None, [extra] if extra else None, 0, "full_attention"
            )
            self._put(key, level)
            parent = key

    def _moved(self, key: int, change: Any) -> Iterator[Any]:
        """Known on its new level before it is gone from the old one."""
        if not isinstance(change, dict):
            return  # of another kind: its priority
        new, old = change["new_value"], self._levels.get(key, change["old_value"])
        if new == old:
            return
        yield self._records.Stored([key], None, b"", 0, _tier(new), None, None, 0, "full_attention")
        yield self._removed(key, old)
        self._put(key, new)

    def _removed(self, key: int, level: int) -> Any:
        return self._records.Removed([key], _tier(level), 0)

    def _put(self, key: int, level: int) -> None:
        if level:
            self._levels[key] = level
        else:
            self._levels.pop(key, None)


def _tier(level: int) -> str:
    return _TIERS[level] if level < len(_TIERS) else "disk"


def _beside(block: dict[str, Any]) -> list[object]:
    """What a block's key covers besides tokens: media, and embeddings of a prompt that stand for tokens."""
    extra: list[object] = [["mm", str(one)] for one in block.get("mm_keys") or ()]
    return extra + [["extra", id] for token in block["tokens"] if (id := token.get("token_extra_id"))]

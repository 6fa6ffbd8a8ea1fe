"""Engines' cache events off the wire: vLLM's msgpack batches as plain records.

A batch is `[timestamp, events, data_parallel_rank]`. Newer vLLM writes an event as a map
with its type under "type", older as an array with its type first; block hashes are ints or
bytes. Fields unknown to us are ignored, as are events of unknown type.
"""

from array import array
from typing import Any, NamedTuple

import msgspec

TIERS = {"gpu": "gpu", "cpu": "cpu", "storage": "disk", "disk": "disk", "remote": "remote"}

# the order of fields in the array form; later versions only append
STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
)  # fmt: skip
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")


class EventError(ValueError):
    """A payload that is not a batch of events."""


class Stored(NamedTuple):
    """Full blocks the engine now has, in order, each the parent of the next."""

    keys: list[int] | list[bytes]
    parent: int | bytes | None  # None: the first block starts a prompt
    tokens: bytes  # of all blocks together, uint32; empty when only moved between tiers
    block_size: int
    tier: str
    adapter: str | None
    extra: list[list | None] | None  # per block, what besides tokens its key covers
    group: int
    kind: str


class Removed(NamedTuple):
    """Blocks the engine dropped."""

    keys: list[int] | list[bytes]
    tier: str
    group: int


class Cleared(NamedTuple):
    """The engine dropped everything."""


class Batch(NamedTuple):
    timestamp: float  # seconds, by the engine's clock
    events: list[Stored | Removed | Cleared]
    unknown: int  # events of types this module does not know


def decode(payload: bytes) -> Batch:
    """One batch; raises EventError if it is none."""
    try:
        timestamp, raw, *_ = msgspec.msgpack.decode(payload)
        events = [_event(one) for one in raw]
        known = [event for event in events if event is not None]
        return Batch(float(timestamp), known, len(events) - len(known))
    except (msgspec.DecodeError, TypeError, ValueError, LookupError, OverflowError) as error:
        raise EventError(f"not a batch of cache events: {error!r}") from error


def _event(raw: dict | list) -> Stored | Removed | Cleared | None:
    kind = raw["type"] if isinstance(raw, dict) else raw[0]
    if kind == "BlockStored":
        return _stored(_fields(raw, STORED_FIELDS))
    if kind == "BlockRemoved":
        fields = _fields(raw, REMOVED_FIELDS)
        return Removed(_keys(fields), _tier(fields), fields.get("group_idx") or 0)
    return Cleared() if kind == "AllBlocksCleared" else None


def _fields(raw: dict | list, names: tuple[str, ...]) -> dict[str, Any]:
    return raw if isinstance(raw, dict) else dict(zip(names, raw[1:]))


def _stored(fields: dict[str, Any]) -> Stored:
    keys, tokens, size = _keys(fields), fields["token_ids"] or [], fields["block_size"]
    extra = fields.get("extra_keys")
    if tokens and len(tokens) != len(keys) * size:
        raise ValueError(f"{len(tokens)} tokens for {len(keys)} blocks of {size}")
    if extra and len(extra) != len(keys):
        raise ValueError(f"{len(extra)} extra keys for {len(keys)} blocks")
    return Stored(
        keys,
        fields["parent_block_hash"],
        array("I", tokens).tobytes(),
        size,
        _tier(fields),
        fields.get("lora_name"),
        extra,
        fields.get("group_idx") or 0,
        fields.get("kv_cache_spec_kind") or "full_attention",
    )


def _keys(fields: dict[str, Any]) -> list:
    keys = fields["block_hashes"]
    if not isinstance(keys, list) or not {int, bytes}.issuperset(map(type, keys)):
        raise TypeError("block_hashes must be ints or bytes")
    return keys


def _tier(fields: dict[str, Any]) -> str:
    """Our name for the medium; an unknown one is taken for the slowest."""
    return TIERS.get((fields.get("medium") or "gpu").lower(), "remote")

"""vLLM's cache events off the wire: msgpack batches, decoded into the records of whoever follows them.

A batch is `[timestamp, events, data_parallel_rank]`. Newer vLLM writes an event as a map
with its type under "type", older as an array with its type first; block hashes are ints or
bytes. Fields unknown to us are ignored; events that cannot be read are passed over, with the reason, one by one.
"""

from array import array
from typing import Any

import msgspec

from replicas.engines.dialect import EventRecords

# `medium`, as vLLM and the stores below it name theirs; CPU_PINNED, DISK and EXTERNAL are SGLang's, and in its older
# versions CPU_TIER1 and CPU_TIER2, its host memory and storage.
TIERS = {
    "gpu": "gpu", "cpu": "cpu", "cpu_tier1": "cpu", "cpu_pinned": "cpu", "storage": "disk", "disk": "disk", "fs": "disk",
    "cpu_tier2": "disk", "obj": "remote", "external": "remote", "remote": "remote",
}  # fmt: skip

# the order of fields in the array form; later versions only append
STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
# `kv_cache_spec_kind`: what vLLM calls apart, but finds hits in by the same rule. Others stay as they are.
FULL_ATTENTION = "full_attention"
GROUP_KINDS = {
    "mla_attention": FULL_ATTENTION, "sink_full_attention": FULL_ATTENTION, "sliding_window_mla": "sliding_window",
}  # fmt: skip
KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


class Decoder:
    """Decodes batches into the types in `records`."""

    def __init__(self, records: EventRecords):
        self._records = records

    def decode(self, payload: bytes) -> Any:
        """One batch; raises `records.EventError` if it is none."""
        try:
            timestamp, raw, *_ = msgspec.msgpack.decode(payload)
            batch = self._records.Batch(float(timestamp), [], [])
            for one in raw:
                try:
                    batch.events.append(self._event(one))
                except (TypeError, ValueError, LookupError, OverflowError) as error:
                    batch.passed_over.append(_complaint(one, error))
            return batch
        except (msgspec.DecodeError, TypeError, ValueError) as error:
            raise self._records.EventError(f"not a batch of cache events: {error!r}") from error

    def _event(self, raw: dict | list) -> Any:
        kind = raw["type"] if isinstance(raw, dict) else raw[0]
        if kind == "BlockStored":
            return self._stored(_fields(raw, STORED_FIELDS))
        if kind == "BlockRemoved":
            fields = _fields(raw, REMOVED_FIELDS)
            return self._records.Removed(_keys(fields), _tier(fields), fields.get("group_idx") or 0)
        if kind == "AllBlocksCleared":
            return self._records.Cleared()
        raise ValueError("unknown type")

    def _stored(self, fields: dict[str, Any]) -> Any:
        keys, tokens, size = _keys(fields), fields["token_ids"] or [], fields["block_size"]
        extra = fields.get("extra_keys")
        kind = fields.get("kv_cache_spec_kind") or FULL_ATTENTION
        kind = GROUP_KINDS.get(kind, kind)
        if kind != FULL_ATTENTION:
            # The tokens are those of all blocks of a step, the keys those of the blocks that are kept. The same keys in
            # the group of full attention tell which they are.
            tokens, extra = [], None
        if tokens and len(tokens) != len(keys) * size:
            raise ValueError(f"{len(tokens)} tokens for {len(keys)} blocks of {size}")
        if extra and len(extra) != len(keys):
            raise ValueError(f"{len(extra)} extra keys for {len(keys)} blocks")
        tier, group = _tier(fields), fields.get("group_idx")
        copied = bool(tokens) and tier != "gpu"  # and told by its tokens
        return self._records.Stored(
            keys,
            fields["parent_block_hash"],
            array("I", tokens).tobytes(),
            size,
            tier,
            _adapter(fields),
            extra,
            group or 0,
            kind,
            fields.get("kv_cache_spec_sliding_window"),
            together=len(keys) if copied and group is not None else 1,  # an event for each of its connector's chunks
            below=copied and group is None,  # LMCache's knows none
        )


def _complaint(raw: Any, error: Exception) -> str:
    """The same text for the same cause, so that it can be told once."""
    kind = raw.get("type") if isinstance(raw, dict) else raw[0] if isinstance(raw, list) and raw else None
    if kind not in KINDS:
        return f"unknown type {str(kind)[:60]!r}"
    return f"{kind} without {error}" if isinstance(error, KeyError) else f"{kind}: {str(error)[:100]}"


def _fields(raw: dict | list, names: tuple[str, ...]) -> dict[str, Any]:
    return raw if isinstance(raw, dict) else dict(zip(names, raw[1:]))


def _adapter(fields: dict[str, Any]) -> str | None:
    """The adapter's name. Engines too old to tell it tell a number, and what they store is at least not the base
    model's."""
    number = fields.get("lora_id")
    return fields.get("lora_name") or (f"adapter {number}" if number else None)


def _keys(fields: dict[str, Any]) -> list:
    keys = fields["block_hashes"]
    if not isinstance(keys, list) or not {int, bytes}.issuperset(map(type, keys)):
        raise TypeError("block_hashes must be ints or bytes")
    return keys


def _tier(fields: dict[str, Any]) -> str:
    """Our name for the medium; an unknown one is taken for the slowest, as is whatever is on another machine."""
    if fields.get("locality") == "REMOTE":
        return "remote"
    return TIERS.get((fields.get("medium") or "gpu").lower(), "remote")

"""vLLM's KV events: msgpack batches, decoded into records of `cachemap.events.records`.

A batch is `[timestamp, events, data_parallel_rank]`, or a map of these. Newer vLLM writes an event as a map with its
type under "type", older vLLM as an array with its type first; block hashes are ints or bytes. Unknown fields are
ignored; an event that cannot be read is skipped, and the batch's `passed_over` says why.

Events are decoded with the expected types of their fields, so that decoding stops at the first byte of another type:
without types, 16 MiB of empty lists blocked the process for 28 s.
"""

from array import array
from itertools import chain
from math import isfinite
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

# The tier in the gateway's cache map for each `medium` in events, as vLLM and the stores behind it write it. SGLang
# writes CPU_PINNED, DISK and EXTERNAL; older versions wrote CPU_TIER1 and CPU_TIER2 for host memory and storage.
TIERS = {
    "gpu": "gpu", "cpu": "cpu", "cpu_tier1": "cpu", "cpu_pinned": "cpu", "storage": "disk", "disk": "disk", "fs": "disk",
    "cpu_tier2": "disk", "obj": "remote", "external": "remote", "remote": "remote",
}  # fmt: skip

# Kinds of cache groups, as in an event's `kv_cache_spec_kind`, that are read as another kind, because their rule for
# cache hits is the same; all other kinds keep their names.
FULL_ATTENTION, MAMBA = "full_attention", "mamba"
GROUP_KINDS = dict.fromkeys(("mla_attention", "sink_full_attention"), FULL_ATTENTION)
GROUP_KINDS["sliding_window_mla"] = "sliding_window"

# The most events of one batch: a step that drops 65,536 blocks of 16 tokens reports each in an event of its own.
MOST_EVENTS = 1 << 18
# Limits of the values in an event. One call decodes them and keeps the interpreter lock, in a thread too: a million
# keys or tokens take up to 45 ms, a list or a pair up to 0.2 us.
MOST_LISTS, MOST_VALUES = 1 << 18, 1 << 20
MOST_PAIRS_BYTES = 1 << 16  # of an event with pairs of tokens: SGLang reports each page in an event of its own
# Limit of an event's extra keys, whose types are not known in advance: a block of an image has about 75 bytes.
MOST_EXTRA_BYTES = 1 << 20
# Limits of an event's lookahead tokens, one list per block: decoded, a list takes 60 bytes or more.
MOST_LOOKAHEAD_BYTES, MOST_LOOKAHEAD_BLOCKS = 1 << 20, 1 << 16

Key = int | bytes
Keys = Annotated[list[Key], Meta(max_length=MOST_VALUES)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
More = Annotated[dict[str, msgspec.Raw], Meta(max_length=64)]


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=MOST_EVENTS)]


class BatchMap(Batch, array_like=False):
    pass


class Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """A BlockStored event, with its fields in the order of the array form; later versions only append."""

    block_hashes: Keys
    parent_block_hash: Key | None
    token_ids: list[int | tuple[int, int]] | None  # pairs are SGLang's
    block_size: Count
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | More | None = None  # in SGLang's arrays a map of further values
    extra_keys: msgspec.Raw = msgspec.Raw()
    group_idx: Count | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Count | None = None
    locality: str | None = None
    ownership: msgspec.Raw = msgspec.Raw()
    session_id: msgspec.Raw = msgspec.Raw()
    lookahead_token_ids: msgspec.Raw = msgspec.Raw()


class StoredMap(Stored, array_like=False, tag_field="type", tag="BlockStored"):
    cache_salt: str | None = None  # SGLang's


class LongStored(Stored, array_like=True, tag="BlockStored"):
    """A BlockStored event of more than 64 KiB (MOST_PAIRS_BYTES), in which tokens must be numbers, not pairs."""

    token_ids: Annotated[list[int], Meta(max_length=MOST_VALUES)] | None  # type: ignore[assignment]


class LongStoredMap(StoredMap, array_like=False, tag_field="type", tag="BlockStored"):
    token_ids: Annotated[list[int], Meta(max_length=MOST_VALUES)] | None  # type: ignore[assignment]


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: Keys
    medium: str | None = None
    group_idx: Count | None = None


class RemovedMap(Removed, array_like=False, tag_field="type", tag="BlockRemoved"):
    locality: str | None = None


class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class ClearedMap(Cleared, array_like=False, tag_field="type", tag="AllBlocksCleared"):
    pass


BATCH, BATCH_MAP = msgspec.msgpack.Decoder(Batch), msgspec.msgpack.Decoder(BatchMap)
ARRAY = msgspec.msgpack.Decoder(Stored | Removed | Cleared)
MAP = msgspec.msgpack.Decoder(StoredMap | RemovedMap | ClearedMap)
LONG_ARRAY = msgspec.msgpack.Decoder(LongStored | Removed | Cleared)
LONG_MAP = msgspec.msgpack.Decoder(LongStoredMap | RemovedMap | ClearedMap)
EXTRA = msgspec.msgpack.Decoder(list[list[Any] | None])
KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
FLAT = {str, int, bytes, float, bool, type(None)}
# The first bytes of a msgpack map, those of an array of more than 15 items (with the bytes of its head); and null.
MAP_HEADS = {bytes([one]) for one in (*range(0x80, 0x90), 0xDE, 0xDF)}
ARRAY_HEADS, NIL = {b"\xdc": 3, b"\xdd": 5}, b"\xc0"
LIST_HEADS = bytes((*range(0x80, 0xA0), *range(0xDC, 0xE0)))  # the first bytes of all maps and arrays
UNREADABLE = (TypeError, ValueError, LookupError, OverflowError, RecursionError)


class Decoder:
    """A decoder of vLLM's batches of KV events into the gateway's own records, `cachemap.events.records`."""

    def __init__(self, records: Any):
        self._records = records
        row = Annotated[list[int], Meta(min_length=1, max_length=records.MOST_AHEAD)]
        rows = Annotated[list[row], Meta(max_length=MOST_LOOKAHEAD_BLOCKS)]
        self._lookahead = msgspec.msgpack.Decoder(rows | None)

    def decode(self, payload: bytes) -> Any:
        """Decode one batch. Raises `records.EventError` if the payload is no batch of events."""
        try:
            told = (BATCH_MAP if _is_map(payload) else BATCH).decode(payload)
            if not isfinite(told.ts):
                raise ValueError(f"the time {told.ts}")
        except UNREADABLE as error:
            raise self._records.EventError(f"not a batch of cache events: {error!r}") from None
        batch = self._records.Batch(told.ts, [], [])
        some_long = len(payload) > MOST_PAIRS_BYTES
        for raw in told.events:
            try:
                if some_long and memoryview(raw).nbytes > MOST_PAIRS_BYTES:
                    event = (LONG_MAP if _is_map(raw) else LONG_ARRAY).decode(raw)
                else:
                    event = (MAP if _is_map(raw) else ARRAY).decode(raw)
                batch.events.append(self._event(event))
            except UNREADABLE as error:
                batch.passed_over.append(_complaint(raw, error))
        return batch

    def _event(self, event: Stored | Removed | Cleared) -> Any:
        if isinstance(event, Stored):
            return self._stored(event)
        if isinstance(event, Removed):
            return self._records.Removed(event.block_hashes, _tier(event), event.group_idx or 0)
        return self._records.Cleared()

    def _stored(self, event: Stored) -> Any:
        keys, tokens, size, extra = event.block_hashes, event.token_ids or [], event.block_size, None
        kind = event.kv_cache_spec_kind or FULL_ATTENTION
        kind = GROUP_KINDS.get(kind, kind)
        if kind != FULL_ATTENTION:
            # The event's tokens cover all blocks of a step, its keys only the blocks that this group keeps. The tokens
            # are known from full attention, which has blocks with the same keys; but Mamba's blocks may be smaller.
            tokens = tokens if kind == MAMBA and _tier(event) == "gpu" else []
            if len(tokens) % max(size, 1):
                raise ValueError(f"{len(tokens)} tokens for blocks of {size}")
        else:
            extra = extra_keys(event.extra_keys)
        if kind == FULL_ATTENTION and tokens and len(tokens) != len(keys) * size:
            raise ValueError(f"{len(tokens)} tokens for {len(keys)} blocks of {size}")
        if extra and len(extra) != len(keys):
            raise ValueError(f"{len(extra)} extra keys for {len(keys)} blocks")
        tier, group = _tier(event), event.group_idx
        lookahead = self._lookahead_tokens(event.lookahead_token_ids) if tokens else []
        if lookahead and (len(lookahead) != len(keys) or len({len(one) for one in lookahead}) != 1):
            raise ValueError(f"{len(lookahead)} lookahead_token_ids for {len(keys)} blocks")
        copied = bool(tokens) and tier != "gpu"  # a copy in a lower tier, reported with its tokens
        return self._records.Stored(
            keys,
            event.parent_block_hash,
            array("I", cast("list[int]", tokens)).tobytes(),
            size,
            tier,
            _adapter(event),
            extra,
            group or 0,
            kind,
            event.kv_cache_spec_sliding_window,
            lookahead=array("I", chain.from_iterable(lookahead)).tobytes(),
            together=len(keys) if copied and group is not None else 1,  # the offloading connector sends one per chunk
            below=copied and group is None,  # LMCache's events have no group
        )

    def _lookahead_tokens(self, raw: msgspec.Raw) -> list[list[int]]:
        """Return for each block the tokens after it that its key also covers; [] if keys cover no such tokens.

        Raises an exception of `UNREADABLE` if `raw`, the packed field, is too long or has other types.
        """
        packed = bytes(raw)
        if len(packed) > MOST_LOOKAHEAD_BYTES:
            raise ValueError(f"lookahead_token_ids of more than {MOST_LOOKAHEAD_BYTES} bytes")
        try:
            return (self._lookahead.decode(packed) if packed else None) or []
        except msgspec.ValidationError:
            limits = f"at most {MOST_LOOKAHEAD_BLOCKS} lists of 1 to {self._records.MOST_AHEAD} tokens"
            raise ValueError(f"lookahead_token_ids are not {limits}") from None


def extra_keys(raw: msgspec.Raw) -> list[list[Any] | None] | None:
    """Return for each block what its key covers besides tokens, such as images.

    Returns None if the keys cover only tokens. Raises an exception of `UNREADABLE` if `raw`, the packed field, is too
    long or has other types.
    """
    packed = bytes(raw)
    head = ARRAY_HEADS.get(packed[:1], 1)
    if packed.count(NIL, head) >= len(packed) - head:
        return None
    if len(packed) > MOST_EXTRA_BYTES:
        raise ValueError(f"extra_keys of more than {MOST_EXTRA_BYTES} bytes")
    if len(packed) > MOST_LISTS and len(packed) - len(packed.translate(None, LIST_HEADS)) > MOST_LISTS:
        raise ValueError(f"extra_keys of more than {MOST_LISTS} lists")
    extra = EXTRA.decode(packed)
    for key in (key for keys in extra for key in keys or ()):
        if not FLAT.issuperset(map(type, key if type(key) is list else (key,))):
            raise TypeError("extra_keys has a key that is neither a value nor a list of values")
    return extra


def _is_map(packed: bytes | msgspec.Raw) -> bool:
    return bytes(memoryview(packed)[:1]) in MAP_HEADS


def _complaint(raw: msgspec.Raw, error: Exception) -> str:
    """Return why an event cannot be read; the text is the same for the same cause, so that it can be logged once."""
    begin = bytes(memoryview(raw)[:256])
    kind = next((name for name in KINDS if name.encode() in begin), "an event")
    return f"{kind}: {str(error)[:100]}".replace("Invalid value", "unknown type")


def _adapter(event: Stored) -> str | None:
    """Return the name of the event's LoRA adapter, or None for the base model.

    Older engines report only a number; a name is made of it, to keep the blocks apart from those of the base model.
    """
    if isinstance(event.lora_name, dict):
        raise TypeError("lora_name is a map")
    return event.lora_name or (f"adapter {event.lora_id}" if event.lora_id else None)


def _tier(event: Stored | Removed) -> str:
    """Return the tier (gpu, cpu, disk or remote) in which the event's blocks are cached.

    The tier is "remote" if the event's medium is unknown, or if its locality is REMOTE.
    """
    if getattr(event, "locality", None) == "REMOTE":
        return "remote"
    return TIERS.get((event.medium or "gpu").lower(), "remote")

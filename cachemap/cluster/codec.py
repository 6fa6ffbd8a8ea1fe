"""The encoding of deltas and snapshots for Redis: 13 bytes a block, 8 for its hash and 5 for its tag.

A delta has the changes since the delta before it, after a head with its writer's term and the engine's last event batch
that it includes. A snapshot is a JSON header, then for each tier the hashes and tags of the blocks, then the counts of
copies of blocks beyond the first copy.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import xxhash

from cachemap.changes import TIERS, CacheGroup, Change, ChunkTier, Clear, Contents, Observe, Remove, Store
from cachemap.cluster.keys import SCHEMA
from cachemap.events.records import MOST_AHEAD, UNTOLD, Blocks

TAG_BYTES = 5
# Bytes in a piece of a snapshot. Allocators round large sizes up by as much as a fifth; 28 KiB is one of their sizes,
# and this leaves room for Redis's own header.
PIECE = 28 * 1024 - 64
FIRST, RELOAD = 1, 2  # flags: a writer's first delta; a delta without changes that makes readers load the snapshot

_HEAD = struct.Struct("<dIBqd")  # the server's time of arrival (added there), term, flags, sequence, engine's time
_OPERATION = struct.Struct("<BBHI")  # kind, tier, heads, blocks
_GROUP = struct.Struct("<HI")  # after an operation whose tier is not in TIERS: a cache group's index and `last`,
_CHUNKS = struct.Struct("<BI")  # or the number of a tier in chunks, and the blocks of a chunk
_OWN = 0x80  # added to that number: the engine's own tier
_PARENT = np.dtype([("at", "<u4"), ("hash", "<u8")])
_COPIES = np.dtype([("tag", "<u8"), ("count", "<u4")])
_STORE, _REMOVE, _CLEAR, _OBSERVED, _UNOBSERVED, _CLEAR_OWN = range(6)


class Unreadable(ValueError):
    """An error: data in Redis cannot be used here; the message says why."""


class Damaged(Unreadable):
    """An error: data in Redis is not what a gateway wrote; the leading gateway can write it again."""


class Position(NamedTuple):
    """The last event batch of the engine that a delta, a snapshot or the map includes."""

    sequence: int | None = None  # the batch's number; None: no batch yet
    timestamp: float = 0.0  # when the engine sent the batch, by the engine's clock


class Delta(NamedTuple):
    """The changes to one replica's blocks since the delta before this one."""

    at: float  # when the delta reached Redis, by the server's clock
    term: int  # a random number for each period in which one gateway leads
    flags: int  # FIRST, RELOAD
    position: Position  # the engine's last event batch that the changes include
    changes: list[Change]


def encode_change(change: Change) -> bytes:
    if isinstance(change, Store):
        heads = np.array(change.heads, _PARENT)
        head = _operation(_STORE, change.tier, len(heads), len(change.hashes))
        return b"".join((head, heads.tobytes(), change.hashes.tobytes(), _pack(change.tags)))
    if isinstance(change, Remove):
        return _operation(_REMOVE, change.tier, 0, len(change.tags)) + _pack(change.tags)
    if isinstance(change, Clear):
        kind = _CLEAR if change.below else _CLEAR_OWN
    else:
        kind = _OBSERVED if change.observed else _UNOBSERVED
    return _OPERATION.pack(kind, 0, 0, 0)


def _operation(kind: int, tier: str, heads: int, blocks: int) -> bytes:
    group = CacheGroup.of(tier)
    if (chunks := ChunkTier.of(tier)) is not None:
        place = _CHUNKS.pack(TIERS.index(chunks.base) | (_OWN if chunks.own else 0), chunks.blocks)
        return _OPERATION.pack(kind, len(TIERS) + 1, heads, blocks) + place
    if group is None:
        return _OPERATION.pack(kind, TIERS.index(tier), heads, blocks)
    return _OPERATION.pack(kind, len(TIERS), heads, blocks) + _GROUP.pack(*group)


def encode_delta(term: int, flags: int, position: Position, changes: list[bytes]) -> bytes:
    sequence = -1 if position.sequence is None else position.sequence
    return b"".join((_HEAD.pack(0, term, flags, sequence, position.timestamp)[8:], *changes))


def decode_delta(data: bytes) -> Delta:
    """Return the delta that these bytes encode. Raises Damaged."""
    try:
        at, term, flags, sequence, timestamp = _HEAD.unpack_from(data)
        position = Position(None if sequence < 0 else sequence, timestamp)
        return Delta(at, term, flags, position, _changes(data, _HEAD.size))
    except (struct.error, ValueError, IndexError) as error:
        raise Damaged(f"a delta of {len(data)} bytes cannot be read: {error}") from None


def decode_entry(id: bytes, fields: dict[bytes, bytes]) -> tuple[int, Delta]:
    """Return the number and the delta of a Redis stream entry. Raises Damaged."""
    number, _, rest = id.partition(b"-")
    if rest != b"0" or b"d" not in fields:
        raise Damaged(f"entry {id.decode()} is none that a gateway wrote")
    return int(number), decode_delta(fields[b"d"])


def _changes(data: bytes, at: int) -> list[Change]:
    changes: list[Change] = []
    while at < len(data):
        kind, number, heads, count = _OPERATION.unpack_from(data, at)
        at += _OPERATION.size
        if number == len(TIERS):
            tier = CacheGroup(*_GROUP.unpack_from(data, at)).tier
            at += _GROUP.size
        elif number == len(TIERS) + 1:
            base, chunk = _CHUNKS.unpack_from(data, at)
            tier = ChunkTier(TIERS[base & ~_OWN], chunk, bool(base & _OWN)).tier
            if ChunkTier.of(tier) is None:
                raise ValueError(f"a tier called {tier}")
            at += _CHUNKS.size
        else:
            tier = TIERS[number]
        if kind == _STORE:
            parents = np.frombuffer(data, _PARENT, heads, at).tolist()
            at += heads * _PARENT.itemsize
            hashes = np.frombuffer(data, "<u8", count, at)
            at += 8 * count
            if not hashes.all() or any(index >= count for index, _ in parents):
                raise ValueError("it names blocks that cannot be")
            changes.append(Store(tier, hashes, _unpack(data, at, count), parents))
        elif kind == _REMOVE:
            changes.append(Remove(tier, _unpack(data, at, count)))
        elif kind in (_CLEAR, _CLEAR_OWN):
            changes.append(Clear(kind == _CLEAR))
        elif kind in (_OBSERVED, _UNOBSERVED):
            changes.append(Observe(kind == _OBSERVED))
        else:
            raise ValueError(f"a change of kind {kind}")
        at += TAG_BYTES * count if kind <= _REMOVE else 0
    return changes


class Identity(NamedTuple):
    """The settings that gateways must have in common for a block to have the same hash and tag in all of them."""

    model: str
    block_size: int
    tag_bits: int


class Snapshot(NamedTuple):
    """All that a replica is known to hold at one time."""

    n: int  # the number of the last delta that it includes
    term: int  # the term of the gateway that wrote it
    position: Position  # the engine's last event batch that it includes
    contents: Contents
    blocks: Blocks = UNTOLD  # the engine's block format, as its events showed it


def encode_snapshot(identity: Identity, snapshot: Snapshot) -> list[bytes]:
    """Return the pieces of a snapshot: a JSON header, then the data in pieces of PIECE bytes."""
    n, term, position, contents, blocks = snapshot
    parts = []
    for hashes, tags in contents.held.values():
        parts += [hashes.astype("<u8").tobytes(), _pack(tags)]
    copies: dict[str, list[tuple[int, int]]] = {}
    for (tier, tag), count in contents.copies.items():
        copies.setdefault(tier, []).append((tag, count))
    parts += [np.array(one, _COPIES).tobytes() for one in copies.values()]
    body = b"".join(parts)
    header = {
        "schema": SCHEMA, **identity._asdict(), "n": n, "term": term, **position._asdict(), "observed": contents.observed,
        "held": {tier: len(hashes) for tier, (hashes, _) in contents.held.items()},
        "copies": {tier: len(one) for tier, one in copies.items()}, "blocks": blocks,
        "check": xxhash.xxh3_64_hexdigest(body),
    }  # fmt: skip
    return [json.dumps(header).encode(), *(body[at : at + PIECE] for at in range(0, len(body), PIECE))]


def decode_snapshot(identity: Identity, pieces: list[bytes]) -> Snapshot:
    """Return the snapshot in these pieces.

    Raises Unreadable if a gateway with other settings than `identity` wrote it, Damaged if no gateway wrote it.
    """
    body = b"".join(pieces[1:])
    try:
        header = json.loads(pieces[0])
        _compare(identity, header)
        if xxhash.xxh3_64_hexdigest(body) != header["check"]:
            raise Damaged("its checksum is wrong")
        n, term, sequence, timestamp, observed = (
            header[name] for name in ("n", "term", "sequence", "timestamp", "observed")
        )
        if not (
            _counts(n, term)
            and (sequence is None or _counts(sequence))
            and math.isfinite(timestamp)
            and isinstance(observed, bool)
        ):
            raise Damaged("its header is not one that a gateway wrote")
        held: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        copies: dict[tuple[str, int], int] = {}
        at = 0
        for tier, count in _by_tier(header["held"]):
            hashes = np.frombuffer(body, "<u8", count, at)
            at += 8 * count
            held[tier] = hashes, _unpack(body, at, count)
            at += TAG_BYTES * count
        for tier, count in _by_tier(header["copies"]):
            copies |= {(tier, tag): more for tag, more in np.frombuffer(body, _COPIES, count, at).tolist()}
            at += count * _COPIES.itemsize
        if at != len(body):
            raise Damaged(f"it has {len(body)} bytes, its header speaks of {at}")
        contents = Contents(observed, held, copies)
        return Snapshot(n, term, Position(sequence, timestamp), contents, told_blocks(pieces))
    except Unreadable:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"the snapshot cannot be read: {error!r}") from None


def told_blocks(pieces: list[bytes]) -> Blocks:
    """Return the engine's block format from the pieces of a snapshot, UNTOLD if it has none.

    This also works for a snapshot that `decode_snapshot` refuses because of its block format.
    """
    try:
        told = Blocks(*json.loads(pieces[0])["blocks"])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return UNTOLD
    return told if _counts(*told) and max(told) < 1 << 32 and told.ahead <= MOST_AHEAD else UNTOLD


def _counts(*numbers: object) -> bool:
    return all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 63 for number in numbers)


def _by_tier(counts: dict[str, int]) -> list[tuple[str, int]]:
    found = list(counts.items())
    if not all(
        (tier in TIERS or CacheGroup.of(tier) or ChunkTier.of(tier)) and _counts(count) for tier, count in found
    ):
        raise Damaged(f"it speaks of {counts}")
    return found


def _compare(identity: Identity, header: dict[str, Any]) -> None:
    if header["schema"] != SCHEMA:
        raise Damaged(f"written for schema {header['schema']}, this gateway knows {SCHEMA}")
    for name, ours in identity._asdict().items():
        if header[name] != ours:
            hint = "; give all gateways the same cache_budget" if name == "tag_bits" else ""
            raise Unreadable(
                f"written by a gateway with {name.replace('_', ' ')} {header[name]}, here it is {ours}{hint}"
            )


def _pack(tags: np.ndarray) -> bytes:
    return tags.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :TAG_BYTES].tobytes()


def _unpack(data: bytes, at: int, count: int) -> np.ndarray:
    wide = np.zeros((count, 8), np.uint8)
    wide[:, :TAG_BYTES] = np.frombuffer(data, np.uint8, TAG_BYTES * count, at).reshape(count, TAG_BYTES)
    return wide.view("<u8").ravel()

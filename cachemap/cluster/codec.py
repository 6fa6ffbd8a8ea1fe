"""The encoding, for Redis, of the blocks that a replica holds (snapshots) and of changes to them (deltas).

A block takes 13 bytes: 8 for its hash and 5 for its tag (shortened engine key). A delta is the time of its arrival at
the server (8 bytes, added there) and a msgpack array with the changes since the delta before. A snapshot is a JSON
header, then for each memory tier the hashes and tags of the blocks, then the counts of copies of blocks beyond the
first copy.
"""

from __future__ import annotations

import struct
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import xxhash

from cachemap.changes import TIERS, CacheGroup, Change, ChunkTier, Clear, Contents, Observe, Remove, Store
from cachemap.cluster.keys import FORMAT
from cachemap.events.records import MOST_AHEAD, UNTOLD, Blocks

TAG_BYTES = 5
MOST_PENDING = 1 << 20  # the most bytes of waiting changes; if more wait, as Redis is away, a snapshot is smaller
LONGEST_DELTA = MOST_PENDING + 64  # with its head, term, flags, position, time and field name, which take 39 at most
# Bytes in a piece of a snapshot. Allocators round large sizes up by as much as a fifth. 28 KiB is a size that they do
# not round up, and 64 bytes of it are left for Redis's own header.
PIECE = 28 * 1024 - 64
FIRST, RELOAD = 1, 2  # flags: a leader's first delta; a delta without changes that makes followers load the snapshot

_TIME = struct.Struct("<d")
_PARENT = np.dtype([("at", "<u4"), ("hash", "<u8")])
_COPIES = np.dtype([("tag", "<u8"), ("count", "<u4")])
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Ahead = Annotated[int, msgspec.Meta(ge=0, le=MOST_AHEAD)]


class Unreadable(ValueError):
    """An error: data in Redis cannot be used by this gateway; the message says why."""


class Damaged(Unreadable):
    """An error: data in Redis is not what a gateway wrote; the gateway that leads can write it again."""


class Position(NamedTuple):
    """A position in the engine's sequence of event batches: the last batch whose changes some data includes."""

    sequence: int | None = None  # the batch's number; None: no batch yet
    timestamp: float = 0.0  # when the engine sent the batch, by the engine's clock


class Delta(NamedTuple):
    """The changes to one replica's blocks that the leading gateway wrote to Redis at one time."""

    at: float  # when the delta reached Redis, by the server's clock
    term: int  # a random number that stands for the period in which one gateway leads
    flags: int  # FIRST, RELOAD
    position: Position  # the engine's last event batch that the changes include
    changes: list[Change]


class _Stored(msgspec.Struct, array_like=True, tag=0):
    tier: str
    heads: bytes
    hashes: bytes
    tags: bytes


class _Removed(msgspec.Struct, array_like=True, tag=1):
    tier: str
    tags: bytes


class _Cleared(msgspec.Struct, array_like=True, tag=2):
    below: bool


class _Observed(msgspec.Struct, array_like=True, tag=3):
    observed: bool


class _Delta(msgspec.Struct, array_like=True):
    term: _Count
    flags: _Count
    sequence: _Count | None
    timestamp: float
    changes: list[_Stored | _Removed | _Cleared | _Observed]


_DELTAS = msgspec.msgpack.Decoder(_Delta)


def encode_change(change: Change) -> bytes:
    told: msgspec.Struct
    if isinstance(change, Store):
        heads = np.array(change.heads, _PARENT).tobytes()
        told = _Stored(change.tier, heads, change.hashes.tobytes(), _pack(change.tags))
    elif isinstance(change, Remove):
        told = _Removed(change.tier, _pack(change.tags))
    else:
        told = _Cleared(change.below) if isinstance(change, Clear) else _Observed(change.observed)
    return msgspec.msgpack.encode(told)


def encode_delta(term: int, flags: int, position: Position, changes: list[bytes]) -> bytes:
    return msgspec.msgpack.encode((term, flags, *position, [*map(msgspec.Raw, changes)]))


def decode_delta(data: bytes) -> Delta:
    """Return the delta that is encoded in these bytes, which begin with the server's time (8 bytes).

    Raises Damaged if they cannot be read.
    """
    try:
        told = _DELTAS.decode(data[_TIME.size :])
        position = Position(told.sequence, told.timestamp)
        (at,) = _TIME.unpack_from(data)
        return Delta(at, told.term, told.flags, position, [*map(_change, told.changes)])
    except (struct.error, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Damaged(f"a delta of {len(data)} bytes cannot be read: {error}") from None


def decode_entry(id: bytes, fields: dict[bytes, bytes]) -> tuple[int, Delta]:
    """Return the number and the delta of a Redis stream entry. Raises Damaged if no gateway wrote the entry."""
    number, _, rest = id.partition(b"-")
    if rest != b"0" or b"d" not in fields or len(fields[b"d"]) > LONGEST_DELTA:
        raise Damaged(f"entry {id.decode()} is none that a gateway wrote")
    return int(number), decode_delta(fields[b"d"])


def _change(told: _Stored | _Removed | _Cleared | _Observed) -> Change:
    if isinstance(told, _Stored):
        heads = np.frombuffer(told.heads, _PARENT).tolist()
        hashes, tags = np.frombuffer(told.hashes, "<u8"), _unpack(told.tags)
        if len(hashes) != len(tags) or not hashes.all() or any(index >= len(hashes) for index, _ in heads):
            raise ValueError("it names blocks that cannot be")
        return Store(_known_tier(told.tier), hashes, tags, heads)
    if isinstance(told, _Removed):
        return Remove(_known_tier(told.tier), _unpack(told.tags))
    return Clear(told.below) if isinstance(told, _Cleared) else Observe(told.observed)


class Identity(NamedTuple):
    """The settings that gateways must have in common for a block to have the same hash and tag in all of them."""

    model: str
    block_size: int
    tag_bits: int


class Snapshot(NamedTuple):
    """All blocks that a replica is known to hold at one time."""

    n: int  # the number of the last delta whose changes the snapshot includes
    term: int  # the term (period of leading) of the gateway that wrote it
    position: Position  # the engine's last event batch whose changes it includes
    contents: Contents
    blocks: Blocks = UNTOLD  # the engine's block format, as its events showed it


class Header(msgspec.Struct):
    """The first piece of a snapshot (all blocks of a replica), which says what the other pieces contain.

    `held`, `copies`: by memory tier, how many blocks and how many counts of copies follow. `n`, `term`: as in
    `Snapshot`. `sequence`, `timestamp`: the snapshot's position, the last event batch that it includes. `check`: the
    checksum of the other pieces together.
    """

    format: int
    model: str
    block_size: int
    tag_bits: int
    n: _Count
    term: _Count
    sequence: _Count | None
    timestamp: float
    observed: bool
    held: dict[str, _Count]
    copies: dict[str, _Count]
    blocks: tuple[_Size, _Ahead, _Size]  # the engine's block format, a `Blocks`
    check: str


def encode_snapshot(identity: Identity, snapshot: Snapshot) -> list[bytes]:
    """Return the pieces of a snapshot: a `Header`, then the data in pieces of PIECE bytes."""
    n, term, position, contents, blocks = snapshot
    copies: dict[str, list[tuple[int, int]]] = {}
    for (tier, tag), count in contents.copies.items():
        copies.setdefault(tier, []).append((tag, count))
    parts = [part for hashes, tags in contents.held.values() for part in (hashes.astype("<u8").tobytes(), _pack(tags))]
    body = b"".join([*parts, *(np.array(one, _COPIES).tobytes() for one in copies.values())])
    held = {tier: len(hashes) for tier, (hashes, _) in contents.held.items()}
    counts = {tier: len(one) for tier, one in copies.items()}
    check = xxhash.xxh3_64_hexdigest(body)
    header = Header(FORMAT, *identity, n, term, *position, contents.observed, held, counts, blocks, check)
    return [msgspec.json.encode(header), *(body[at : at + PIECE] for at in range(0, len(body), PIECE))]


def decode_header(piece: bytes) -> Header:
    """Return the header in the first piece of a snapshot. Raises Damaged if it cannot be read.

    The settings of the gateway that wrote it are not compared here.
    """
    try:
        return msgspec.json.decode(piece, type=Header)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Damaged(f"the snapshot cannot be read: {error}") from None


def decode_snapshot(identity: Identity, header: Header, pieces: list[bytes]) -> Snapshot:
    """Return the snapshot with this header and these pieces after it.

    `identity`: the settings of this gateway. Raises Unreadable if a gateway with other settings wrote the snapshot, and
    Damaged if no gateway wrote it.
    """
    if header.format != FORMAT:
        raise Damaged(f"written in format {header.format}, this gateway knows {FORMAT}")
    for name, ours in identity._asdict().items():
        if (theirs := getattr(header, name)) != ours:
            hint = "; give all gateways the same cache_budget" if name == "tag_bits" else ""
            raise Unreadable(f"written by a gateway with {name.replace('_', ' ')} {theirs}, here it is {ours}{hint}")
    body = b"".join(pieces)
    size = (8 + TAG_BYTES) * sum(header.held.values()) + _COPIES.itemsize * sum(header.copies.values())
    if xxhash.xxh3_64_hexdigest(body) != header.check or len(body) != size:
        raise Damaged(f"its checksum is wrong, or it has {len(body)} bytes and its header speaks of {size}")
    held: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    copies: dict[tuple[str, int], int] = {}
    at = 0
    try:
        for tier, count in header.held.items():
            middle, end = at + 8 * count, at + (8 + TAG_BYTES) * count
            held[_known_tier(tier)] = np.frombuffer(body[at:middle], "<u8"), _unpack(body[middle:end])
            at = end
        for tier, count in header.copies.items():
            found = np.frombuffer(body, _COPIES, count, at).tolist() if count else ()
            copies |= {(_known_tier(tier), tag): more for tag, more in found}
            at += count * _COPIES.itemsize
    except ValueError as error:
        raise Damaged(str(error)) from None
    position, contents = Position(header.sequence, header.timestamp), Contents(header.observed, held, copies)
    return Snapshot(header.n, header.term, position, contents, Blocks(*header.blocks))


def _known_tier(name: str) -> str:
    if name in TIERS or CacheGroup.of(name) or ChunkTier.of(name):
        return name
    raise ValueError(f"there is no tier {name[:100]!r}")


def _pack(tags: np.ndarray) -> bytes:
    return tags.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :TAG_BYTES].tobytes()


def _unpack(data: bytes) -> np.ndarray:
    narrow = np.frombuffer(data, np.uint8).reshape(-1, TAG_BYTES)
    wide = np.zeros((len(narrow), 8), np.uint8)
    wide[:, :TAG_BYTES] = narrow
    return wide.view("<u8").ravel()

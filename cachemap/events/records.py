"""An engine's cache events as plain records.

How they look on the wire is the engine's affair: whoever makes an `EventIntake` hands it the decoder. A decoder ignores
fields that it does not know, and passes events that it cannot read over, with the reason, one by one: the numbers of
batches must stay gapless, and a block that was not stored here is at worst a miss.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

FULL_ATTENTION, SLIDING_WINDOW, MAMBA = "full_attention", "sliding_window", "mamba"


class EventError(ValueError):
    """A payload that is not a batch of events."""


class Stored(NamedTuple):
    """Full blocks the engine now has, in order, each the parent of the next. In a cache group of another kind than full
    attention there may be gaps between them, and none of them at all."""

    keys: Sequence[int | bytes]
    parent: int | bytes | None  # None: the first block starts a prompt
    tokens: bytes  # of all blocks together, uint32; empty when only moved between tiers, and in such a group
    block_size: int
    tier: str
    adapter: str | None
    extra: list[list[object] | None] | None  # per block, what besides tokens its key covers
    group: int  # of the engine's cache groups: layers of one kind, with blocks of their own for the same tokens
    kind: str  # of these layers, one of the constants above, or another that is not understood
    window: int | None = None  # tokens that each of SLIDING_WINDOW's attends to, itself included
    ahead: bytes = b""  # where a key covers the token behind each of its tokens too: those, as `tokens`
    together: int = 1  # blocks that the engine's own slower tier finds together or not at all: each so many of these
    below: bool = False  # of a store below the engine, which finds whole chunks from a prompt's beginning


class Removed(NamedTuple):
    """Blocks the engine dropped."""

    keys: Sequence[int | bytes]
    tier: str
    group: int


class Cleared(NamedTuple):
    """The engine dropped everything that it has itself."""


class Batch(NamedTuple):
    timestamp: float  # seconds, by the engine's clock
    events: list[Stored | Removed | Cleared]
    passed_over: list[str]  # for each event that could not be read, why
    skipped: bool = False  # events before or among these went to nobody, or to another reader


Decoder = Callable[[bytes], Batch]  # raises EventError

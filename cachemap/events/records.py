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
    """Full blocks that the engine now has, in order, each the parent of the next. In a cache group of another kind than
    full attention blocks may be left out, even all. An event of MAMBA has the tokens of a whole step, and its last
    key stands for the state behind the last of them."""

    keys: Sequence[int | bytes]
    parent: int | bytes | None  # None: the first block starts a prompt
    tokens: bytes  # of all blocks together, uint32; empty when only moved between tiers, and with SLIDING_WINDOW
    block_size: int
    tier: str
    adapter: str | None
    extra: list[list[object] | None] | None  # per block, what besides tokens its key covers
    group: int  # of the engine's cache groups: layers of one kind, with blocks of their own for the same tokens
    kind: str  # of these layers, one of the constants above, or another that is not understood
    window: int | None = None  # tokens that each of SLIDING_WINDOW's attends to, itself included
    ahead: bytes = b""  # where a key covers the token behind each of its tokens too: those, as `tokens`
    together: int = 1  # blocks that the engine's own slower tier finds together or not at all: each so many of these
    lookahead: bytes = b""  # where a key covers tokens behind its block too: those of each block, uint32
    below: bool = False  # of a store below the engine, which finds whole chunks from a prompt's beginning

    @property
    def looks_ahead(self) -> int:
        """How many tokens behind its block a key covers."""
        return len(self.lookahead) // 4 // len(self.keys) if self.lookahead else 0


class Blocks(NamedTuple):
    """The block format of an engine, as its events tell it."""

    size: int = 0  # tokens of one of full attention; 0: not known yet
    ahead: int = 0  # how many tokens behind it are part of its name
    states: int = 0  # tokens of one of Mamba's; 0: there are none, as far as is known

    @property
    def parts(self) -> int:
        """Tokens of the Mamba blocks at whose ends a hit may end, if they are smaller than full attention's; else 0."""
        return self.states if self.states < self.size else 0


UNTOLD = Blocks()
AGREEING = 3  # events that tell the same before it counts
MOST_TOLD = 8  # unlike numbers that are counted


class Agreed:
    """One number of the block format, which a single odd event does not change.

    The first event sets it. After that it changes once AGREEING events have told the same other number, and no event
    has told the known number meanwhile.
    """

    __slots__ = ("known", "_is_heard", "_others")

    def __init__(self, known: int, is_heard: bool):
        self.known, self._is_heard = known, is_heard
        self._others: dict[int, int] = {}

    def take(self, told: int, ends_others: bool = True) -> bool:
        """Count the number that an event tells, and return whether it is the known one. `ends_others`: an event that
        tells the known number resets the counts of all other numbers."""
        if not self._is_heard:
            self.known, self._is_heard = told, True
        elif told != self.known:
            times = self._others.get(told, 0) + 1
            if times < AGREEING:
                if times > 1 or len(self._others) < MOST_TOLD:
                    self._others[told] = times
                return False
            self.known = told
            self._others.clear()
        if ends_others:
            self._others.clear()
        return True


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


Decoder = Callable[[bytes], Batch]  # raises EventError

"""An engine's cache events as plain records.

The wire format is the engine's: whoever makes an `EventIntake` passes the decoder. A decoder ignores fields that it
does not know, and skips events that it cannot read, one by one and with the reason: batch numbers must stay gapless,
and a block that was not stored here is at worst a miss.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

FULL_ATTENTION, SLIDING_WINDOW, MAMBA = "full_attention", "sliding_window", "mamba"


class EventError(ValueError):
    """A payload that is not a batch of events."""


class Stored(NamedTuple):
    """Full blocks that the engine now has, in order, each the parent of the next.

    In a cache group other than full attention blocks may be left out, even all. A MAMBA event has the tokens of a whole
    step, and its last key stands for the state after the last of them.
    """

    keys: Sequence[int | bytes]
    parent: int | bytes | None  # None: the first block starts a prompt
    tokens: bytes  # of all blocks together, uint32; empty when only moved between tiers, and with SLIDING_WINDOW
    block_size: int
    tier: str
    adapter: str | None
    extra: list[list[object] | None] | None  # for each block, what its key covers besides tokens
    group: int  # the engine's cache group: layers of one kind, with blocks of their own for the same tokens
    kind: str  # the kind of these layers: a constant above, or another that is not understood
    window: int | None = None  # SLIDING_WINDOW: tokens that each token attends to, itself included
    ahead: bytes = b""  # if keys also cover the token after each of their tokens: those tokens, as `tokens`
    together: int = 1  # blocks in a chunk of the engine's own slower tier, which are only found together
    lookahead: bytes = b""  # if keys also cover tokens after their block: those of each block, uint32
    more: bool = False  # the next record continues this event
    below: bool = False  # in a store below the engine, which finds whole chunks from a prompt's beginning

    @property
    def looks_ahead(self) -> int:
        """The number of tokens after its block that a key also covers."""
        return len(self.lookahead) // 4 // len(self.keys) if self.lookahead else 0


class Blocks(NamedTuple):
    """The block format of an engine, as its events report it."""

    size: int = 0  # tokens in a block of full attention; 0: not known yet
    ahead: int = 0  # tokens after a block that its name also covers
    states: int = 0  # tokens in a block of Mamba; 0: none are known

    @property
    def parts(self) -> int:
        """The tokens of a Mamba block, at whose end a hit may end, if it is smaller than full attention's; else 0."""
        return self.states if self.states < self.size else 0


UNTOLD = Blocks()
# The most tokens after a block that its name may cover: an engine's speculative tokens, one to a few. Each costs a step
# in naming every prompt's blocks: with a million of them a short chat took 25 s.
MOST_AHEAD = 16
AGREEING = 3  # events that must report the same other number before it counts
MOST_TOLD = 8  # other numbers that are counted at a time


class Agreed:
    """One number of the block format, which a single odd event does not change.

    The first event sets it. After that it changes once AGREEING events have reported the same other number, with none
    in between that reported the known one.
    """

    __slots__ = ("known", "_is_heard", "_others")

    def __init__(self, known: int, is_heard: bool):
        self.known, self._is_heard = known, is_heard
        self._others: dict[int, int] = {}

    def take(self, told: int, ends_others: bool = True) -> bool:
        """Count the number that an event reports; return whether it is the known one.

        `ends_others`: an event with the known number resets the counts of all other numbers.
        """
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
    """Blocks that the engine dropped."""

    keys: Sequence[int | bytes]
    tier: str
    group: int


class Cleared(NamedTuple):
    """The loss of everything that the engine holds itself."""


class Batch(NamedTuple):
    """The events of one message of an engine."""

    timestamp: float  # seconds, by the engine's clock
    events: list[Stored | Removed | Cleared]
    passed_over: list[str]  # the reason for each event that could not be read


Decoder = Callable[[bytes], Batch]  # raises EventError

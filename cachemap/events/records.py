"""An engine's KV cache events as plain records, independent of the engine's wire format.

The code that makes an `EventIntake` passes the engine's decoder. A decoder ignores fields that it does not know. It
skips single events that it cannot read, and says why, rather than the whole batch: batch numbers must stay gapless, and
a block that the map does not learn of is at worst a missed hit.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

FULL_ATTENTION, SLIDING_WINDOW, MAMBA = "full_attention", "sliding_window", "mamba"


class EventError(ValueError):
    """An error: a message's payload cannot be read as a batch of events."""


class Stored(NamedTuple):
    """The event that the engine now holds some full blocks, in order: each block is the parent of the next one.

    In a cache group other than full attention (layers with blocks of their own) some or even all blocks may be left
    out. A MAMBA event has the tokens of a whole engine step, and its last key stands for the Mamba state after the last
    of these tokens.
    """

    keys: Sequence[int | bytes]  # the engine's own keys of the blocks
    parent: int | bytes | None  # the engine's key of the block before the first one; None: the first starts a prompt
    tokens: bytes  # token ids of all blocks, uint32; empty if blocks only move between tiers, and with SLIDING_WINDOW
    block_size: int  # tokens in a block
    tier: str
    adapter: str | None  # name of the LoRA adapter
    extra: list[list[object] | None] | None  # for each block, what its key covers besides tokens (media, tenant's salt)
    group: int  # the engine's cache group: layers of one kind, with blocks of their own for the same tokens
    kind: str  # the kind of these layers: a constant above, or another that is not understood
    window: int | None = None  # SLIDING_WINDOW: tokens that each token attends to, itself included
    ahead: bytes = b""  # if keys also cover the token after each token: for each of `tokens` the next token, as uint32
    together: int = 1  # blocks in a chunk of the engine's own slower tier; the engine finds only whole chunks
    lookahead: bytes = b""  # if keys also cover the tokens after their block: for each block these tokens, as uint32
    more: bool = False  # the next record continues this event
    below: bool = False  # the blocks are in a store below the engine, such as LMCache (see `Chunks`)

    @property
    def looks_ahead(self) -> int:
        """How many tokens after a block the block's key also covers."""
        return len(self.lookahead) // 4 // len(self.keys) if self.lookahead else 0


class Blocks(NamedTuple):
    """The block format of an engine, as far as its events have shown it."""

    size: int = 0  # tokens in a block of full attention; 0: not known yet
    ahead: int = 0  # how many tokens after a block the block's name also covers
    states: int = 0  # tokens in a block of Mamba layers; 0: no such block was reported

    @property
    def parts(self) -> int:
        """The number of tokens in a Mamba block if it is smaller than a full-attention block, else 0.

        With smaller Mamba blocks a hit may end after each of them.
        """
        return self.states if self.states < self.size else 0


UNTOLD = Blocks()
# The most tokens after a block that its name may also cover. They are an engine's speculative tokens, one to a few.
# Each of them is one more step in naming every prompt's blocks: with a million of them a short chat took 25 s.
MOST_AHEAD = 16
AGREEING = 3  # how many events must report the same other number before it replaces the known one


class Agreed:
    """One number of an engine's block format, which a single odd event does not change.

    The first event sets the number. Later it changes only after three events in a row (AGREEING) have reported the same
    other number. `known`: the number at present.
    """

    __slots__ = ("known", "_is_heard", "_other", "_times")

    def __init__(self, known: int, is_heard: bool):
        self.known, self._is_heard = known, is_heard
        self._other, self._times = known, 0  # the last other number, and how many events in a row have reported it

    def take(self, told: int, ends_other: bool = True) -> bool:
        """Note the number that an event reports; return whether it now equals the known number.

        The known number may change to the reported one first. `told`: the reported number. `ends_other`: whether an
        event that reports the known number resets the count of events in a row that reported another number.
        """
        if not self._is_heard:
            self.known, self._is_heard = told, True
        elif told != self.known:
            self._times = self._times + 1 if told == self._other else 1
            self._other = told
            if self._times < AGREEING:
                return False
            self.known = told
        elif not ends_other:
            return True
        self._times = 0
        return True


class Removed(NamedTuple):
    """The event that the engine dropped blocks from one memory tier and one cache group."""

    keys: Sequence[int | bytes]  # the engine's own keys of the blocks
    tier: str
    group: int


class Cleared(NamedTuple):
    """The event that the engine cleared its own KV cache; stores below the engine keep their blocks."""


class Batch(NamedTuple):
    """The events of one message of an engine."""

    timestamp: float  # when the engine sent it, in seconds by the engine's clock
    events: list[Stored | Removed | Cleared]
    passed_over: list[str]  # the reason for each event that could not be read


Decoder = Callable[[bytes], Batch]  # raises EventError

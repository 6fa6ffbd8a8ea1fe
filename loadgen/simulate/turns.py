"""What a simulated fleet is asked, and what became of it. Times are seconds of the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Turn:
    """One request: chained hashes of its prompt's full blocks, and of prompt and reply together."""
    hashes: list[int]
    tokens: int            # of the prompt
    output: int            # tokens of the reply
    all_hashes: list[int]
    think: float = 0.0     # seconds between the reply before and this request
    text: bool = False     # the prompt comes as text: an engine with a profile of that takes longer to read it

Conversation = Sequence[Turn]      # sent one after the other, each after the reply before it


@dataclass(slots=True)
class Record:
    """What became of one request."""
    turn: Turn
    sent: float
    replica: int = -1              # the last one it was sent to; -1: none was there
    predicted: int = 0             # cached tokens that its gateway promised
    expected_ttft: float = 0.0     # by the chosen replica's costs
    cached: int = 0                # cached tokens the engine found
    first: float = 0.0
    end: float = 0.0
    error: str | None = None       # named as `loadgen.records` names it
    detail: str = ""
    tried: tuple[int, ...] = ()    # replicas that were lost before they answered

    @property
    def tokens(self) -> int:
        return self.turn.tokens

    @property
    def output(self) -> int:
        return self.turn.output


@dataclass
class Result:
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0           # virtual time until the last request ended


def ideal_hit_rate(records: Sequence[Record], block_size: int = 16) -> float:
    """Share of prompt tokens one infinite cache would have had, seeing these requests as sent.

    A request's blocks count from the moment it is sent, its reply's from the moment it ends.
    """
    sent = [(r.sent, 0, n) for n, r in enumerate(records)] + [(r.end, 1, n) for n, r in enumerate(records)]
    seen: set[int] = set()
    hit = total = 0
    for _, ended, number in sorted(sent):
        turn = records[number].turn
        if ended:
            seen.update(turn.all_hashes)
            continue
        held = next((n for n, h in enumerate(turn.hashes) if h not in seen), len(turn.hashes))
        hit += min(held, (turn.tokens - 1) // block_size) * block_size
        total += turn.tokens
        seen.update(turn.hashes)
    return hit / total if total else 0.0

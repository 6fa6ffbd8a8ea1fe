"""The decoding batch: each request in it gets one token in each engine step.

While a request decodes, its length follows from the step's number, so the simulation does nothing for a request in a
step in which it neither starts a block, nor fills one, nor ends. Steps in which this holds for all requests (quiet
steps) can be taken at once.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from .blocks import Key
from .offload import Run
from .steps import EngineRequest


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A request inside the engine.

    While it decodes, its length is not kept up to date: it follows from the step's number and `base`.
    """

    request: EngineRequest
    limit: int  # output tokens after which it ends
    reason: str  # why it ends then: "stop" or "length"
    arrival: int  # its number in the order of arrival
    keys: list[Key] = field(init=False)  # keys of its blocks; more are added as output fills blocks
    tokens: int = field(init=False)  # prompt and output; while decoding: as of step `base`
    held: list[int] = field(default_factory=list)  # ids of the blocks that it uses
    computed: int = 0  # tokens with key/value computed; unused while decoding
    generated: int = 0  # output; while decoding: as of step `base`
    reported: int = 0  # output tokens already reported
    cached: int = -1  # tokens found cached at its first admission; -1: never admitted
    order: int = 0  # its number in the order of admission
    base: int = 0  # the step that ended its prefill
    due: int = -1  # the next step in which it needs work
    finish: int = -1  # the step that yields its last token
    run: Run | None = None  # the blocks that it fetches, or has fetched, from host memory
    ready: float = 0.0  # when the fetch is complete
    stored: int = 0  # blocks that the engine's cache had from the start, or that were fetched into it
    offered: int = 0  # chunks that were offered to host memory
    beside: list[list[int | None]] = field(default_factory=list)  # its block ids in further cache groups (`Groups`)
    junction: int = 0  # blocks that full attention had at admission, if the other groups had fewer

    def __post_init__(self):
        self.keys, self.tokens = list(self.request.blocks), self.request.prompt_tokens


class Batch:
    """The requests that decode, in order of admission. The engine adds and removes them.

    `now` is the number of the current step; the engine adds 1 to it at the beginning of each step.
    """

    __slots__ = ("now", "context", "sequences", "_due", "_block_size")

    def __init__(self, block_size: int):
        self.now = 0  # number of the step
        self.context = 0  # tokens of all requests, before the next step
        self.sequences: dict[Hashable, Sequence] = {}
        self._due: dict[int, list[Sequence]] = {}
        self._block_size = block_size

    def join(self, sequence: Sequence) -> None:
        """Add a request whose prompt is done and whose next token is known; it decodes from the next step on."""
        sequence.base = self.now
        sequence.finish = self.now + sequence.limit - sequence.generated
        self.sequences[sequence.request.id] = sequence
        self.context += sequence.tokens
        self.plan(sequence)

    def leave(self, sequence: Sequence, last: int) -> None:
        """Remove a request; `last`: the number of the last step that gave it a token."""
        del self.sequences[sequence.request.id]
        sequence.tokens += last - sequence.base
        sequence.generated += last - sequence.base
        self.context -= sequence.tokens
        sequence.due = sequence.finish = -1

    def plan(self, sequence: Sequence) -> None:
        """Store the number of the next step in which a decoding request starts a block, fills one or ends."""
        size = self._block_size
        offset = (sequence.tokens + self.now - sequence.base - 1) % size  # of the next token, within its block
        wait = 1 if offset == 0 else size - offset + (sequence.request.output_blocks is None)
        sequence.due = due = min(self.now + wait, sequence.finish)
        self._due.setdefault(due, []).append(sequence)

    def due(self) -> list[Sequence]:
        """Return the requests that need work in this step, first admitted first.

        A request may be in the list twice. Entries for requests that left the batch meanwhile are left out.
        """
        now = self.now
        due = [sequence for sequence in self._due.pop(now, ()) if sequence.due == now]
        if len(due) > 1:
            due.sort(key=lambda sequence: sequence.order)
        return due

    def quiet_steps(self) -> int:
        """Return how many of the next steps need no work for any request. The batch must not be empty."""
        return min(self._due) - self.now - 1

    def leap(self, steps: int) -> None:
        """Take `steps` quiet steps (those that need no work) at once."""
        self.now += steps
        self.context += steps * len(self.sequences)

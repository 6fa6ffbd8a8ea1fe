"""The decoding batch: one token per request and step, with work only for requests that need it.

While a request decodes, its length follows from the step number, so a step costs nothing for requests that neither
start a block, nor fill one, nor end. Steps in which no request does can be taken at once.
"""

from collections.abc import Hashable

from .offload import Run
from .steps import EngineRequest


class Sequence:
    """A request inside the engine. While it decodes, its length follows from the step number."""

    __slots__ = (
        "request",
        "keys",
        "held",
        "tokens",
        "computed",
        "generated",
        "limit",
        "reason",
        "reported",
        "cached",
        "order",
        "arrival",
        "base",
        "due",
        "finish",
        "wanted",
        "beside",
        "junction",
        "run",
        "ready",
        "stored",
        "offered",
    )

    def __init__(self, request: EngineRequest, limit: int, reason: str):
        self.request = request
        self.keys = list(request.blocks)  # grows as output fills blocks
        self.held: list[int] = []  # block ids
        self.tokens = request.prompt_tokens  # prompt and output; while decoding: as of step `base`
        self.computed = 0  # tokens with key/value computed; unused while decoding
        self.generated = 0  # output; while decoding: as of step `base`
        self.limit, self.reason = limit, reason
        self.reported = 0  # output tokens already reported
        self.cached = -1  # cache hits at first admission; -1: never admitted
        self.order = self.arrival = 0
        self.base = 0  # the step that ended its prefill
        self.due = -1  # the next step that needs to handle it
        self.finish = -1  # the step that yields its last token
        self.run: Run | None = None  # what it fetches, or has fetched
        self.ready = 0.0  # when the fetch is complete
        self.stored = 0  # blocks that the engine's cache had from the start, or that were fetched into it
        self.offered = 0  # chunks that were offered to host memory
        self.beside: list[list[int | None]] = []  # block ids of further cache groups, see `Groups`
        self.junction = 0  # blocks that full attention had at admission, if the other groups had fewer
        self.wanted = -1  # prompt tokens to compute, as of the first call of `outlook`


class Batch:
    """The requests that decode, in order of admission. Pure: the engine begins steps and adds and removes requests."""

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
        """Remove a request; `last` is the last step that gave it a token."""
        del self.sequences[sequence.request.id]
        sequence.tokens += last - sequence.base
        sequence.generated += last - sequence.base
        self.context -= sequence.tokens
        sequence.due = sequence.finish = -1

    def plan(self, sequence: Sequence) -> None:
        """Note the next step in which a decoding request starts a block, fills one or ends."""
        size = self._block_size
        offset = (sequence.tokens + self.now - sequence.base - 1) % size  # of the next token, within its block
        if offset == 0:
            wait = 1
        elif sequence.request.output_blocks is not None:
            wait = size - offset
        else:
            wait = size - offset + 1
        sequence.due = due = min(self.now + wait, sequence.finish)
        self._due.setdefault(due, []).append(sequence)

    def due(self) -> list[Sequence]:
        """Return the requests that need work in this step, first admitted first.

        An entry may be outdated because the request left the batch, or be listed twice.
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
        """Take `steps` quiet steps."""
        self.now += steps
        self.context += steps * len(self.sequences)

    def steps_until_free(self, blocks: int) -> int:
        """Return `Engine.steps_until_free` for this batch."""
        steps = 0
        for sequence in sorted(self.sequences.values(), key=lambda s: s.finish):
            if blocks <= 0:
                break
            blocks -= len(sequence.held)
            steps = sequence.finish - self.now
        return steps

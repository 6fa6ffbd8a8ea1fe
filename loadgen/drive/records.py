"""The record of one request, and the state of a whole load.

Times are seconds on one monotonic clock (`time.perf_counter`); lengths are tokens as the server counts them, None where
it does not report them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from loadgen.workload.conversations import Conversation, Offer, offer


@dataclass(slots=True)
class Record:
    """The record of one request and its reply; latencies are defined as in `vllm bench serve` and begin at `sent`."""

    conversation: str
    turn: int  # its number in the conversation, from 0
    due: float  # when it was to be sent by the schedule
    question: str = ""  # the user's last message, for the live view
    sent: float = 0.0  # latencies are counted from here, so they include the wait for a connection
    first: float | None = None  # when the first chunk that carries output came
    last: float = 0.0  # when the last chunk came, or the request failed
    gaps: list[float] = field(default_factory=list)  # seconds between chunks that carry output
    pieces: list[str] = field(default_factory=list)  # the text, chunk by chunk
    status: int = 0  # HTTP status; 0: no response came
    error: str | None = None  # class of failure: connect, timeout, closed, truncated, stream_error, http_503, ...
    detail: str = ""  # the failure in words
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None  # reported by the engine
    predicted_tokens: int | None = None  # predicted by a gateway, from its response header
    replica: str | None = None  # which answered, from a gateway's response header

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def e2e(self) -> float:
        return self.last - self.sent

    @property
    def lateness(self) -> float:
        """Seconds by which the request was sent after it was due, 0 when it was sent early.

        It may be half a millisecond early, as uvloop's timers have whole milliseconds.
        """
        return max(0.0, self.sent - self.due)

    @property
    def outputs(self) -> int:
        """The number of output tokens, or of chunks that carried output where the server reports no usage."""
        if self.output_tokens is not None:
            return self.output_tokens
        return len(self.gaps) + (self.first is not None)

    @property
    def tpot(self) -> float | None:
        """Time per output token: (E2E - TTFT) / (output tokens - 1); None for replies of one token."""
        if self.first is None or self.outputs < 2:
            return None
        return (self.last - self.first) / (self.outputs - 1)


class Load:
    """The state of a load while it is sent, and its result afterwards; `summary.summarise` computes its figures.

    Times are seconds. `starts`: when each conversation begins, from the beginning of the run; `max_concurrency`: the
    most requests in flight, or None for no limit; `users`: the number of users in a closed loop, each of whom has one
    conversation at a time, or None for an open loop.
    """

    connections = 0  # opened in the whole run
    replicas: Sequence[str] = ()  # ids of the known replicas, including those that got no request

    def __init__(
        self,
        conversations: Sequence[Conversation],
        starts: Sequence[float],
        max_concurrency: int | None = None,
        users: int | None = None,
    ):
        self.conversations, self.starts = conversations, starts
        self.max_concurrency, self.users = max_concurrency, users
        self.total = sum(conversation.requests for conversation in conversations)
        self.done: list[Record] = []
        self.began = self.ended = 0.0
        self.cpu_seconds = 0.0
        self.busiest_second = 0.0  # the most of a core (1: all of it) that the generator used in any one second
        self.interrupted = False

    @property
    def not_sent(self) -> int:
        """The number of turns never sent, because an earlier turn failed or the run was stopped."""
        return self.total - len(self.done) if self.ended else 0

    @property
    def offered(self) -> Offer:
        return offer(self.conversations, self.starts)

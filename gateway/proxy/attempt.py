"""One leg of an exchange: what was sent to one replica, and what came back.

An attempt is the sink of its upstream connection. It holds what is known of the leg; what follows from each call is
for the conductor to say.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from ..http.upstream import Head, Upstream, UpstreamError
from .states import ATTEMPT_TRANSITIONS, AttemptEvent, AttemptState

if TYPE_CHECKING:
    from policies import Placement

    from ..http.downstream import Downstream
    from ..prompt import Prompt
    from .backend import Backend

# Reads kept to find the usage in: vLLM writes it, what ends the stream ([DONE], message_stop) and the last
# chunk one by one, and each may be a read of its own. One more, should a read end within the usage.
TAIL = 4
# And of each as much as matters, where a client stops reading: a read may be 256 kB.
TAIL_BYTES = 4096
CONNECTING, ANSWERING = AttemptState.CONNECTING, AttemptState.ANSWERING


class AttemptHandler(Protocol):
    """Does what follows from each call of an attempt's replica."""

    def connected(self, attempt: Attempt, upstream: Upstream) -> None: ...
    def head(self, attempt: Attempt, body: bytes) -> None: ...
    def on_body(self, attempt: Attempt, data: bytes) -> None: ...
    def on_complete(self, attempt: Attempt) -> None: ...
    def lost(self, attempt: Attempt, error: UpstreamError) -> None: ...


class Attempt:
    __slots__ = (
        # given
        "backend", "placement", "prompt", "new_connection", "without_ids",
        # whose it is: the exchange, its client and who conducts both; only None where the bytes pass elsewhere
        "exchange", "client", "conductor",
        # what was sent
        "state", "upstream", "sent_ids",
        # the answer: its status and head, and the status that an error behind a 200 amounts to, 0 without one
        "status", "response_head", "fault", "streams",
        # first bytes of its body that are held back, since nothing of an answer is in them
        "withheld",
        # the answer as it passes
        "tail", "pieces", "seen_pieces", "seen_at",
        # monotonic seconds, 0.0 for what did not happen; `first_at`: of the answer itself, not of other bytes
        "begun_at", "sent_at", "first_at", "ended_at",
        # why it failed, if it did
        "error",
        # with traces on: its span, and the seconds to the first token that were predicted when it began
        "context", "predicted_ttft",
    )  # fmt: skip

    def __init__(
        self,
        backend: Backend,
        placement: Placement,
        prompt: Prompt | None,
        streams: bool,
        begun_at: float,
        *,
        new_connection: bool = False,
        without_ids: bool = False,
    ):
        """`new_connection`: not on a kept connection. `without_ids`: without token ids, whatever the replica takes."""
        self.backend, self.placement, self.prompt = backend, placement, prompt
        self.new_connection, self.without_ids, self.streams = new_connection, without_ids, streams
        self.exchange: Any = None  # an `Exchange`, whose module imports this one
        self.client: Downstream = None  # type: ignore[assignment]  # until it is the exchange's
        self.conductor: AttemptHandler = None  # type: ignore[assignment]  # as the client
        self.state = CONNECTING
        self.upstream: Upstream | None = None
        self.response_head: Head = None  # type: ignore[assignment]  # until the head is there
        self.sent_ids = False
        self.status = self.fault = self.pieces = self.seen_pieces = 0
        self.withheld = b""
        self.tail: deque[bytes] = deque(maxlen=TAIL)
        self.begun_at = begun_at
        self.seen_at = self.sent_at = self.first_at = self.ended_at = 0.0
        self.error: Exception | None = None
        self.context: Any = None
        self.predicted_ttft = 0.0

    def advance(self, event: AttemptEvent) -> None:
        self.state = ATTEMPT_TRANSITIONS[self.state, event]

    def end_as(self, event: AttemptEvent, error: Exception | None = None) -> None:
        """Nothing stays connected: closing is what makes an engine give a request up."""
        self.state = ATTEMPT_TRANSITIONS[self.state, event]
        self.ended_at, self.error, self.withheld = monotonic(), error, b""
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.drop()

    def repeat(self, *, new_connection: bool = False, without_ids: bool = False) -> Attempt:
        """The next one, to the same replica and on the same reservation."""
        streams = self.prompt is not None and self.prompt.stream
        return Attempt(
            self.backend,
            self.placement,
            self.prompt,
            streams,
            monotonic(),
            new_connection=new_connection or self.new_connection,
            without_ids=without_ids or self.without_ids,
        )

    # --- what the replica's side calls

    def connected(self, upstream: Upstream) -> None:
        self.conductor.connected(self, upstream)

    def head(self, status: int, head: Head, body: bytes) -> None:
        self.status, self.response_head = status, head
        self.conductor.head(self, body)

    def data(self, data: bytes) -> None:
        if self.state is ANSWERING:
            self.tail.append(data)
            self.pieces += 1
            self.client.transport.write(data)
        else:
            self.conductor.on_body(self, data)

    def end(self) -> None:
        self.upstream = None
        self.conductor.on_complete(self)

    def lost(self, error: UpstreamError) -> None:
        self.conductor.lost(self, error)

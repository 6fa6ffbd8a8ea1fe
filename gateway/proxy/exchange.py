"""A client's request, from its last byte in to the last byte of its answer out.

An exchange is driven by calls from the client's side, from whoever prepares its prompt and finds it a replica, and from
the sweep's deadlines. Each becomes an event; the table in `states` says what follows, and the conductor does it.
Nothing waits here, and no task is made for a request unless its prompt is long or a connection has to be opened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ApiError
from ..http.downstream import Downstream
from ..http.messages import Request
from .attempt import TAIL, TAIL_BYTES, Attempt, AttemptHandler
from .blame import UnattributedError
from .states import AttemptState, Event, State

if TYPE_CHECKING:
    from ..prompt import Prompt
    from .backend import Backend
PREPARING, PREPARED, PLACED = State.PREPARING, Event.PREPARED, Event.PLACED


class ExchangeHandler(AttemptHandler, Protocol):
    """Does what follows from each event of an exchange, and of its attempts."""

    def dispatch(self, exchange: Exchange, event: Event, detail: Any = None) -> None: ...


class Exchange:
    __slots__ = (
        # given
        "conductor", "client", "request", "id", "label",
        # found out: its prompt, or the model that a request without one names; the stored response it is about, if any,
        # which only one replica has
        "state", "prompt", "model", "response",
        # the legs, the last one at the end; the status of an answer that is ours
        "attempts", "status",
        # replicas that failed it; how many of them went down or hung under it; errors that it was answered with
        "tried", "crash_count", "unattributed_errors",
        # monotonic seconds
        "begun", "prepared_at",
        # with traces on, its trace, and why it was answered with an error of ours or cut
        "trace", "error",
    )  # fmt: skip

    def __init__(self, conductor: ExchangeHandler, client: Downstream, request: Request, request_id: bytes, label: str):
        self.conductor = conductor
        self.client = client
        self.request = request
        self.id = request_id
        self.label = label
        self.state = PREPARING
        self.prompt: Prompt | None = None
        self.model: str | None = None
        self.response: str | None = None
        self.attempts: list[Attempt] = []
        self.status = self.crash_count = 0
        self.tried: tuple[Backend, ...] = ()
        self.unattributed_errors: tuple[UnattributedError, ...] = ()
        # The clock starts when the request is there: what its upload took is the client's.
        self.begun = monotonic()
        self.prepared_at = 0.0
        self.trace: Any = None
        self.error: Exception | None = None

    @property
    def attempt(self) -> Attempt | None:
        """The last one."""
        return self.attempts[-1] if self.attempts else None

    @property
    def answered_with(self) -> int:
        """The status that the client was told, ours or its replica's; 0 before."""
        return self.status or (self.attempts[-1].status if self.attempts else 0)

    @property
    def fault(self) -> int:
        """The status that an error behind a replica's 200 amounts to, 0 without one."""
        return self.attempts[-1].fault if self.attempts and not self.status else 0

    @property
    def needs_replica(self) -> bool:
        """Whether a replica is wanted."""
        return self.state is State.PLACING

    @property
    def unanswered(self) -> Attempt | None:
        """What was sent, and nothing of its answer has gone to the client."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.state is AttemptState.AWAITING else None

    def run_isolated(self, step: Callable[..., None], *given: object) -> None:
        """Call `step`; an exception in it, a bug of ours, ends this request alone, with an answer."""
        try:
            step(*given)
        except Exception as error:
            self.client.failed(self, error)

    def forget_body(self) -> None:
        """It will not be sent again. Whoever else has this request may have it for long: the client's side until the
        answer ends, a queue until its turn."""
        self.request.body = b""
        self.client.release()

    # --- what the client's side calls

    def client_gone(self) -> None:
        if self.state is not State.ENDED:
            self.conductor.dispatch(self, Event.GONE)

    def pause(self) -> None:
        attempt = self.attempt
        if attempt is not None and attempt.upstream is not None:
            attempt.upstream.pause()
            attempt.tail = deque((piece[-TAIL_BYTES:] for piece in attempt.tail), TAIL)

    def resume(self) -> None:
        attempt = self.attempt
        if attempt is not None and attempt.upstream is not None:
            attempt.upstream.resume()

    # --- what those call who prepare its prompt and find it a replica

    def prepared(self, prompt: Prompt | None) -> None:
        if self.state is PREPARING:
            self.prompt = prompt
            if prompt is not None:
                self.response = prompt.previous_response
            self.conductor.dispatch(self, PREPARED)

    def refused(self, error: ApiError) -> None:
        if self.state is PREPARING:
            self.conductor.dispatch(self, Event.REFUSED, error)

    def add_attempt(self, attempt: Attempt) -> None:
        """Go on with this attempt: a replica is found, and the request is counted there."""
        attempt.exchange, attempt.client, attempt.conductor = self, self.client, self.conductor
        self.prompt = attempt.prompt
        self.attempts.append(attempt)

    def placed(self) -> None:
        self.conductor.dispatch(self, PLACED)

    def unplaced(self, error: ApiError) -> None:
        """Nobody can take it."""
        error.__traceback__ = None  # it has this request in its frames, and a trace keeps the error: a cycle
        if self.tried:
            self.conductor.dispatch(
                self,
                Event.EXHAUSTED,
                ApiError(502, f"no replica is left after {len(self.tried)} attempt(s); the last: {self.last_failure}"),
            )
        else:
            self.conductor.dispatch(self, Event.REFUSED, error)

    @property
    def last_failure(self) -> str:
        return f"replica {self.attempts[-1].backend.id}: {self.attempts[-1].error}"

"""The requests for which a replica is chosen: those that this gateway forwards, and those that another proxy does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Literal

from ...http.messages import Request
from ..exchange import Attempt, Exchange

if TYPE_CHECKING:
    from ...prompt import Prompt
    from ..backend import Backend


class ExternalRequest:
    """A request that another proxy forwards to the replica chosen here (`/decide`, see `decisions`).

    It has one attempt, and a lease instead of a connection: the other proxy must report progress before the lease ends.

    `request`: its head, without a body.
    `seconds`: the length of the lease.
    `found`: a future, whose result is the attempt once a replica is chosen.
    `timers`: the running timers of the lease, by their callbacks.
    """

    __slots__ = ("id", "request", "prompt", "tried", "seconds", "begun", "size", "attempt", "stages", "found", "timers")
    # Answers are not seen here, so it is not known which replica has a stored response. The other proxy authenticates
    # clients, so there is no tenant.
    response = model = tenant = None
    able: tuple[Backend, ...] = ()  # it is in one leg
    attempt_type = Attempt
    is_forwarded: Literal[False] = False
    stays_whole = True

    def __init__(self, id: str, request: Request, prompt: Prompt, tried: tuple[Backend, ...], seconds: float):
        self.id, self.request, self.prompt, self.tried, self.seconds = id, request, prompt, tried, seconds
        self.begun = monotonic()
        self.attempt: Attempt = None  # type: ignore[assignment]  # until a replica is found
        self.stages: list[tuple[str, float]] = []
        self.found: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()
        self.timers: dict[Callable[[ExternalRequest], None], asyncio.TimerHandle] = {}
        self.size = 2000 + 8 * len(prompt.hashes) + 4 * len(prompt.model)  # approximate bytes of memory

    @property
    def needs_replica(self) -> bool:
        return not self.found.done()

    def add_attempt(self, attempt: Attempt) -> None:
        self.attempt, self.prompt = attempt, attempt.prompt or self.prompt
        attempt.sent_elsewhere()

    def placed(self) -> None:
        self.request.set_headers([])
        if not self.found.done():  # the caller is still there
            self.found.set_result(self.attempt)

    def unplaced(self, error: Exception) -> None:
        error.__traceback__ = None  # its frames refer to this request, and `found` to the error: a cycle
        if not self.found.done():
            self.found.set_exception(error)

    def run_isolated(self, step: Callable[..., None], *given: object) -> bool:
        try:
            step(*given)
            return True
        except Exception as error:
            self.unplaced(error)
            return False


Asker = Exchange | ExternalRequest  # a request for which a replica is to be chosen

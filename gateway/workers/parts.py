"""Parts of the data path that are others in a worker than in a gateway of one process."""

from __future__ import annotations

from collections.abc import Callable

from policies import Demand

from ..dispatch.dispatcher import Dispatcher
from ..prompt import Prompt
from ..wire.downstream import Downstream
from .ledger import Board, WorkerLedger


class WorkerDispatcher(Dispatcher):
    """Chooses by what all workers have sent."""

    def demand(self, prompt: Prompt | None, now: float) -> Demand:
        ledger: WorkerLedger = self.router.ledger
        if self.shared is None or not self.shared.joined:
            ledger.catch_up(now)
        else:  # Redis tells of siblings as it does of other gateways
            ledger.lose_sight()
        return Dispatcher.demand(self, prompt, now)  # super() takes 1,000 instructions


class Followed:
    """In place of a replica's EventIntake, which the control process has."""

    def __init__(self, resync: Callable[[], None]):
        self.resync = resync
        self.finished = 0

    def request_finished(self, prompt_blocks: int) -> None:
        self.finished += prompt_blocks > 0


def counted(board: Board, worker: int) -> type[Downstream]:
    """Clients of which the control process knows when they leave."""

    class Client(Downstream):
        __slots__ = ()

        def connection_lost(self, exc: Exception | None) -> None:
            board.close(worker)
            super().connection_lost(exc)

    return Client

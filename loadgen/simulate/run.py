"""Play a workload on a simulated fleet's virtual clock; the records are those that `drive.run` makes with servers."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Sequence

from loadgen.drive import records
from loadgen.workload.conversations import Conversation, Workload

from .fleet import Fleet
from .links import Transfer
from .prompts import Prompts, Said
from .setting import Setting
from .turns import Record


class Outcome(records.Load):
    """The result of a simulated load, in the form of a measured one; times are seconds of the virtual clock."""

    replicas: Sequence[str] = ()  # names of all replicas, including those that got no request
    transfers: Sequence[Transfer] = ()  # of KV caches between engines


def simulate(workload: Workload, setting: Setting) -> Outcome:
    """Play the workload to its end on a fleet of this setting, and return the outcome."""
    fleet = Fleet(**vars(setting), keep=False)
    for outage in setting.outages:
        fleet.at(outage.at, fleet.lose, outage.replica)
        if outage.until is not None:
            fleet.at(outage.until, fleet.restore, outage.replica)
    player = _Player(workload, setting, fleet)
    gc.collect()
    gc.freeze()  # a simulation makes no reference cycles, and searching for them would take a third of the time
    collecting = gc.isenabled()
    gc.disable()
    try:
        return player.play()
    finally:
        if collecting:
            gc.enable()
        gc.unfreeze()


class _Player:
    """A player of a workload: sends the turns of each conversation when they are due, as `drive.run.Run` does."""

    def __init__(self, workload: Workload, setting: Setting, fleet: Fleet) -> None:
        self.workload, self.fleet = workload, fleet
        self.prompts = Prompts(setting.profiles[0].block_size, setting.salt, setting.vocabulary, setting.engine_replies)
        self.outcome = Outcome(workload.conversations, workload.starts, setting.max_concurrency, setting.users)
        self.outcome.replicas = fleet.names
        self.room = setting.max_concurrency
        self.queue: deque[Callable[[], None]] = deque()
        self.new = deque(workload.conversations)

    def play(self) -> Outcome:
        if self.outcome.users:
            for _ in range(self.outcome.users):
                self._next_user()
        else:
            for conversation, start in zip(self.workload.conversations, self.workload.starts, strict=True):
                self.fleet.at(start, self._converse, conversation, 0, Said(), None)
        self.fleet.run()
        self.outcome.transfers = self.fleet.links.transfers
        self.outcome.ended = max((record.last for record in self.outcome.done), default=0.0)
        return self.outcome

    def _next_user(self) -> None:
        if self.new:
            self.fleet.at(self.fleet.now, self._converse, self.new.popleft(), 0, Said(), self._next_user)

    def _converse(self, conversation: Conversation, number: int, said: Said, then: Callable[[], None] | None) -> None:
        """Send turn `number` of a conversation, or queue it while `max_concurrency` requests are in flight.

        `said`: the conversation before this turn; `then`: called when the conversation is over, even if its forks are
        not.
        """
        due = self.fleet.now
        if self.room == 0:
            self.queue.append(lambda: self._send(conversation, number, said, due, then))
            return
        if self.room is not None:
            self.room -= 1
        self._send(conversation, number, said, due, then)

    def _send(
        self, conversation: Conversation, number: int, said: Said, due: float, then: Callable[[], None] | None
    ) -> None:
        """Send turn `number` of a conversation now, and let the conversation go on when the turn has ended.

        `said`: the conversation before this turn; `due`: when the turn was to be sent; `then`: called when the
        conversation is over.
        """
        turn = conversation.turns[number]
        last = number + 1 == len(conversation.turns) and not turn.forks
        said, request = self.prompts.ask(said, turn, conversation.extra, not last)

        def ended() -> None:
            self.outcome.done.append(_told(record, conversation.id, number, due, self.fleet))
            if self.queue:
                self.queue.popleft()()
            elif self.room is not None:
                self.room += 1
            self._go_on(conversation, number, said, record, then)

        record = self.fleet.send(request, conversation.id, ended)

    def _go_on(
        self, conversation: Conversation, number: int, said: Said, record: Record, then: Callable[[], None] | None
    ) -> None:
        """Schedule what follows turn `number`, which has ended: forks and the next turn, or the conversation's end.

        `said`: the conversation with this turn's messages; `then`: called when the conversation is over.
        """
        fleet, turn, following = self.fleet, conversation.turns[number], number + 1
        goes_on = following < len(conversation.turns)
        if record.error and self.prompts.says(turn):
            goes_on = False  # without a reply the conversation cannot continue
        elif goes_on or turn.forks:
            said = self.prompts.answer(said, turn)
            for fork in turn.forks:
                fleet.at(fleet.now + fork.turns[0].think, self._converse, fork, 0, said, None)
        if goes_on:
            fleet.at(
                fleet.now + conversation.turns[following].think, self._converse, conversation, following, said, then
            )
        else:
            fleet.session_finished(conversation.id)
            if then is not None:
                then()


def _told(record: Record, conversation: str, number: int, due: float, fleet: Fleet) -> records.Record:
    """Convert a simulated request's record to the form of a live run: what a client of the gateway would have seen."""
    answered = record.error is None
    return records.Record(
        conversation,
        number,
        due,
        sent=record.sent,
        first=record.first or None,
        last=record.end,
        status=200 if answered or record.error == "stream_error" else int(record.error.removeprefix("http_")),
        error=record.error,
        detail=record.detail,
        prompt_tokens=record.tokens if answered else None,
        output_tokens=record.output if answered else None,
        cached_tokens=record.cached if answered else None,
        predicted_tokens=record.predicted if answered else None,
        replica=fleet.names[record.replica] if record.replica >= 0 else None,
        gaps=record.gaps,
    )

"""The control process: it accepts clients for the workers, tells them of replicas, and replaces those that end.

It has all that a gateway is one of: the replicas and their events (or Redis), the admin side, and the writing end of
the block table. The data path is the workers'. In place of a `wire.Server` it listens, and hands each connection to the
worker that has the fewest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import socket
from time import monotonic
from typing import TYPE_CHECKING, Any

from cachemap.memory import segment
from cachemap.processes import LeadingMap
from cachemap.ring import BYTES as RING_BYTES
from cachemap.ring import Ring
from replicas import Replica

from ..config import ConfigError
from ..telemetry.metrics import Reading
from .door import Door
from .ledger import Board, ControlLedger
from .member import NOTHING, Member
from .questions import Questions

if TYPE_CHECKING:
    from ..app import Gateway

log = logging.getLogger("hitherto.workers")

PAUSES = (0.1, 30.0)  # seconds before a worker that ended is replaced, doubling while none lives ...
SETTLED = 10.0  # ... this long
STALE = 2.0  # seconds without a word from a worker after which others are preferred
START_SECONDS = 60.0


class Workers:
    """All of them. In the place of `wire.Server`: `start`, `drain`, `close`."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._settings = settings = gateway.settings
        self.count = count = settings.workers
        self._board_memory, self._ring_memory = segment(Board.size(count)), segment(RING_BYTES * (count + 1))
        self.board = Board(memoryview(mmap.mmap(self._board_memory, 0)), count)
        self.ledger = ControlLedger(self.board)
        self.members: list[Member] = []
        self.restarts = 0
        self.repairs = {"part": 0, "sum": 0}  # by the shared ledgers of all workers, as `SharedLedger.repairs`
        self._tasks: list[asyncio.Task[None]] = []
        self._asking: set[asyncio.Task[None]] = set()  # for workers whose clients want models that nobody serves
        self._first: list[asyncio.Future[None]] = []
        self._door = Door(self._place)
        self._stopping = self._telling = False
        self._loaded = asyncio.Event()
        self.questions = Questions(self)
        rings = memoryview(mmap.mmap(self._ring_memory, 0))
        self.map = LeadingMap(settings.cache_budget, Ring(rings[RING_BYTES * count :]), self._tell_soon, self._cleared)

    @property
    def live(self) -> list[Member]:
        return [member for member in self.members if member.live]

    # --- as a server

    async def start(self, host: str, port: int) -> int:
        """Listen, start all workers; returns the port. OSError if it is taken, ConfigError if a worker cannot start."""
        try:
            port = await self._door.listen(host, port)
        except OSError:
            self._door.close()
            raise
        self._first = [asyncio.get_running_loop().create_future() for _ in range(self.count)]
        self._tasks = [asyncio.create_task(self._keep(index), name=f"worker {index}") for index in range(self.count)]
        try:
            async with asyncio.timeout(START_SECONDS):
                found = await asyncio.gather(*self._first, return_exceptions=True)
        except TimeoutError:
            found = [ConfigError(f"not all workers were ready within {START_SECONDS:g} s")]
        for wrong in filter(None, found):
            await self.close()
            raise wrong
        return port

    async def drain(self, seconds: float) -> int:
        """Workers refuse new requests and end those they have; returns how many were cut at the deadline."""
        for member in self.live:
            member.channel.send({"do": "drain", "seconds": seconds})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + 2):
                for member in self.live:
                    await member.drained.wait()
        cut = sum(member.cut for member in self.members)
        await self.close()
        return cut

    async def close(self) -> None:
        """Stop listening and end all workers, with whatever they have."""
        self._stopping = True
        self._door.close()
        for member in self.members:
            member.channel.close()  # which ends it
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=3)
            for member in self.members if late else ():
                member.kill()
            for task in late:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- processes

    async def _keep(self, index: int) -> None:
        """One worker after another, as long as the gateway lives."""
        pause = PAUSES[0]
        while not self._stopping:
            try:
                member = await self._start(index)
            except OSError as error:
                log.error("worker %d cannot be started: %s", index, error)
                await asyncio.sleep(PAUSES[1])
                continue
            code = await member.process.wait()
            self._ended(member)
            if self._stopping:
                return
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            if not self._first[index].done():
                self._first[index].set_exception(ConfigError(f"a worker ended with {how} while it started; its own lines say why"))
                return
            if monotonic() - member.begun > SETTLED:
                pause = PAUSES[0]
            log.warning("worker %d (process %d) ended with %s, its clients' connections with it; another one is started in %g s", index, member.process.pid, how, pause)
            self.restarts += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSES[1])

    async def _start(self, index: int) -> Member:
        costs = await self.questions.costs()
        member = await Member.start(index, self._heard, self._left)
        self.members.append(member)
        hello = {
            "settings": self._settings.model_dump(mode="json"),
            "index": index,
            "model_dir": self._model_dir(),
            "served_name": self._gateway.served_name,
            "costs": costs,
        }
        member.channel.send(hello, [self._board_memory, self._ring_memory])
        member.model_dir = hello["model_dir"]
        self.tell(member)
        member.channel.send({"do": "go"})
        if self._stopping:
            member.channel.close()
        return member

    def _left(self, member: Member) -> None:
        """Its end of the channel is closed: it is dying, or not of use any more."""
        member.live = False
        member.kill()

    def _ended(self, member: Member) -> None:
        member.live = False
        member.channel.close()
        member.drained.set()
        self.members.remove(member)
        self._loaded.set()
        self.questions.ended(member)
        self.board.clear(member.index)
        self._door.let_in(bool(self.live) and not self._stopping)

    # --- connections

    def _place(self, connection: socket.socket) -> bool:
        """The worker with the fewest gets it; one that has said nothing for a while, last."""
        now = monotonic()
        for member in sorted(self.live, key=lambda one: (now - one.heard > STALE, self.connections(one), one.assigned)):
            if member.channel.give(connection):
                member.assigned += 1
                return True
        return False

    def connections(self, member: Member) -> int:
        return member.assigned - self.board.closed(member.index)

    # --- what workers are told

    def _tell_soon(self) -> None:
        """At the loop's next turn: whoever changes something now may change more."""
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self.tell)

    def tell(self, member: Member | None = None) -> None:
        """Whatever is not as the workers were told, or as this one was."""
        self._telling = False
        members = [member] if member else self.members
        if not members:
            return
        gateway = self._gateway
        for id in gateway.dispatcher.backends:
            self.ledger.own(id)  # into the loads
        tables, pipeline = self.map.tables(), gateway.dispatcher.pipeline
        ways = {"block_size": pipeline.block_size, "max_model_len": pipeline.max_model_len, "version": pipeline.version, "model_dir": self._model_dir(),
                "tokenizer": pipeline.tokenizer_state()}  # fmt: skip
        facts = {id: self._facts(replica) for id, replica in gateway.fleet.replicas.items()}
        for one in members:
            try:
                one.tell(tables, ways, facts)
            except OSError as error:  # no descriptor left to tell with; next time
                log.error("worker %d cannot be told of what changed: %s", one.index, error)

    async def have_model(self) -> None:
        """Until all have tried to read the model that was learned."""
        self.tell()
        while any(one.model_dir != self._model_dir() for one in self.members):
            self._loaded.clear()
            await self._loaded.wait()

    def _model_dir(self) -> str | None:
        return self._gateway.model_dir and str(self._gateway.model_dir)

    def _facts(self, replica: Replica) -> dict[str, Any]:
        """What the data path needs to know of a replica."""
        facts = {name: getattr(replica, name) for name in FACTS}
        scrape = replica.scrape
        facts["models"] = dict(replica.models)
        facts["scrape"] = scrape and [scrape.at, scrape.waiting, scrape.kv_usage]
        backend = self._gateway.dispatcher.backends.get(replica.id)
        if backend is not None and backend.replica is replica:
            facts |= {"slot": backend.slot, "observed": self.map.observes(backend.slot), "followed": backend.intake is not None}
        return facts

    def _cleared(self, slot: int) -> None:
        for member in self.members:
            member.channel.send({"do": "clear", "slot": slot})
        self._tell_soon()

    # --- what they tell

    def _heard(self, member: Member, message: dict[str, Any]) -> None:
        member.heard = monotonic()
        getattr(self, "_heard_" + message.pop("do"))(member, **message)

    def _heard_ready(self, member: Member) -> None:
        member.live = True
        self._door.let_in(not self._stopping)
        if not self._first[member.index].done():
            self._first[member.index].set_result(None)
        else:
            log.info("worker %d (process %d) has taken its place", member.index, member.process.pid)

    def _heard_loaded(self, member: Member, model_dir: str) -> None:
        member.model_dir = model_dir
        self._loaded.set()

    def _heard_traffic(self, member: Member, news: list[tuple[str, str | None, int]]) -> None:
        for replica, fault, count in news:
            self._gateway.traffic(replica, fault, count)

    def _heard_beat(self, member: Member, grown: dict[str, list], replicas: dict[str, dict[str, Any]], **rest: Any) -> None:
        """A few times a second: what it counted, and what it saw of replicas where that changed."""
        gateway = self._gateway
        gateway.metrics.add(grown, gateway.fleet.replicas)
        member.requests += sum(by for _, by in grown.get("requests", ()))
        member.joined, member.reason, member.held = rest["joined"], rest["reason"], rest["held"]
        gateway.background.add(rest["failures"])
        for what, by in rest["repairs"].items():
            self.repairs[what] += by
        member.seen |= replicas
        for id, seen in replicas.items():
            backend = gateway.dispatcher.backends.get(id)
            if backend is None:
                continue
            backend.drift.add(*seen["drift"])
            if seen["cached_tokens"] is not None:
                backend.replica.cached_tokens = seen["cached_tokens"]
            if seen["takes_ids"] != "not tried yet":
                backend.replica.takes_ids = seen["takes_ids"]
            for _ in range(seen["finished"] if backend.intake is not None else 0):
                backend.intake.request_finished(1)

    def _heard_resync(self, member: Member, id: str) -> None:
        backend = self._gateway.dispatcher.backends.get(id)
        if backend is not None:
            backend.drift.reset()
            if backend.intake is not None:
                backend.intake.resync()
            else:
                self.map.clear(backend.slot)

    def _heard_ask_models(self, member: Member) -> None:
        async def ask() -> None:
            await self._gateway.dispatcher.newcomers.asked()
            self.tell()
            member.channel.send({"do": "models_asked"})

        task = asyncio.ensure_future(ask())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def _heard_drained(self, member: Member, cut: int) -> None:
        member.cut = cut
        member.drained.set()

    def _heard_answered(self, member: Member, number: int, **answer: Any) -> None:
        self.questions.answered(member, number, answer)

    # --- what the admin side asks

    def waited(self, replica: str) -> float:
        now = monotonic()
        sent = (at for member in self.members if (at := member.seen.get(replica, NOTHING)["sent_at"]) is not None)
        return now - min(sent, default=now)

    @property
    def shared_ledger(self) -> Workers | None:
        """With Redis, in place of a SharedLedger for people to look at."""
        return self if self._settings.redis_url else None

    @property
    def joined(self) -> bool:
        return bool(self.live) and all(member.joined for member in self.live)

    @property
    def reason(self) -> str:
        return "; ".join(sorted({member.reason for member in self.live})) or "no worker is ready"

    def status(self) -> list[dict[str, Any]]:
        return [
            {"worker": one.index, "pid": one.process.pid, "ready": one.live, "connections": self.connections(one), "requests": one.requests, "up_seconds": round(monotonic() - one.begun, 3)}
            for one in sorted(self.members, key=lambda one: one.index)
        ]

    def modelled(self, replica: str) -> int:
        """Blocks that a replica without events is thought to have; each worker has its own idea."""
        return max((member.seen.get(replica, NOTHING)["modelled"] for member in self.members), default=0)

    def reading(self) -> Reading:
        """For `Metrics.read_from`."""
        members = {str(one.index): one for one in self.members}
        backends = self._gateway.dispatcher.backends
        return {
            "client_connections": sum(map(self.connections, self.members)),
            "request_bytes": sum(member.held for member in self.members),
            "upstream_connections": {id: sum(one.seen.get(id, NOTHING)["idle"] for one in self.members) + self.ledger.own(id)[0] for id in backends},
            "worker_up": {index: float(one.live) for index, one in members.items()},
            "worker_connections": {index: self.connections(one) for index, one in members.items()},
            "worker_requests": {index: one.requests for index, one in members.items()},
            "worker_restarts": self.restarts,
        }


# Of a replica, what workers are told as it stands.
FACTS = ("id", "url", "host", "port", "managed", "rank", "state", "reason", "incarnation", "address", "models", "block_size", "num_blocks", "max_model_len", "version")

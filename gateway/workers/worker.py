"""One worker: the whole data path in a process of its own, and nothing else.

    python -m gateway.workers.worker DESCRIPTOR        (started by `control`, never by hand)

Clients come over the channel, accepted by the control process, and so does all that is known of replicas. Who holds what
is read in the control process's block table, what siblings have sent where in their rings and on their pages. Back go
counts, what traffic showed of replicas, and wishes. When the control process is gone, however it went, so is this one.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
import mmap
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import orjson
import uvloop

from cachemap.background import Background
from cachemap.processes import FollowingMap
from cachemap.ring import BYTES as RING_BYTES
from cachemap.ring import Reader, Ring
from policies import CostGroup
from replicas import Replica, State, tls

from .. import datapath
from ..config import ConfigError, Settings
from ..dispatch.backend import Backend
from ..dispatch.decisions import Decisions
from ..dispatch.life import Failure
from ..model import model_dir
from ..prompt import PromptError
from ..prompt.pipeline import Pipeline
from ..telemetry import log as lines
from ..telemetry import traces
from ..telemetry.metrics import Metrics
from ..wire.server import Server
from .channel import Channel
from .ledger import Board, WorkerLedger
from .parts import Followed, WorkerDispatcher, counted
from .questions import mark

log = logging.getLogger("hitherto.workers")

BEAT_SECONDS = 0.25
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


class Worker:
    def __init__(self, end: socket.socket, hello: dict[str, Any], board: int, rings: int):
        self.settings = settings = Settings.model_validate(hello["settings"])
        self.index = index = hello["index"]
        count = settings.workers
        self.board = Board(memoryview(mmap.mmap(board, 0)), count)
        self._client = counted(self.board, index)
        memory = memoryview(mmap.mmap(rings, 0))
        parts = [memory[RING_BYTES * number : RING_BYTES * (number + 1)] for number in range(count + 1)]
        others = [Reader(part) for number, part in enumerate(parts) if number != index]
        self.map = FollowingMap(settings.cache_budget // count, Ring(parts[index]), others, self._ask_resync_of)
        self.metrics = Metrics()
        self.ledger = WorkerLedger(self.board, index)
        self.costs = CostGroup(hello["costs"])
        self.replicas: dict[str, Replica] = {}
        self.background = Background()
        self.served_name, self.model_dir = hello["served_name"], hello["model_dir"]
        self.spans = traces.start()
        self.dispatcher = datapath.dispatcher(
            settings,
            self.spans,
            WorkerDispatcher,
            pipeline=datapath.pipeline(settings, self.model_dir and Path(self.model_dir), self.served_name),
            cachemap=self.map,
            metrics=self.metrics,
            ledger=self.ledger,
            costs=self.costs,
            replicas=self.replicas,
            on_traffic=self._traffic,
            ask_models=self._ask_models,
        )
        self.decisions = Decisions(self.dispatcher, mark(index))
        self.server = Server(self.dispatcher, datapath.limits(settings, self.dispatcher.pipeline))
        self.shared_ledger = self.dispatcher.shared = datapath.shared_ledger(settings, self.metrics, self.ledger, self.background)
        self.ended = asyncio.Event()
        self.channel = Channel(end, self._heard, self.ended.set, self._adopt)
        self._answered: Counter[str] = Counter()  # requests that replicas have answered, and nobody was told of
        self._scraped: dict[str, list] = {}  # the last scrape of each replica
        self._said: dict[str, dict[str, Any]] = {}  # what the control process was told of it last
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading = asyncio.Lock()
        self._follow: Callable[[], None] = lambda: None  # does with the pipeline what the control process said of it last
        self._models_asked: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Until the control process closes the channel, or is gone."""
        self.server.begin()
        if self.shared_ledger is not None:
            self.shared_ledger.start()
        beating = asyncio.create_task(self._beat())
        await self.ended.wait()
        beating.cancel()
        await self.server.close()
        for backend in list(self.dispatcher.backends.values()):
            backend.stop()
        if self.shared_ledger is not None:
            await self.shared_ledger.stop()
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)

    # --- clients

    def _adopt(self, descriptor: int | None) -> None:
        if descriptor is None:  # it was too many for us
            self.board.close(self.index)
        else:
            self._spawn(self._serve(socket.socket(fileno=descriptor)))

    async def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            await self.server.adopt(connection, self._client)
        except OSError:
            connection.close()
            self.board.close(self.index)

    def _spawn(self, work) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- what the control process says

    def _heard(self, message: dict[str, Any], descriptors: list[int]) -> None:
        what = message.pop("do")
        if what == "table":
            self.map.look_at(message["tier"], list(zip(message["types"], descriptors, strict=True)))
        else:
            getattr(self, "_heard_" + what)(**message)

    def _heard_go(self) -> None:
        """All that there is to know has been told."""
        self.channel.send({"do": "ready"})

    def _heard_replica(self, facts: dict[str, Any]) -> None:
        scrape, slot = facts.pop("scrape"), facts.pop("slot", None)
        observed, followed = facts.pop("observed", False), facts.pop("followed", False)
        facts["state"] = State(facts["state"])
        replica = self.replicas.get(facts["id"])
        if replica is None:
            replica = self.replicas[facts["id"]] = Replica(facts["id"], facts["url"], facts["host"], facts["port"])
            replica.tls = tls.context_for(replica.url, self.settings.replica_ca)
        changed = [name for name, value in facts.items() if getattr(replica, name) != value]
        for name in changed:
            setattr(replica, name, facts[name])
        if slot is None:
            return
        backend = self.dispatcher.backends.get(replica.id)
        if backend is not None and backend.slot != slot:  # removed, and added again
            self._forget(backend)
            backend = None
        self.map.place(slot, replica.id, replica.num_blocks, observed)
        if backend is None:
            self.ledger.place(replica.id, slot)
            backend = Backend(replica, self.dispatcher.router.add(replica.id, slot, replica.rank is not None))
            backend.follow_incarnation()
            self.dispatcher.add(backend)
        elif backend.incarnation != replica.incarnation:
            backend.follow_incarnation()
        if not followed:
            backend.intake = None
        elif backend.intake is None:
            backend.intake = Followed(functools.partial(self._ask_resync, replica.id))
        if scrape is not None and scrape != self._scraped.get(replica.id):
            self._scraped[replica.id] = scrape
            _, waiting, kv_usage = scrape
            self.ledger.catch_up(monotonic())
            self.ledger.scraped(replica.id, waiting, kv_usage)
        if changed:
            self.dispatcher.changed()

    def _heard_gone(self, id: str) -> None:
        self.replicas.pop(id, None)
        backend = self.dispatcher.backends.get(id)
        if backend is not None:
            self._forget(backend)

    def _forget(self, backend: Backend) -> None:
        self.dispatcher.remove(backend.id)
        self.metrics.forget(backend.id)
        self._scraped.pop(backend.id, None)
        self._said.pop(backend.id, None)

    def _heard_clear(self, slot: int) -> None:
        if any(backend.slot == slot for backend in self.dispatcher.backends.values()):
            self.map.cleared(slot)

    def _heard_pipeline(self, block_size: int, max_model_len: int | None, version: str | None, model_dir: str | None,
                        tokenizer: dict[str, Any]) -> None:  # fmt: skip
        def follow() -> None:
            pipeline = self.dispatcher.pipeline
            pipeline.block_size, pipeline.max_model_len = block_size, max_model_len
            pipeline.follow(version, at_once=False)
            self.server.limits = datapath.limits(self.settings, pipeline)
            self._spawn(self._read_tokenizer(pipeline, **tokenizer))

        self._follow = follow
        follow()
        if model_dir != self.model_dir:
            self.model_dir = model_dir
            self._spawn(self._load(model_dir))

    async def _read_tokenizer(self, pipeline: Pipeline, how: str, confirmed: bool, differs: dict[str, str]) -> None:
        """What the control process has found by comparing tokenizers with the engines."""
        if pipeline.tokenizer is not None:
            async with self._reading:
                verdict = await asyncio.get_running_loop().run_in_executor(None, pipeline.read_as, how)
                pipeline.adopt(verdict, confirmed, differs)

    async def _load(self, directory: str) -> None:
        """The replicas told what their model is. Loading takes seconds: what was heard last counts, not what was heard first."""
        loop = asyncio.get_running_loop()
        try:
            pipeline = await loop.run_in_executor(None, datapath.pipeline, self.settings, Path(directory), self.served_name)
            if directory == self.model_dir:
                self.dispatcher.pipeline = pipeline
                self._follow()
        finally:
            self.channel.send({"do": "loaded", "model_dir": directory})

    def _heard_models_asked(self) -> None:
        self._models_asked.set_result(None)

    def _heard_drain(self, seconds: float) -> None:
        self.dispatcher.draining = self.server.draining = True
        self._spawn(self._drain(monotonic() + seconds))

    async def _drain(self, deadline: float) -> None:
        while self.server.busy and monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.channel.send({"do": "drained", "cut": self.server.busy})

    def _heard_ask(self, number: int, what: str, body: str, arguments: dict[str, Any]) -> None:
        self._spawn(self._answer(number, what, body.encode("latin-1"), arguments))

    async def _answer(self, number: int, what: str, body: bytes, arguments: dict[str, Any]) -> None:
        try:
            answer: dict[str, Any] = {"told": await self._told(what, body, **arguments)}
        except PromptError as wrong:
            answer = {"prompt_error": [wrong.status, wrong.message, wrong.type, wrong.param, wrong.code]}
        except Failure as nobody:
            answer = {"failure": [nobody.status, nobody.message, nobody.fields]}
        except Exception:
            log.exception("a worker failed on what the admin side asked")
            answer = {"failure": [500, "the worker that was asked failed on this request; the gateway's log says why", {}]}
        self.channel.send({"do": "answered", "number": number, **answer})

    async def _told(self, what: str, body: bytes, **arguments: Any) -> dict[str, Any]:
        if what == "explain":
            return await datapath.explain(self.settings, self.dispatcher, body=body, **arguments)
        if what == "costs":
            return self.costs.state()
        if what == "decide":
            return await self.decisions.decide(body=body, **arguments)
        return await (self.decisions.done(answer=body, **arguments) if what == "done" else self.decisions.first_byte(**arguments))

    # --- what it says

    def _traffic(self, replica: str, fault: str | None) -> None:
        """Bad news at once, good news once a beat."""
        if fault is None:
            self._answered[replica] += 1
        else:
            self._tell_news((replica, fault, 1))

    def _tell_news(self, *bad: tuple[str, str, int]) -> None:
        """What was good before it goes with what is bad: a share of requests is told by both."""
        good = [(replica, None, count) for replica, count in self._answered.items()]
        self._answered.clear()
        if good or bad:
            self.channel.send({"do": "traffic", "news": [*good, *bad]})

    async def _ask_models(self) -> None:
        """What engines serve now is heard before the answer to this."""
        self._models_asked = asyncio.get_running_loop().create_future()
        self.channel.send({"do": "ask_models"})
        await self._models_asked

    def _ask_resync(self, replica: str) -> None:
        self.channel.send({"do": "resync", "id": replica})

    def _ask_resync_of(self, slot: int) -> None:
        for backend in self.dispatcher.backends.values():
            if backend.slot == slot:
                self._ask_resync(backend.id)

    async def _beat(self) -> None:
        while True:
            self.map.catch_up()
            self.ledger.tell()
            self._tell_news()
            shared = self.shared_ledger
            self.channel.send({
                "do": "beat",
                "grown": self.metrics.take(),
                "replicas": self._news_of_replicas(),
                "held": self.server.held,
                "joined": shared is not None and shared.joined,
                "reason": shared.reason if shared is not None else "",
                "repairs": shared.take_repairs() if shared is not None else {},
                "failures": self.background.take(),
            })  # fmt: skip
            await asyncio.sleep(BEAT_SECONDS)

    def _news_of_replicas(self) -> dict[str, dict[str, Any]]:
        """What was seen of those of which it is not as it was."""
        sent_at: dict[str, float] = {}
        for life in self.dispatcher.lives:
            if life.unanswered and life.prompt is not None:
                sent_at[life.backend.id] = min(life.sent_at, sent_at.get(life.backend.id, life.sent_at))
        modelled, elsewhere, news = self.map.modelled(), self.decisions.on(), {}
        for backend in self.dispatcher.backends.values():
            replica, intake, finished = backend.replica, backend.intake, 0
            if intake is not None:
                finished, intake.finished = intake.finished, 0
            seen = {
                "sent_at": sent_at.get(backend.id),
                "drift": backend.drift.take(),
                "finished": finished,
                "cached_tokens": replica.cached_tokens,
                "takes_ids": replica.takes_ids,
                "idle": len(backend.pool.idle) - elsewhere[backend.id],  # the control process adds what is counted, on others' connections too
                "modelled": modelled.get(backend.slot, 0),
            }
            if seen != self._said.get(backend.id) or finished or any(seen["drift"]):
                self._said[backend.id] = news[backend.id] = seen
        return news


async def _main(end: socket.socket, hello: dict[str, Any], descriptors: list[int]) -> None:
    worker = Worker(end, hello, *descriptors)
    datapath.started()
    await worker.run()


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Ctrl-C and service managers signal all processes of a group; when to stop is the control process's to say.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    data, descriptors, _, _ = socket.recv_fds(end, 1 << 16, 8)
    if not data:
        return 0  # the control process died first
    hello = orjson.loads(data[1:])
    outbox = lines.setup(hello["settings"]["log_level"])
    try:
        uvloop.run(_main(end, hello, descriptors))
    except ConfigError as error:
        log.error("%s", error)
        return 2
    finally:
        outbox.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

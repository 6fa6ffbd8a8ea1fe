"""The fleet: all replicas of one gateway, which it adopts or launches, watches, and drains.

    fleet = Fleet(inflight=ledger_count)
    fleet.on_change.append(lambda replica, old, new: ...)
    fleet.add("http://10.0.0.7:8000")
    await fleet.launch(4, "sim")
    ...
    await fleet.stop()

Callbacks run in the event loop, immediately, in the order of the changes; the replica is already in its new state. An
engine that restarts without being noticed as failed goes READY -> WARMING -> READY, with a new `incarnation` (id of its
process). READY -> READY means that the replica serves other models than before, or publishes its KV events at another
address.

An engine with data-parallel ranks has one replica for each rank, once it has answered and the ranks are known. All
ranks change state together with the process: `on_change` is called for each rank, then `on_changed` once. If a
callback gets a replica that is no longer in `Fleet.replicas`, the engine came back with another number of ranks.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import aiohttp

from replicas import tls
from replicas.ask import body_of
from replicas.duplicates import Name, duplicate
from replicas.engines import by_id
from replicas.health import Limits
from replicas.launch import devices
from replicas.launch import profile as profiles
from replicas.launch.command import Command, LaunchProfile, Model, Ports
from replicas.launch.ports import is_free, pick
from replicas.launch.supervisor import Supervisor
from replicas.lifecycle import TAKES_TRAFFIC, Event, State
from replicas.problems import Problem
from replicas.pulse import Pulse
from replicas.replica import Address, Replica, parse_url
from replicas.watch import Watch

log = logging.getLogger("replicas")

Change = Callable[[Replica, State, State], None]
HOST = "127.0.0.1"  # where launched engines listen
ENGINE_SECONDS = 600.0  # deadline of an operator's request to an engine: /wake_up loads weights
STOP_GRACE = 10.0  # seconds between SIGTERM and SIGKILL
# The events that bring a new replica of a data-parallel rank to its engine's state, by that state.
MISSED = {
    State.WARMING: (Event.ANSWERS,),
    State.READY: (Event.ANSWERS, Event.SERVES),
    State.DEGRADED: (Event.ANSWERS, Event.SERVES, Event.TROUBLE),
    State.LEAVING: (Event.ANSWERS, Event.SERVES, Event.LEAVES),
    State.FAILED: (Event.GONE,),
}


class Fleet:
    """The replicas of one gateway; `replicas` has them by id, `engines` has the watcher of each engine."""

    def __init__(
        self,
        inflight: Callable[[str], int] = lambda replica: 0,
        waited: Callable[[str], float] = lambda replica: 0.0,
        hear: Callable[[str], None] = lambda replica: None,
        *,
        holds: Callable[[str], bool] = lambda replica: False,
        interval: float = 1.0,
        drain_timeout: float = 30.0,
        limits: Limits = Limits(),
        model: str | None = None,
        authorities: Path | None = None,
        engine_key: str | None = None,
        pulse: Pulse | None = None,
    ):
        """Create an empty fleet. Times are in seconds.

        `inflight(id)`: returns the number of the gateway's open requests to a replica.
        `waited(id)`: returns for how many seconds the oldest unanswered prompt has been at a replica.
        `hear(id)`: the fleet calls this before it judges a replica. It has to call `succeeded` for requests that the
        replica has answered and that were not counted yet.
        `holds(engine)`: returns whether requests are on open connections to an engine.
        `interval`: between probes. `drain_timeout`: how long a drained replica may take to finish its requests.
        `limits`: the thresholds of the health rules. `model`: the name that adopted engines have to serve.
        `authorities`: a PEM file of trusted certificates for https, in place of the system's.
        `engine_key`: the API key for adopted engines. `pulse`: records when this process was stalled.
        """
        self.replicas: dict[str, Replica] = {}
        self.on_change: list[Change] = []
        self.on_changed: list[Callable[[], None]] = []
        self._changing, self._is_changed = 0, False
        self.inflight, self.waited, self.hear, self.holds = inflight, waited, hear, holds
        self.interval, self.limits, self._drain_timeout, self._model = interval, limits, drain_timeout, model
        self._authorities, self._engine_key = authorities, engine_key
        self.pulse = pulse or Pulse()
        self.engines: dict[str, Watch] = {}  # by the engine's "host:port"
        self._drains: dict[str, asyncio.Task[None]] = {}  # by the id of a replica or an engine
        self._launching = asyncio.Lock()

    async def stop(self) -> None:
        """Stop watching all engines, and stop the engines that this gateway launched, without draining them."""
        self.pulse.stop()
        engines = list(self.engines.values())
        for engine in engines:
            engine.task.cancel()  # what the watchers would see from here on is no failure
        await asyncio.gather(*(one.supervisor.stop(STOP_GRACE) for one in engines if one.supervisor))
        tasks = [*(one.task for one in engines), *self._drains.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in engines:
            engine.lead.pid = None
            why = "the gateway stopped" if engine.lead.managed else "this gateway stops, and leaves the engine as it is"
            self.tell(engine.lead, Event.STOPPED, why)

    def add(self, url: str) -> Replica:
        """Adopt the engine at `url`, which need not run yet, and return the replica of its first rank.

        An engine that the fleet has already is resumed if it was stopped. The URL's fragment may give settings, as in
        `http://HOST:PORT#role=prefill`. Raises ValueError for an unusable URL.
        """
        address = parse_url(url)
        if known := self.engines.get(address.id):
            self.resume(known.lead.id)
            for replica in known.replicas:
                self.resume(replica.id)
            return known.replicas[0]
        address = address._replace(model=address.model or self._model)
        context = tls.context_for(address.url, self._authorities)
        replica = Replica.at(address, since=monotonic(), key=self._engine_key, tls=context)
        self._start(Watch(replica, self, given=address.source))
        return replica

    async def launch(
        self,
        count: int,
        profile: str | LaunchProfile = "sim",
        model_dir: Path | None = None,
        served_name: str | None = None,
        role: str | None = None,
        spill: bool = False,
    ) -> list[Replica]:
        """Start `count` engines and return their replicas, whose state is STARTING.

        `profile`: the name or file of a launch profile, or the profile. `model_dir`: the model to serve; None: the
        engine's own default. `role`: prefill, decode or both; None: the profile's. `spill`: the engines belong to the
        overflow pool. Raises ProfileError (also for too few devices), and OSError when no ports are free.
        """
        loaded = profiles.load(profile) if isinstance(profile, str) else profile
        async with self._launching:
            # stopped engines keep their devices, as they may be resumed
            used = [device for engine in self.engines.values() for device in engine.devices]
            placed, places = await asyncio.to_thread(loaded.place, count, used)  # calls the GPU driver's tool
            taken = {port for engine in self.engines.values() for port in (engine.lead.port, *engine.ports)}
            firsts = pick(count, HOST, taken, run=Ports.width(placed.ranks))
            model = Model(Path(model_dir) if model_dir else None, served_name)
            engines = [
                self._launch(placed, Ports.run(first, placed.ranks), model, place, role or placed.role, spill)
                for first, place in zip(firsts, places)
            ]
        return [replica for engine in engines for replica in engine.replicas]

    def _launch(
        self, profile: LaunchProfile, ports: Ports, model: Model, place: dict[str, str], role: str, spill: bool
    ) -> Watch:
        name = f"{HOST}:{ports.http}"
        settings = None, model.served_name, role, spill, profile.transfer, profile.bootstrap(ports)
        address = Address(name, f"http://{name}", HOST, ports.http, *settings)
        replica = Replica.at(address, managed=True, since=monotonic(), key=self._engine_key)
        replica.reason, replica.dialect = "its process is being started", by_id(profile.engine)
        replica.declared, replica.context_parallel = profile.traits, profile.context_parallel
        replica.launched_to_drop, replica.drops_block = profile.drops_block, bool(profile.drops_block)

        def started(pid: int) -> None:
            replica.restarts += replica.state is State.FAILED
            replica.pid = pid
            replica.since = monotonic()
            self.tell(replica, Event.LAUNCHED, f"process {pid} started")

        def exited(reason: str) -> None:
            news = [] if replica.state is not State.FAILED else [reason]  # else the change to FAILED logs it
            replica.pid, replica.fault = None, ""  # the last probe failed with a process that is gone
            self.tell(replica, Event.GONE, reason)
            if last := supervisor.tail.lines[-10:]:
                news.append("its last lines:\n  " + "\n  ".join(last))
            if news:
                log.warning("replica %s: %s", replica.id, "; ".join(news))

        def obstacle() -> str:
            taken = [port for port in ports.all() if not is_free(HOST, port)]
            return f"port {taken[0]} is taken: stop what holds it (`ss -ltnp`)" if taken else ""

        argv, env = profile.command(HOST, ports, model)
        command, log_format = Command(argv, {**place, **env}), replica.dialect.log
        supervisor = Supervisor(command, on_start=started, on_exit=exited, obstacle=obstacle, grammar=log_format)
        given = profile.events(HOST, ports)
        engine = Watch(replica, self, given=given, supervisor=supervisor, start_timeout=profile.start_timeout_s)
        engine.ports, engine.devices = ports.all(), devices.shown_by(place)
        engine.sources = [given and given.at_rank(rank) for rank in range(profile.ranks)]
        self._start(engine)
        self.looked(engine)
        supervisor.start()
        return engine

    def _start(self, engine: Watch) -> None:
        self.pulse.start()
        self.engines[engine.lead.id], self.replicas[engine.lead.id] = engine, engine.lead
        engine.start()

    def duplicate(self, lead: Replica, created: float | None) -> Problem | None:
        """Return a problem if other names in the fleet lead to the same engine as this one, else None.

        `lead`: the replica that stands for the engine. `created`: unix time at which one of the engine's counters was
        created, from /metrics: it identifies the process.
        """
        leads = [one.lead for one in self.engines.values() if one.lead.state in TAKES_TRAFFIC]
        others = [Name(one.id, one.address, one.port, one.scrape.created if one.scrape else None) for one in leads]
        return duplicate(Name(lead.id, lead.address, lead.port, created), others)[0]

    def _engine(self, id: str) -> Watch:
        """Return the watcher of an engine, by the engine's id or that of one of its replicas. Raises KeyError."""
        return self.engines.get(id) or self.engines[self.replicas[id].engine]

    def succeeded(self, id: str, count: int = 1) -> None:
        """Count `count` requests that the replica answered with any status below 500."""
        if id in self.replicas:
            self._engine(id).succeeded(self.pulse.clock(), count)

    def failed(self, id: str, kind: str) -> None:
        """Count a request that failed by the engine's fault; this may change the state of the engine's replicas.

        `kind`: connect, closed (before the answer's end), timeout, 5xx, or foreign (what answered was no engine). Do
        not call this for a 4xx, or for a 503 that says "full": these say nothing about the engine's health.
        """
        if id in self.replicas:
            engine, now = self._engine(id), self.pulse.clock()
            engine.failed(now, kind)
            self._compare(engine, now)

    def unconfirmed(self, id: str) -> None:
        """Count a request answered with an error that may be the fault of the replica or of the request."""
        if id in self.replicas:
            self._engine(id).unconfirmed(self.pulse.clock())

    def _compare(self, engine: Watch, now: float) -> None:
        """Compare the engine's share of failed requests with that of the other ready engines of the same model.

        If its share is far higher, the engine is DEGRADED for some seconds. Nothing happens if there is no other
        engine, as requests could go nowhere else.
        """
        models = engine.lead.models.keys()
        ready = [one for one in self.engines.values() if one is not engine and one.lead.state is State.READY]
        alike = [one for one in ready if not models or not one.lead.models or models & one.lead.models.keys()]
        siblings = [one.health.recent.totals(now) for one in alike]
        if siblings and engine.health.compare(now, *map(sum, zip(*siblings))):
            engine.judge(now)

    async def prove(self, id: str) -> bool:
        """Make a full probe of a replica's engine now; return whether the engine answered.

        When this returns, all callbacks about the probe have run.
        """
        return id in self.replicas and await self._engine(id).prove()

    async def ask_models(self) -> None:
        """Read the list of models from every ready engine now.

        When this returns, all callbacks about changes have run.
        """
        await asyncio.gather(*(one.ask_models() for one in self.engines.values() if one.lead.state is State.READY))

    async def ask_engine(
        self, id: str, method: str, target: str, body: bytes, content_type: str
    ) -> tuple[int, str, bytes]:
        """Forward an operator's request to a replica's engine; return the answer's status, Content-Type and body.

        `target`: path and query. Raises KeyError for an unknown id, OSError or aiohttp.ClientError when the engine does
        not answer.
        """
        engine = self._engine(id)
        url, session = engine.lead.url + target, engine.access.session
        headers, timeout = {"Content-Type": content_type} if body else {}, aiohttp.ClientTimeout(ENGINE_SECONDS)
        asked = session.request(method, url, data=body or None, headers=headers, allow_redirects=False, timeout=timeout)
        async with asked as answer:
            told = answer.status, answer.headers.get("Content-Type", "application/octet-stream"), await body_of(answer)
        if method != "GET":
            engine.nudge()  # it may serve other models and adapters now
        return told

    def logs(self, id: str) -> list[str]:
        """Return the last log lines of an engine that this gateway launched; [] for an adopted engine."""
        supervisor = self._engine(id).supervisor
        return supervisor.tail.lines if supervisor else []

    def drain(self, id: str) -> asyncio.Task[None]:
        """Stop new traffic to a replica, and set it to STOPPED when its requests are done or the drain timeout is over.

        An engine that this gateway launched is then stopped, too, unless only one of its ranks is drained. `id`: of a
        replica, or of an engine for all its ranks. Raises KeyError for an unknown id. Returns the task that waits for
        the end; it need not be awaited.
        """
        engine = self._engine(id)
        is_whole = id == engine.lead.id
        replica, tell = (engine.lead, self.tell) if is_whole else (self.replicas[id], self._apply)

        async def drain() -> None:
            deadline = monotonic() + self._drain_timeout
            computing = engine.replicas if is_whole else [replica]
            while (left := sum(self.inflight(one.id) for one in computing)) and monotonic() < deadline:
                if replica.state is not State.DRAINING:
                    break  # its process died
                replica.reason = f"draining: {left} requests to finish"
                await asyncio.sleep(0.05)
            if is_whole and engine.supervisor:
                await engine.supervisor.stop(STOP_GRACE)
                replica.pid = None
            late = f", {left} requests did not finish within {self._drain_timeout:g} s" if left else ""
            tell(replica, Event.STOPPED, f"drained on request{late}")

        if (running := self._drains.get(id)) is None or running.done():
            tell(replica, Event.DRAIN, "drained on request")
            if is_whole and engine.supervisor:
                engine.supervisor.no_restart()
            running = self._drains[id] = asyncio.create_task(drain(), name=f"drain {id}")
        return running

    def resume(self, id: str) -> None:
        """Use a stopped replica or engine again; a launched engine's process is started.

        Raises KeyError for an unknown id.
        """
        engine = self._engine(id)
        if engine.lead.state is State.STOPPED:
            if engine.supervisor:
                engine.supervisor.start()
            self.tell(engine.lead, Event.LAUNCHED, "wanted again")
        elif id in self.replicas and self.replicas[id].state is State.STOPPED:
            self._apply(self.replicas[id], Event.LAUNCHED, "wanted again")
            self._catch_up(self.replicas[id], engine.lead)

    def remove(self, id: str) -> asyncio.Task[None]:
        """Drain an engine and remove it from the fleet; the returned task need not be awaited.

        Raises KeyError for an unknown id, ValueError for the id of one rank of several.
        """
        engine = self._engine(id)
        if id != engine.lead.id:
            what = f"{id} is one of {len(engine.replicas)} ranks of one engine"
            raise ValueError(f"{what}: drain it, or remove {engine.lead.id}")
        if engine.removal is None:
            engine.removal = asyncio.create_task(self._remove(engine, self.drain(id)), name=f"remove {id}")
        return engine.removal

    async def quiet(self, id: str) -> None:
        """Wait until no drain or removal of this engine or its ranks is in progress; do nothing for an unknown id."""
        while (engine := self.engines.get(id)) is not None:
            tasks = [engine.removal, *(self._drains.get(one.id) for one in (engine.lead, *engine.replicas))]
            under_way = [task for task in tasks if task is not None and not task.done()]
            if not under_way:
                return
            await asyncio.wait(under_way)

    async def _remove(self, engine: Watch, drained: asyncio.Task[None]) -> None:
        await drained
        engine.task.cancel()
        del self.engines[engine.lead.id]
        for replica in (engine.lead, *engine.replicas):
            self.replicas.pop(replica.id, None)
            self._drains.pop(replica.id, None)
        await asyncio.gather(engine.task, return_exceptions=True)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Call `on_changed` once at the end of the `with` block, however many replicas changed in the block."""
        self._changing += 1
        try:
            yield
        finally:
            self._changing -= 1
            if self._is_changed and not self._changing:
                self._is_changed = False
                self._try(self.on_changed)

    def looked(self, engine: Watch) -> None:
        """Update the replicas of an engine's data-parallel ranks after a probe of the engine.

        Replicas are added or removed if the number of ranks changed.
        """
        before = engine.replicas
        with self._together():
            if len(engine.sources) != len(before):
                engine.resize(len(engine.sources))
                gone = [one for one in before if one not in engine.replicas]
                come = [one for one in engine.replicas if one not in before]
                for replica in gone:
                    del self.replicas[replica.id]
                self.replicas |= {replica.id: replica for replica in come}
                engine.follow()
                for replica in gone:
                    self._call_back(replica, replica.state)
                for replica in come:
                    log.info("replica %s: one of %d behind %s", replica.id, len(engine.replicas), engine.lead.url)
                    self._catch_up(replica, engine.lead)
            engine.follow()

    def _catch_up(self, replica: Replica, lead: Replica) -> None:
        """Bring the replica of a rank that was just added or resumed to the state of its engine.

        `lead`: the replica that stands for the whole engine.
        """
        if replica is lead:
            return self._call_back(replica, replica.state)
        for event in MISSED.get(lead.state, ()):
            self._apply(replica, event, lead.reason)

    def changed(self, engine: Watch) -> None:
        """Call the callbacks for a READY engine that serves other models now, or publishes its KV events elsewhere."""
        with self._together():
            self.looked(engine)
            for replica in engine.replicas:
                if replica.state is State.READY:
                    self._call_back(replica, replica.state)

    def tell(self, lead: Replica, event: Event, reason: str) -> None:
        """Apply a life-cycle event of an engine to the replica of each of its data-parallel ranks.

        Ranks that an operator stopped stay stopped when the process starts again. `lead`: the replica that stands for
        the whole engine.
        """
        engine = self.engines.get(lead.id)
        was_stopped = lead.state is State.STOPPED
        if engine and engine.is_ranked:
            lead.apply(event, reason, monotonic())
            engine.follow()
            with self._together():
                for replica in engine.replicas:
                    if event is not Event.LAUNCHED or was_stopped or replica.state is not State.STOPPED:
                        self._apply(replica, event, reason)
        else:
            self._apply(lead, event, reason)
        if engine and event is Event.LAUNCHED:
            engine.nudge()

    def _apply(self, replica: Replica, event: Event, reason: str) -> None:
        """Apply an event to one replica, and report it if its state changed. All changes of state are made here."""
        before = replica.apply(event, reason, monotonic())
        if before is None:
            return
        is_bad = replica.state in (State.FAILED, State.DEGRADED, State.LEAVING)
        say = log.warning if is_bad else log.info
        say("replica %s: %s -> %s: %s", replica.id, before, replica.state, reason)
        self._call_back(replica, before)

    def _call_back(self, replica: Replica, before: State) -> None:
        with self._together():
            self._is_changed = True
            self._try(self.on_change, replica, before, replica.state)

    @staticmethod
    def _try(callbacks: list[Callable[..., None]], *arguments: object) -> None:
        for callback in callbacks:
            try:
                callback(*arguments)
            except Exception:
                log.exception("a callback on replica changes failed")

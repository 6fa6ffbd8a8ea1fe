"""All replicas of one gateway: adopted and launched, watched, drained.

    fleet = Fleet(inflight=ledger_count)
    fleet.on_change.append(lambda replica, old, new: ...)
    await fleet.start()
    fleet.add("http://10.0.0.7:8000")
    await fleet.launch(4, "sim")
    ...
    await fleet.stop()

Callbacks run in the event loop, at once, in the order of the changes; the replica already is in
its new state. A restart that nobody saw as a failure shows as READY -> WARMING -> READY with a
new `incarnation`; READY -> READY means that it serves other models or publishes elsewhere than before.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import aiohttp

from replicas import profile as profiles
from replicas.health import Limits
from replicas.lifecycle import Event, State
from replicas.ports import holder, is_free, pick
from replicas.profile import Command, Model, Ports, Profile
from replicas.replica import EventSource, Replica, parse_url
from replicas.supervisor import Supervisor
from replicas.watch import Watch

log = logging.getLogger("replicas")

Change = Callable[[Replica, State, State], None]
HOST = "127.0.0.1"  # where our own engines listen
STOP_GRACE = 10.0  # seconds between SIGTERM and SIGKILL


class Fleet:
    def __init__(
        self,
        inflight: Callable[[str], int] = lambda replica: 0,
        *,
        interval: float = 1.0,
        drain_timeout: float = 30.0,
        limits: Limits = Limits(),
    ):
        """`inflight(id)`: the gateway's open requests to a replica. Times in seconds."""
        self.replicas: dict[str, Replica] = {}
        self.on_change: list[Change] = []
        self._inflight, self._interval = inflight, interval
        self._drain_timeout, self._limits = drain_timeout, limits
        self._session: aiohttp.ClientSession | None = None
        self._watches: dict[str, Watch] = {}
        self._tasks: dict[str, asyncio.Task] = {}
        self._drains: dict[str, asyncio.Task] = {}
        self._supervisors: dict[str, Supervisor] = {}

    async def start(self) -> None:
        """Open the session that all probes share. Does not wait for any replica."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)  # vLLM closes after 5 s
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar()
            )

    async def stop(self) -> None:
        """Stop every engine of our own (no drain: `drain` is for that) and all watching."""
        await asyncio.gather(*(s.stop(STOP_GRACE) for s in self._supervisors.values()))
        tasks = [*self._tasks.values(), *self._drains.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self.replicas.values():
            replica.pid = None
            self._tell(replica, Event.STOPPED, "the gateway stopped")
        if self._session:
            await self._session.close()
            self._session = None

    def add(self, url: str) -> Replica:
        """Adopt an engine that may or may not run yet; see `parse_url` for what a URL may carry.
        One that is known already is returned, and wanted again if it was stopped. Raises
        ValueError for a URL nobody could use."""
        address = parse_url(url)
        if known := self.replicas.get(address.id):
            if known.state is State.STOPPED:
                self.resume(known.id)
            return known
        replica = Replica(address.id, address.url, address.host, address.port, since=monotonic())
        self._follow(replica, given=address.source, model=address.model)
        return replica

    async def launch(
        self,
        count: int,
        profile: str | Profile = "sim",
        model_dir: Path | None = None,
        served_name: str | None = None,
    ) -> list[Replica]:
        """Start `count` engines; returns them STARTING. Raises ProfileError (also for too few devices), and
        OSError when no ports are free."""
        if isinstance(profile, str):
            profile = profiles.load(profile)
        profile, places = await asyncio.to_thread(profile.place, count)  # asks the driver
        taken = {replica.port for replica in self.replicas.values()}
        firsts = pick(count, HOST, taken, run=Ports.width(profile.ranks))
        model = Model(Path(model_dir) if model_dir else None, served_name)
        return [
            self._launch(profile, Ports.run(first, profile.ranks), model, place)
            for first, place in zip(firsts, places)
        ]

    def _launch(self, profile: Profile, ports: Ports, model: Model, place: dict[str, str]) -> Replica:
        name = f"{HOST}:{ports.http}"
        replica = Replica(name, f"http://{name}", HOST, ports.http, managed=True, since=monotonic())
        replica.reason = "its process is being started"

        def started(pid: int) -> None:
            replica.restarts += replica.state is State.FAILED
            replica.pid = pid
            replica.since = monotonic()
            self._tell(replica, Event.LAUNCHED, f"process {pid} started")

        def exited(reason: str) -> None:
            replica.pid = None
            self._tell(replica, Event.GONE, reason)
            if last := supervisor.tail.lines[-10:]:
                log.warning("replica %s: its last lines:\n  %s", replica.id, "\n  ".join(last))

        def obstacle() -> str:
            for port in filter(lambda port: not is_free(HOST, port), ports.all()):
                return f"port {port} is taken by {holder(port) or 'another process'}: stop that"
            return ""

        argv, env = profile.command(HOST, ports, model)
        command = Command(argv, {**place, **env})
        supervisor = Supervisor(command, on_start=started, on_exit=exited, obstacle=obstacle)
        self._supervisors[name] = supervisor
        self._follow(
            replica,
            given=profile.events(HOST, ports),
            model=model.served_name,
            supervisor=supervisor,
            start_timeout=profile.start_timeout_s,
        )
        supervisor.start()
        return replica

    def _follow(self, replica: Replica, **known) -> None:
        if self._session is None:
            raise RuntimeError("Fleet.start() comes before the first replica")
        self.replicas[replica.id] = replica
        watch = Watch(
            replica,
            self._session,
            self._tell,
            lambda replica: self._call_back(replica, replica.state),
            busy=lambda: self._inflight(replica.id) > 0,
            interval=self._interval,
            limits=self._limits,
            **known,
        )
        self._watches[replica.id] = watch
        self._tasks[replica.id] = asyncio.create_task(watch.run(), name=f"watch {replica.id}")

    def succeeded(self, id: str) -> None:
        """A request was answered by the replica, with whatever status below 500."""
        if watch := self._watches.get(id):
            watch.succeeded(monotonic())

    def failed(self, id: str, kind: str) -> None:
        """A request failed by the engine's fault: connect, closed (before the answer's end), timeout or
        5xx. Not for 4xx, and not for a 503 that says "full": those say nothing about health."""
        if watch := self._watches.get(id):
            watch.failed(monotonic(), kind)

    def logs(self, id: str) -> list[str]:
        """The last lines an engine of our own wrote; [] for adopted ones."""
        supervisor = self._supervisors.get(id)
        return supervisor.tail.lines if supervisor else []

    def drain(self, id: str) -> asyncio.Task:
        """No new traffic now; STOPPED when its requests are done, or after the drain timeout. An engine of
        our own is then stopped. Raises KeyError for an unknown id. The task need not be awaited."""
        replica = self.replicas[id]
        running = self._drains.get(id)
        if running is None or running.done():
            self._tell(replica, Event.DRAIN, "drained on request")
            if supervisor := self._supervisors.get(id):
                supervisor.no_restart()
            running = asyncio.create_task(self._drain(replica), name=f"drain {id}")
            self._drains[id] = running
        return running

    async def _drain(self, replica: Replica) -> None:
        deadline = monotonic() + self._drain_timeout
        while (left := self._inflight(replica.id)) and monotonic() < deadline:
            if replica.state is not State.DRAINING:
                break  # its process died
            replica.reason = f"draining: {left} requests to finish"
            await asyncio.sleep(0.05)
        if supervisor := self._supervisors.get(replica.id):
            await supervisor.stop(STOP_GRACE)
            replica.pid = None
        late = f", {left} requests did not finish within {self._drain_timeout:g} s" if left else ""
        self._tell(replica, Event.STOPPED, f"drained on request{late}")

    def resume(self, id: str) -> None:
        """Take a stopped replica back. Raises KeyError for an unknown id."""
        replica = self.replicas[id]
        if replica.state is not State.STOPPED:
            return
        if supervisor := self._supervisors.get(id):
            supervisor.start()
        else:
            self._tell(replica, Event.LAUNCHED, "wanted again")
            self._watches[id].nudge()

    def remove(self, id: str) -> asyncio.Task:
        """Drain and forget. Raises KeyError for an unknown id. The task need not be awaited."""
        return asyncio.create_task(self._remove(id, self.drain(id)), name=f"remove {id}")

    async def _remove(self, id: str, drained: asyncio.Task) -> None:
        await drained
        task = self._tasks.pop(id, None)
        if task is None:
            return  # asked twice: the first one did it
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for table in (self._watches, self._supervisors, self._drains, self.replicas):
            table.pop(id, None)

    def _tell(self, replica: Replica, event: Event, reason: str) -> None:
        """The one place where a replica changes state."""
        before = replica.apply(event, reason, monotonic())
        if before is None:
            return
        bad = replica.state in (State.FAILED, State.DEGRADED)
        log.log(
            logging.WARNING if bad else logging.INFO,
            "replica %s: %s -> %s: %s", replica.id, before, replica.state, reason,
        )
        self._call_back(replica, before)
        if event is Event.LAUNCHED:
            self._watches[replica.id].nudge()

    def _call_back(self, replica: Replica, before: State) -> None:
        for callback in self.on_change:
            try:
                callback(replica, before, replica.state)
            except Exception:
                log.exception("a callback on replica changes failed")

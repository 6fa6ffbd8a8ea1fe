"""One replica's watcher: asks the engine how it is, turns answers into lifecycle events.

Cheap on purpose: once a second one GET /health; /metrics once a second while the replica has work,
else every 5 s; everything else every 10 s, and whenever the replica is not READY. All with deadlines, over
one shared session, at jittered times so that many replicas are not asked in one burst.
"""

import asyncio
import random
from collections.abc import Callable
from time import monotonic

import aiohttp

from replicas.adopt import Facts, get, health, probe
from replicas.health import Health, Limits, Verdict
from replicas.lifecycle import Event, State
from replicas.metrics import Scrape, parse
from replicas.replica import EventSource, Replica
from replicas.supervisor import Supervisor

IDLE_SCRAPE, FACTS, CLOSEST = 5.0, 10.0, 0.1  # seconds between scrapes, full probes, any two probes


class Watch:
    def __init__(
        self,
        replica: Replica,
        session: aiohttp.ClientSession,
        tell: Callable[[Replica, Event, str], None],
        *,
        busy: Callable[[], bool],
        interval: float = 1.0,
        limits: Limits = Limits(),
        given: EventSource | None = None,
        model: str | None = None,
        supervisor: Supervisor | None = None,
        start_timeout: float = 0.0,
    ):
        """`given`: the event source as the operator or the profile knows it, instead of asking.
        `model`: the served name that must be listed. The last two for replicas of our own."""
        self.replica, self.session, self.tell = replica, session, tell
        self.busy, self.interval, self.limits = busy, interval, limits
        self.given, self.model = given, model
        self.supervisor, self.start_timeout = supervisor, start_timeout
        self.health = Health(limits)
        self._nudged = asyncio.Event()
        self._lives = 0  # how often it came back, for engines that do not tell when they began
        self._was_refused = False
        self._facts_at = self._scraped_at = float("-inf")

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self.tick()
            await self._pause()

    async def _pause(self) -> None:
        if not self._nudged.is_set():
            try:
                wait = self.interval * random.uniform(0.8, 1.2)
                await asyncio.wait_for(self._nudged.wait(), wait)
            except TimeoutError:
                return
        self._nudged.clear()
        await asyncio.sleep(min(CLOSEST, self.interval))

    def nudge(self) -> None:
        """Look again now: something happened."""
        self._facts_at = float("-inf")
        self._nudged.set()

    # What traffic shows

    def succeeded(self, now: float) -> None:
        self.health.succeeded(now)
        if self.replica.state is State.DEGRADED:
            self.tell(self.replica, Event.SERVES, "answers requests again")

    def failed(self, now: float, kind: str) -> None:
        self.health.failed(now, kind)
        self._was_refused |= kind == "connect"
        self._judge(now)
        self.nudge()

    # What probes show

    async def tick(self) -> None:
        """One look at the engine."""
        replica = self.replica
        if replica.state in (State.DRAINING, State.STOPPED) or (replica.managed and replica.pid is None):
            return
        pid, now = replica.pid, monotonic()
        full = replica.state is not State.READY or now - self._facts_at >= FACTS
        if full:
            facts = await probe(replica.url, self.session)
        else:
            facts = await self._brief(now)
        if replica.pid != pid:
            return  # the process ended while we asked: the answer is about the past
        now = monotonic()
        if full:
            self._facts_at = now
        if facts.fault:
            self._missed(now, facts)
        else:
            self._answered(now, facts, full)

    async def _brief(self, now: float) -> Facts:
        answer = await health(self.session, self.replica.url, 2.0)
        facts = Facts(alive=not answer.fault, fault=answer.fault, error=answer.error, serving=True)
        due = 0.0 if self.busy() else IDLE_SCRAPE
        if facts.alive and now - self._scraped_at >= due:
            page = await get(self.session, f"{self.replica.url}/metrics", 2.0)
            if page.status == 200:
                facts.scrape = parse(page.body, monotonic())
            self._scraped_at = monotonic()
        return facts

    def _missed(self, now: float, facts: Facts) -> None:
        replica = self.replica
        self._was_refused |= facts.fault == "connect"
        if replica.state is State.STARTING and replica.managed:
            self._still_starting(now, facts.error)
        elif replica.state in (State.STARTING, State.FAILED) and not replica.managed:
            self.tell(replica, Event.GONE, f"{facts.error}; asked again every {self.interval:g} s")
        else:
            self.health.probed(now, facts.fault, facts.error)
            self._judge(now)
            if facts.fault == "connect":
                self.nudge()  # a second refusal settles it, no need to wait a second for that

    def _still_starting(self, now: float, error: str) -> None:
        replica, waited = self.replica, now - self.replica.since
        if waited > self.start_timeout:
            self.supervisor.restart(
                f"not ready {waited:.0f} s after its start ({error}); last log line: {self._log()}; if it only is"
                " slow, raise start_timeout_s in the profile"
            )
        else:
            replica.reason = f"starting for {waited:.0f} s; last log line: {self._log()}"

    def _log(self) -> str:
        return f'"{self.supervisor.tail.last}"' if self.supervisor.tail.last else "none yet"

    def _answered(self, now: float, facts: Facts, full: bool) -> None:
        replica = self.replica
        if full:
            self._learn(facts)
        if facts.scrape:
            replica.scrape = facts.scrape
        self._follow_incarnation(facts.scrape)
        wrong = facts.error if not facts.serving else self._wrong_model()
        if replica.state in (State.STARTING, State.FAILED):
            self.tell(replica, Event.ANSWERS, "answers /health")
        if replica.state is State.WARMING:
            if wrong:
                replica.reason = wrong
                return
            self.health = Health(self.limits)
            self.tell(replica, Event.SERVES, "answers and serves " + (", ".join(replica.models) or "any model"))
        self.health.probed(now, "refused" if wrong else "", wrong)
        self._judge(now)

    def _wrong_model(self) -> str:
        names = self.replica.models
        if self.model is None or not names or self.model in names:
            return ""
        return (
            f"serves {', '.join(names)}, not {self.model!r}: another server is on this port, or it was started "
            f"without --served-model-name {self.model}"
        )

    def _learn(self, facts: Facts) -> None:
        replica = self.replica
        replica.models = facts.models
        replica.max_model_len = facts.max_model_len
        replica.version = facts.version
        if facts.scrape:
            self._scraped_at = monotonic()
            replica.block_size = facts.block_size or replica.block_size
            replica.num_blocks = facts.num_blocks or replica.num_blocks
        replica.events = self.given or facts.sources.get(0)
        missing = facts.problems if not self.given else {k: v for k, v in facts.problems.items() if k != "events"}
        replica.problems = tuple(missing.values())

    def _follow_incarnation(self, scrape: Scrape | None) -> None:
        """Another process behind the port means another, empty cache."""
        replica = self.replica
        if scrape and scrape.started:
            current = f"{scrape.started:.2f}"
        elif replica.managed:
            current = replica.incarnation if scrape is None and replica.incarnation else f"pid-{replica.pid}"
        elif self._was_refused or not replica.incarnation:
            self._lives += 1
            current = f"seen-{self._lives}"
        else:
            current = replica.incarnation
        self._was_refused = False
        before, replica.incarnation = replica.incarnation, current
        if before and before != current:
            self.health = Health(self.limits)
            self._facts_at = float("-inf")
            self.tell(replica, Event.RESTARTED, "another process answers: it was restarted, its cache is empty")

    def _judge(self, now: float) -> None:
        replica = self.replica
        verdict, reason = self.health.opinion(now)
        if verdict is Verdict.LOST:
            self._lost(reason)
        elif verdict is Verdict.TROUBLE:
            self.tell(replica, Event.TROUBLE, reason)
        elif replica.state is State.DEGRADED:
            self.tell(replica, Event.SERVES, "answers probes again")

    def _lost(self, reason: str) -> None:
        replica = self.replica
        if replica.state not in (State.WARMING, State.READY, State.DEGRADED):
            return
        alive = " though its process is alive" if replica.managed and replica.pid else ""
        self.tell(replica, Event.GONE, reason + alive)
        if self.supervisor:
            self.supervisor.restart(f"{reason}{alive}: it hangs, so it was killed")

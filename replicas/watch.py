"""The watcher of one engine: it probes the engine and turns the answers into lifecycle events.

Probes are cheap: GET /health once a second; /metrics once a second while the engine has work, else every 5 s. A full
probe, which reads everything else too, is made every 10 s, and each time while the replica is not READY. All requests
have deadlines and use one session, at jittered times so that many engines are not probed in one burst.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from replicas.access import Access
from replicas.adopt import Facts, engine_ids, health, problems_of, read_models
from replicas.answer import Answer
from replicas.ask import get, read
from replicas.deadline import set_within
from replicas.engines.dialect import ANY_PATH
from replicas.event_source import EventSource
from replicas.health import Health, Limits, Verdict
from replicas.launch.exits import said
from replicas.launch.supervisor import Supervisor
from replicas.lifecycle import IN_USE, TAKES_TRAFFIC, Event, State
from replicas.metrics import Scrape, parse
from replicas.problems import Problem
from replicas.progress import ILL, STALLED, Progress, asked, computes
from replicas.pulse import Pulse
from replicas.replica import Address, Replica, url_of
from replicas.served import base_names

log = logging.getLogger("replicas")

# Seconds: between reads of an idle engine's /metrics; between full probes; between any two probes at least; between
# probes of an engine that starts. The second line has the deadlines of one answer.
IDLE_SCRAPE, FACTS, CLOSEST, STARTING_INTERVAL = 5.0, 10.0, 0.1, 0.2
DEADLINE, SHORT_DEADLINE = 2.0, 1.0
WARMING_DEADLINE = 30.0  # for a launched engine's first tokens; a slower engine gets traffic anyway


class Owner(Protocol):
    """The part of `Fleet` that the watchers of its engines use; `Fleet` describes each member."""

    interval: float
    limits: Limits
    pulse: Pulse
    inflight: Callable[[str], int]
    waited: Callable[[str], float]
    hear: Callable[[str], None]
    holds: Callable[[str], bool]

    def tell(self, lead: Replica, event: Event, reason: str) -> None: ...
    def looked(self, engine: Watch) -> None: ...
    def changed(self, engine: Watch) -> None: ...
    def duplicate(self, lead: Replica, created: float | None) -> Problem | None: ...


class Watch:
    """The watcher of one engine: it probes the engine, counts the results of requests, and reports changes of state."""

    def __init__(
        self,
        lead: Replica,
        fleet: Owner,
        *,
        given: EventSource | None = None,
        supervisor: Supervisor | None = None,
        start_timeout: float = 0.0,
    ):
        """Prepare to watch one engine; `start` begins.

        `lead`: the replica that stands for the whole engine. Data-parallel ranks share one server process, so health,
        restarts and the engine's reports are handled once, for the lead. Each rank has a KV cache of its own, so with
        several ranks each has a further replica (in `replicas`); with one rank the lead is the only replica.
        `fleet`: applies the lifecycle events, and knows the traffic and the settings of all engines.
        `given`: the KV event source from the operator or the profile, used in place of the engine's report.
        `supervisor`, `start_timeout` (seconds): of an engine that the gateway launched.
        """
        self.lead, self.fleet, self.given = lead, fleet, given
        self.supervisor, self.start_timeout = supervisor, start_timeout
        # all ports that it listens on, and all devices that it may use, if the gateway launched it
        self.ports: range = range(0)
        self.devices: tuple[str, ...] = ()
        self.replicas = [lead]
        self.task: asyncio.Task[None]  # runs `run`; set by `start`
        self.removal: asyncio.Task[None] | None = None
        self.access = Access(lead.url, lead.host, lead.tls, given, lead.credentials)
        self.interval, self.limits, self.pulse = fleet.interval, fleet.limits, fleet.pulse
        self._was_excused = False  # the last probe failed, which was ignored because this process was stalled
        # where each data-parallel rank publishes KV events
        self.sources: list[EventSource | None] = [given]
        self.health, self.progress = Health(self.limits), Progress()
        self._nudged, self._urgent = asyncio.Event(), asyncio.Event()
        # while a caller waits for the next full probe: its future, which gets whether an engine answered
        self._wanted: asyncio.Future[bool] | None = None
        self._lives = 0  # how often the engine came back, if it does not report its start time
        self._was_refused = self._tells_start = False
        # models, root and version of the engine at its last report, kept after the engine is gone
        self._known: tuple[dict[str, str | None], str | None, str | None] = {}, None, None
        self._must_prove = False  # something that is no engine answered: what answers next has to list a model
        self._has_figures = False  # /metrics reported the number of running requests
        self._named_pid: int | None = None
        self._mark = ""  # distinguishes this incarnation from one at another address with the same start time
        self._warmed_pid: int | None = None
        self._facts_at = self._scraped_at = self._looked_at = self._held_at = float("-inf")
        self._closes = False  # the engine closes the connection after each answer
        self._is_large = False  # the last probe had large answers

    def start(self) -> None:
        self.task = asyncio.create_task(self.run(), name=f"watch {self.lead.id}")

    @property
    def url(self) -> str:
        """The engine's URL, with all settings in its fragment, as `parse_url` reads them."""
        lead = self.lead
        settings = lead.role, lead.spill, lead.moves_by, lead.bootstrap, lead.peer
        return url_of(Address(lead.id, lead.url, lead.host, lead.port, self.given, lead.required_model, *settings))

    @property
    def is_ranked(self) -> bool:
        return self.replicas != [self.lead]

    def resize(self, count: int) -> None:
        """Set the number of data-parallel ranks; ranks that stay keep their `Replica` objects."""
        kept = self.replicas[:count] if self.is_ranked else []
        more = [self.lead.at_rank(rank, monotonic()) for rank in range(len(kept), count)]
        self.replicas = [self.lead] if count == 1 else kept + more

    def follow(self) -> None:
        """Copy the state and the facts of the whole engine to the replicas of its ranks."""
        if self.is_ranked:
            for replica, source in zip(self.replicas, self.sources):
                replica.follow(self.lead, source)

    def _tell(self, event: Event, reason: str) -> None:
        self.fleet.tell(self.lead, event, reason)

    def _hear(self) -> None:
        """Have the fleet count the requests that the engine has answered and that were not counted yet.

        This is called before a probe counts, so that answered requests are known to the health rules.
        """
        for one in self.replicas:
            self.fleet.hear(one.id)

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                wanted, self._wanted = self._wanted, None
                self._urgent.clear()
                answered = False
                try:
                    answered = await self.tick(full=wanted is not None)
                except Exception:  # without its watcher the replica would keep its state forever
                    log.exception("watching replica %s failed, trying again", self.lead.id)
                finally:
                    if wanted is not None:
                        wanted.set_result(answered)
                self._looked_at = monotonic()
                if await set_within(self._interval() * random.uniform(0.8, 1.2), self._nudged):
                    self._nudged.clear()
                    await set_within(min(CLOSEST, self.interval) - (monotonic() - self._looked_at), self._urgent)
        finally:
            self._wanted = self._wanted or asyncio.get_running_loop().create_future()
            self._wanted.set_result(False)  # no more probes, so release those who wait for one
            await self.access.close()

    def _interval(self) -> float:
        """Return the seconds until the next probe.

        An engine that the gateway launched is probed more often while it starts, as this costs only a refused connect.
        An engine that takes no traffic and has large answers is probed less often, since each probe then reads all of
        them.
        """
        if self._is_large and self.lead.state not in IN_USE:
            return max(self.interval, FACTS)
        young = self.lead.managed and self.lead.state in (State.STARTING, State.WARMING)
        return min(self.interval, STARTING_INTERVAL) if young else self.interval

    def nudge(self) -> None:
        """Make a full probe soon, since the engine may have changed."""
        self._facts_at = float("-inf")
        self._nudged.set()

    async def prove(self) -> bool:
        """Make a full probe now, however recent the last one is; return whether an engine answered.

        When this returns, callbacks about the probe have run.
        """
        if self._wanted is None:
            self._wanted = asyncio.get_running_loop().create_future()
            self._nudged.set()
            self._urgent.set()
        return await asyncio.shield(self._wanted)

    # Results of clients' requests

    def succeeded(self, now: float, count: int = 1) -> None:
        self.health.succeeded(now, count)
        is_well = self.health.opinion(now).verdict is Verdict.GOOD and not self.progress.stalled(now)
        if self.lead.state is State.DEGRADED and is_well:
            self._tell(Event.SERVES, "answers requests again")

    def failed(self, now: float, kind: str) -> None:
        self._was_refused |= kind == "connect"
        if kind in ("connect", "closed", "timeout") and self.pulse.fresh(monotonic()):
            return self.nudge()  # this process, which was stalled, may have caused it
        if kind == "connect" and self._finishes():
            return self.nudge()  # it may shut down and finish its requests: the next probes show that
        self.health.failed(now, kind)
        if kind == "foreign":
            self._doubt("what answered a request there was no inference engine")
        self.judge(now)
        if kind in ("connect", "closed", "foreign"):  # it may have died; a 5xx or a late answer does not suggest that
            self.nudge()

    def _finishes(self) -> bool:
        """Return whether the engine still has requests on open connections; False if it is FAILED.

        True is reused for CLOSEST (0.1) seconds, since each call of `fleet.holds` looks at all requests, and many
        connections may fail at once.
        """
        if self.lead.state is State.FAILED:
            return False
        if monotonic() - self._held_at >= CLOSEST and self.fleet.holds(self.lead.id):
            self._held_at = monotonic()
        return monotonic() - self._held_at < CLOSEST

    def unconfirmed(self, now: float) -> None:
        self.health.unconfirmed()
        if self.health.in_question(now, self.is_computing):
            self._nudged.set()

    def _doubt(self, reason: str) -> None:
        """Stop traffic to the engine until the process at its address lists a model, as only an engine does."""
        self._must_prove = True
        self._tell(Event.DOUBTED, reason)

    # Results of probes

    async def tick(self, full: bool = False) -> bool:
        """Probe the engine, and return whether it answered and was identified.

        `full`: make a full probe in any case. Otherwise one is made if it is due, if the replica is not READY, or if
        another process may answer now.
        """
        lead = self.lead
        if lead.state in (State.DRAINING, State.STOPPED) or (lead.managed and lead.pid is None):
            return False
        pid, began, was_proven = lead.pid, monotonic(), lead.is_proven
        full = full or lead.state is not State.READY or began - self._facts_at >= FACTS
        facts = None if full else await self._brief(began)
        if facts is None:
            full, patience = True, lead.dialect.health_seconds
            facts = await self.access.find(DEADLINE, in_use=lead.state in IN_USE, patience=patience)
        if lead.pid != pid:
            return False  # the process that was probed has ended
        self._is_large, self._closes = facts.large, facts.closes
        self._keep_proof(facts, full, was_proven)
        # A failed probe is repeated at once if this process was stalled meanwhile. Two failures in a row count: a
        # machine that always stalls must not hide that an engine is gone.
        self._was_excused = bool(facts.fault) and not self._was_excused and not self.pulse.saw(began, monotonic())
        if self._was_excused:
            self._nudged.set()
            return False
        lead.fault = facts.fault
        if facts.fault not in ("", "timeout", "own"):  # these faults do not show what is there
            lead.foreign = facts.fault == "refused"
        if full:
            self._facts_at = monotonic()
        now, answered = self.pulse.clock(), False
        if facts.fault == "own":
            lead.reason = facts.error
        elif facts.fault:
            turned_away = facts.turns_away and lead.state in IN_USE and self.fleet.holds(lead.id)
            if turned_away and facts.fault != "connect" and (scrape := (await self._figures())[1]) is not None:
                lead.scraped(scrape)
            self._missed(self.pulse.clock(), facts, turned_away)
        elif (self._moved or not await self._stalls(now, facts)) and await self._warm(facts):
            if full and (problem := await engine_ids(self.access.session, lead, DEADLINE)) is not None:
                facts.problems["transfer"] = problem
            if lead.pid != pid:
                return False
            self._answered(self.pulse.clock(), facts, full)
            await self._question()
            answered = True
        self.fleet.looked(self)
        return answered

    def _keep_proof(self, facts: Facts, full: bool, was_proven: bool) -> None:
        """Set `lead.proof`: an open connection to the engine's process, as a proof that this process still exists.

        It is set to None if a connection proves nothing: the engine closes its connections (announced or not), or it
        answers so late that the gateway closes them. After any other failed probe the former connection is kept. If
        that one is closed, whatever answers next has to identify itself.
        `full`: the probe was a full one. `was_proven`: the former connection was open before the probe.
        """
        if not facts.fault:
            closed = facts.closes or (full and facts.over is not None and facts.over.is_closing())
            self.lead.proof = None if closed else facts.over
        elif facts.fault in ("timeout", "own") and was_proven:
            self.lead.proof = None

    async def _question(self) -> None:
        """Send a test request if it is unclear whether the engine or its requests are at fault (rule 6 of `health`)."""
        lead, health = self.lead, self.health
        if health.in_question(self.pulse.clock(), self.is_computing):
            name, aborted = next(iter(lead.models), ""), lead.dialect.aborted[ANY_PATH]
            status = await asked(self.access.session, lead.url, name, DEADLINE, aborted)
            if health is self.health:  # else it is another process by now
                self._hear()
                now = self.pulse.clock()
                health.asked(now, status in ILL if status else None, self.is_computing)
                self.judge(now)

    @property
    def is_computing(self) -> bool:
        """Whether the engine runs requests, and its counters changed within the last STALLED (20) seconds."""
        scrape = self.lead.scrape
        return scrape is not None and bool(scrape.running) and scrape.at - self.lead.moved_at < STALLED

    async def ask_models(self) -> None:
        """Read the list of models that the engine serves, and report it if it changed.

        The gateway calls this when a client asks for a model that no engine is known to serve.
        """
        lead, pid = self.lead, self.lead.pid
        found = Facts()
        read_models(found, await get(self.access.session, f"{lead.url}/v1/models", SHORT_DEADLINE))
        before = self._snapshot()
        if found.models and lead.pid == pid and lead.state is State.READY:
            lead.models, lead.adapter_roots = found.models, found.adapter_roots
            if self._snapshot() != before:
                self.fleet.changed(self)

    async def _warm(self, facts: Facts) -> bool:
        """Let an engine that the gateway launched compute its first tokens before clients' requests are sent to it.

        The first tokens take 2 s with vLLM on a CPU. A replica that looks so slow at first would get too little traffic
        to correct this impression.
        Returns False if the engine ended or failed meanwhile. The facts of the probe are then outdated, and the next
        probe shows whether the engine died.
        """
        lead, pid = self.lead, self.lead.pid
        if lead.managed and facts.serving and self._warmed_pid != pid:
            self._warmed_pid, lead.reason = pid, "answers, and computes its first tokens"
            log.info("replica %s: %s before it gets requests", lead.id, lead.reason)
            if not await computes(self.access.session, lead.url, next(iter(facts.models), ""), WARMING_DEADLINE):
                return False
        return lead.pid == pid and lead.state not in (State.DRAINING, State.STOPPED)

    async def _brief(self, now: float) -> Facts | None:
        """Read /health, and /metrics if it is due; return None if a full probe is needed.

        It is needed if another process may answer: no connection to the process that was probed last is open, or
        /metrics lacks figures that it had before. `now`: monotonic seconds.
        """
        lead, proof = self.lead, self.lead.proof
        facts = await health(self.access.session, lead.url, SHORT_DEADLINE + lead.dialect.health_seconds)
        facts.serving = True
        if not facts.alive:
            return facts
        if not (self._closes and facts.closes) and (proof is None or proof.is_closing()):
            return None
        is_busy = any(self.fleet.inflight(one.id) > 0 for one in self.replicas)
        if is_busy or now - self._scraped_at >= IDLE_SCRAPE:
            page, facts.scrape = await self._figures()
            if page.fault == "timeout":
                facts.over = None  # its connection was closed, which may be that of /health
            lacks_figures = facts.scrape is None or facts.scrape.running is None
            if 0 < page.status < 500 and self._has_figures and lacks_figures:
                return None
            self._scraped_at = monotonic()
        return facts

    async def _figures(self) -> tuple[Answer, Scrape | None]:
        """Read the engine's /metrics; return the answer, and the figures in it (None if the status is not 200)."""
        page = await get(self.access.session, f"{self.lead.url}/metrics", DEADLINE)
        if page.status != 200:
            return page, None
        return page, await read(page.body, parse, page.body, monotonic(), self.lead.dialect.metrics)

    async def _stalls(self, now: float, facts: Facts) -> bool:
        """Return whether the engine answers but makes no progress; if so, report TROUBLE.

        An engine that the gateway launched is restarted after HUNG (120) seconds without progress. `now`: seconds by
        `pulse.clock`. `facts`: of the present probe.
        """
        lead, progress = self.lead, self.progress
        if lead.state not in TAKES_TRAFFIC or not facts.scrape:
            return False
        progress.look(now, facts.scrape, max(self.fleet.waited(one.id) for one in self.replicas))
        if not progress.stalled(now):
            return False
        # a stalled engine gets no clients' requests, so only a test request can show that it computes again
        if await computes(self.access.session, lead.url, next(iter(lead.models), ""), DEADLINE):
            progress.answered()
            return False
        still = f"answers /health, but has computed nothing for {progress.still(now):.0f} s with requests waiting"
        reason = f"{still}: its engine core hangs"
        self._tell(Event.TROUBLE, reason if self.supervisor else f"{reason}; restart it")
        if self.supervisor and progress.hung(now):
            self.supervisor.restart(f"{reason}, so it was killed")
        return True

    def _missed(self, now: float, facts: Facts, turned_away: bool) -> None:
        """Handle a failed probe: report the failure, and restart a launched engine that takes too long to start.

        `turned_away`: the engine turned the probe away while requests are on open connections to it.
        """
        lead = self.lead
        self._was_refused |= facts.fault == "connect"
        if lead.state is State.STARTING and self.supervisor is not None:
            waited, tail = self.pulse.ran(lead.since, monotonic()), self.supervisor.tail
            log_says = f'last log line: "{said(tail.last, tail.grammar)}"' if tail.last else "its log is empty"
            lead.reason = f"starting for {waited:.0f} s; {log_says}"
            if waited > self.start_timeout:
                remedy = "if it only is slow, raise start_timeout_s in the profile"
                late = f"not ready {waited:.0f} s after its start ({facts.error})"
                self.supervisor.restart(f"{late}; {log_says}; {remedy}")
        elif lead.state in (State.STARTING, State.FAILED) and not lead.managed:
            self.health.probed(now, facts.fault, facts.error)
            why = self.health.silence(now) if facts.fault == "timeout" else facts.error
            self._tell(Event.GONE, f"{why}; asked again every {self._interval():g} s")
        else:
            self._hear()
            self.health.probed(now, facts.fault, facts.error, turned_away)
            self.judge(now)
            if lead.state is State.READY:
                self._nudged.set()  # probe again at once: a second refusal is decisive, and a timeout took long enough

    def _answered(self, now: float, facts: Facts, full: bool) -> None:
        lead = self.lead
        unproven = self._unproven(facts) if full else ""
        lead.foreign = bool(unproven) and facts.serving  # else it is an engine that lists no model yet
        another = full and not unproven and self._is_another(facts)
        if not unproven and self._follow_incarnation(facts.scrape, another) and not full:
            return self.nudge()  # what the old process served says nothing about this one
        if full and not unproven:
            self._learn(facts)
        if facts.scrape and not unproven:
            lead.scraped(facts.scrape)
        self.fleet.looked(self)
        wrong = unproven or (facts.error if not facts.serving else self._wrong_model())
        if wrong and lead.state in IN_USE:
            self._doubt(wrong)
        if lead.state in (State.STARTING, State.FAILED):
            self._tell(Event.ANSWERS, "answers /health")
        if lead.state is State.WARMING:
            if wrong:
                if wrong != lead.reason:
                    log.info("replica %s: still warming: %s", lead.id, wrong)
                lead.reason = wrong
                return
            if not self._must_prove:  # else it may be the same process, whose results still count
                self.health = Health(self.limits)
            self._must_prove, self.progress = False, Progress()
            if self.supervisor:
                self.supervisor.works()
            names = ", ".join(lead.models)  # an engine that lists none now may list some later
            self._tell(Event.SERVES, "answers" + (names and f" and serves {names}"))
        self._hear()
        self.health.probed(now)
        self.judge(now)

    def _unproven(self, facts: Facts) -> str:
        """Return why the process that answers may not be the engine, or "" if it seems to be an engine.

        The reason is that it lists no models. An engine may list none while it loads, so this counts only if it listed
        some before, or if something that is no engine has answered a request there.
        """
        if facts.models or facts.locked or not (self._known[0] or self._must_prove):
            return ""
        return f"something else than the engine answers there: {facts.error or '/v1/models lists no models'}"

    def _is_another(self, facts: Facts) -> bool:
        """Return whether the version, the models or the model's root differ from those that the engine reported before.

        If they do, another process answers. This is for engines that do not report the start time of their process.
        """
        models, root, version = self._known
        known, now = set(base_names(models)), set(base_names(facts.models))
        if known and now and not known & now:
            return True
        pairs = [(root, facts.root)] + [(version, facts.version)] * ("version" not in facts.silent)
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)

    def _wrong_model(self) -> str:
        names, required = self.lead.models, self.lead.required_model
        if required is None or not names or required in names:
            return ""
        why = f"another server is on this port, or it was started without --served-model-name {required}"
        return f"serves {', '.join(names)}, not {required!r}: {why}"

    def _learn(self, facts: Facts) -> None:
        """Copy the facts of a full probe to the replica, and tell the fleet if a READY engine has changed."""
        lead, before = self.lead, self._snapshot()
        facts.describe(lead)
        self._known = lead.models, lead.root, lead.version or self._known[2]
        self._has_figures = facts.scrape is not None and facts.scrape.running is not None
        if facts.scrape:
            self._scraped_at = monotonic()
        if self.given or facts.sources is not None:  # a late answer says nothing about where events are
            self.sources = facts.events(self.access.events, len(self.sources))
        lead.events = self.sources[0]
        twice = self.fleet.duplicate(lead, facts.scrape.created if facts.scrape else None)
        problems = [*problems_of(facts, self.given, self.sources).values(), self.access.problem, twice]
        if twice is not None and str(twice) not in lead.problems:
            log.warning("replica %s: %s", lead.id, twice)
        lead.problems = tuple(str(one) for one in problems if one)
        if lead.state is State.READY and before != self._snapshot():
            self.fleet.changed(self)

    def _snapshot(self) -> tuple[object, ...]:
        """Return the facts that are compared before and after a probe: a READY engine's change in them is reported."""
        lead = self.lead
        sizes = lead.max_model_len, lead.block_size, lead.num_blocks, lead.page_size
        return lead.models, lead.adapter_roots, self.sources, *sizes, lead.role, lead.drops_block, lead.traits

    @property
    def _moved(self) -> bool:
        """Whether the engine answered at another IP address than the one that its replica has."""
        return bool(self.lead.address) and self.lead.address != self.access.address

    def _follow_incarnation(self, scrape: Scrape | None, another: bool) -> bool:
        """Set the replica's incarnation, the id of the engine's process, and report a restart.

        Returns whether another process than before answers; its cache is empty. `scrape`: the engine's metrics, None if
        they were not read. `another`: the models or versions differ from before.
        """
        lead = self.lead
        before, left, moved = lead.incarnation, lead.address, self._moved
        lead.address = self.access.address
        lead.become(self._name(scrape.started if scrape else None, another, moved))
        self._was_refused = False
        if not before or before == lead.incarnation:
            return False
        self.health, self.progress, self._must_prove = Health(self.limits), Progress(), False
        why = "another process answers: it was restarted, its cache is empty"
        if moved:
            why = f"{lead.host} leads to {lead.address} now, no longer to {left}: another engine, whose cache is not known"
        self._tell(Event.RESTARTED, why)
        return True

    def _name(self, started: float | None, another: bool, moved: bool) -> str:
        """Return the incarnation's name: the start time of the engine's process, which is the same for all gateways.

        If the engine reports no start time, the name is its pid if this gateway launched it, else a count of how often
        it came back after refused connections. A process keeps its name even if only a later page has a start time, or
        a later page lacks it.
        An engine that answers at another address than before counts as another process. If its start time is the same,
        "@" and its address are appended to the name. Gateways leave this suffix out when they share what they know of
        the engine.
        `started`: unix time from /metrics, or None. `another`: the models or versions differ from before. `moved`: the
        engine answered at another IP address than before.
        """
        lead, known = self.lead, self.lead.incarnation
        if lead.managed:
            if lead.pid == self._named_pid:
                return known
            self._named_pid = lead.pid
            return f"{started:.2f}" if started else f"pid-{lead.pid}"
        if started and (self._tells_start or self._was_refused or moved or not known):
            self._tells_start = True
            if moved:
                self._mark = f"@{lead.address}" if known == f"{started:.2f}" else ""
            return f"{started:.2f}{self._mark}"
        if known and not moved and not another and (self._tells_start or not self._was_refused):
            return known
        self._lives += 1
        return f"seen-{self._lives}"

    def judge(self, now: float) -> None:
        """Change the engine's state according to the verdict of its health rules.

        An engine that the gateway launched is restarted if it hangs. `now`: seconds by `pulse.clock`.
        """
        lead = self.lead
        verdict, reason = self.health.opinion(now)
        if verdict is Verdict.LOST:
            reason += " though its process is alive" if lead.managed and lead.pid else ""
            if lead.state in (State.WARMING, *IN_USE):
                self._tell(Event.GONE, reason)
            # A refused connection alone restarts no engine: if its process were dead, the supervisor would know.
            if self.supervisor and self.health.hung(now):
                self.supervisor.restart(f"{reason}: it hangs, so it was killed")
        elif verdict is Verdict.LEAVING:
            self._tell(Event.LEAVES, reason)
        elif lead.state is State.DEGRADED and self.progress.stalled(now):
            pass  # the hang is reported already; requests that failed because of it are no new reason
        elif verdict is Verdict.TROUBLE:
            if lead.state is not State.LEAVING or self.health.stayed:  # a late probe alone does not end LEAVING
                self._tell(Event.TROUBLE, reason)
        elif lead.state is State.DEGRADED or (lead.state is State.LEAVING and self.health.answers):
            self._tell(Event.SERVES, "answers probes again")

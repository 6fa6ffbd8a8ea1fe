"""The watcher of one engine: it probes the engine and turns the answers into lifecycle events.

Probes are cheap: GET /health once a second; /metrics once a second while the engine has work, else every 5 s. A full
probe, which reads everything else too, is made every 10 s, and each time while the replica is not READY. All requests
have deadlines and use one session, at jittered times so that many engines are not probed in one burst.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from replicas.access import Access
from replicas.adopt import Facts, engine_ids, health, problems_of, served_models
from replicas.answer import Answer
from replicas.ask import get, read
from replicas.engines.dialect import ANY_PATH
from replicas.health import Health, Limits, Verdict
from replicas.launch.exits import said
from replicas.launch.supervisor import Supervisor
from replicas.lifecycle import IN_USE, TAKES_TRAFFIC, Event, State
from replicas.metrics import Scrape, parse
from replicas.problems import Problem
from replicas.progress import ILL, STALLED, Progress, asked, computes
from replicas.pulse import Pulse
from replicas.replica import EventSource, Replica
from replicas.served import base_names

log = logging.getLogger("replicas")

# Seconds between reads of an idle engine's /metrics, between full probes, least between any two probes, between probes
# while an engine starts; then deadlines of an answer.
IDLE_SCRAPE, FACTS, CLOSEST, STARTING_INTERVAL = 5.0, 10.0, 0.1, 0.2
DEADLINE, SHORT_DEADLINE = 2.0, 1.0
WARMING_DEADLINE = 30.0  # for a launched engine's first tokens; a slower engine gets traffic anyway


class Known(NamedTuple):
    """The last report that identifies an engine, kept after the engine is gone."""

    models: dict[str, str | None]
    root: str | None
    version: str | None


class Watch:
    def __init__(
        self,
        replica: Replica,
        tell: Callable[[Replica, Event, str], None],
        changed: Callable[[Replica], None],
        looked: Callable[[], None] = lambda: None,
        *,
        busy: Callable[[], bool],
        waited: Callable[[], float] = lambda: 0.0,
        hear: Callable[[], object] = lambda: None,
        holds: Callable[[], bool] = lambda: False,
        duplicate: Callable[[float | None], Problem | None] = lambda created: None,
        interval: float = 1.0,
        limits: Limits = Limits(),
        given: EventSource | None = None,
        supervisor: Supervisor | None = None,
        start_timeout: float = 0.0,
        pulse: Pulse | None = None,
    ):
        """Prepare to watch the engine that `replica` stands for; `run` starts.

        `tell(replica, event, reason)`: called with lifecycle events.
        `changed(replica)`: called when a READY engine's models, block format, event addresses and the like differ from
        before.
        `looked()`: called whenever new facts may be known, before any `tell`.
        `busy()`: returns whether the gateway has open requests to the engine.
        `waited()`: returns the seconds since the oldest unanswered prompt was sent.
        `hear()`: calls `succeeded` for answers that were not reported yet; called before a probe counts.
        `holds()`: returns whether requests are on open connections to the engine.
        `duplicate(created)`: returns the problem that another replica is the same engine, from the creation time of one
        of the engine's counters.
        `interval`: seconds between probes. `limits`: of the rules for health.
        `given`: the KV event source from the operator or the profile, used in place of the engine's report.
        `pulse`: records when this process was stalled; `health` and `progress` get times of its clock.
        `supervisor`, `start_timeout` (seconds): of an engine that the gateway launched.
        """
        self.replica, self.tell, self.changed, self.looked = replica, tell, changed, looked
        self.access = Access(replica.url, replica.host, replica.tls, given, replica.credentials)
        self.busy, self.waited, self.hear, self.holds, self.duplicate = busy, waited, hear, holds, duplicate
        self.interval, self.limits = interval, limits
        self.given = given
        self.supervisor, self.start_timeout = supervisor, start_timeout
        self.pulse = pulse or Pulse()
        self._was_excused = False  # the last probe failed, which was ignored because this process was stalled
        self.sources: list[EventSource | None] = [given]  # one for each data-parallel rank
        self.health, self.progress = Health(limits), Progress()
        self._nudged, self._urgent = asyncio.Event(), asyncio.Event()
        # while a caller waits for the next full probe: its future, which gets whether an engine answered
        self._wanted: asyncio.Future[bool] | None = None
        self._lives = 0  # how often the engine came back, if it does not report its start time
        self._was_refused = self._tells_start = False
        self._known = Known({}, None, None)
        self._must_prove = False  # something that is no engine answered there
        self._has_figures = False  # /metrics reported the number of running requests
        self._named_pid: int | None = None
        self._mark = ""  # distinguishes this incarnation from one at another address with the same start time
        self._warmed_pid: int | None = None
        self._facts_at = self._scraped_at = self._looked_at = self._held_at = float("-inf")
        self._closes = False  # the engine closes the connection after each answer
        self._is_large = False  # the last probe had large answers

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
                    log.exception("watching replica %s failed, trying again", self.replica.id)
                finally:
                    if wanted is not None:
                        wanted.set_result(answered)
                self._looked_at = monotonic()
                await self._pause()
        finally:
            self._wanted = self._wanted or asyncio.get_running_loop().create_future()
            self._wanted.set_result(False)  # no more probes, so release those who wait for one
            await self.access.close()

    async def _pause(self) -> None:
        if await _set_within(self._interval() * random.uniform(0.8, 1.2), self._nudged):
            self._nudged.clear()
            await _set_within(min(CLOSEST, self.interval) - (monotonic() - self._looked_at), self._urgent)

    def _interval(self) -> float:
        """Return the seconds until the next probe.

        An engine that the gateway launched is probed more often while it starts, as this costs only a refused connect.
        An engine that takes no traffic and has large answers is probed less often, since each probe then reads all of
        them.
        """
        if self._is_large and self.replica.state not in IN_USE:
            return max(self.interval, FACTS)
        young = self.replica.managed and self.replica.state in (State.STARTING, State.WARMING)
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

    # What traffic shows

    def succeeded(self, now: float, count: int = 1) -> None:
        self.health.succeeded(now, count)
        if (
            self.replica.state is State.DEGRADED
            and not self.progress.stalled(now)
            and self.health.opinion(now).verdict is Verdict.GOOD
        ):
            self.tell(self.replica, Event.SERVES, "answers requests again")

    def failed(self, now: float, kind: str) -> None:
        self._was_refused |= kind == "connect"
        if kind in ("connect", "closed", "timeout") and self.pulse.fresh(monotonic()):
            return self.nudge()  # it may have broken because we did not read
        if kind == "connect" and self._finishes():
            return self.nudge()  # it may have stopped listening to finish its requests: the next probes show
        self.health.failed(now, kind)
        if kind == "foreign":
            self._doubt("what answered a request there was no inference engine")
        self._judge(now)
        if kind in ("connect", "closed", "foreign"):  # it may have died; a 5xx or a late answer does not suggest that
            self.nudge()

    def _finishes(self) -> bool:
        """Return whether requests are on open connections to the engine; False if it is FAILED.

        True is remembered for CLOSEST seconds: when many connections fail at once, `holds` is called seldom, as each
        call looks at all requests.
        """
        if self.replica.state is State.FAILED:
            return False
        if monotonic() - self._held_at >= CLOSEST and self.holds():
            self._held_at = monotonic()
        return monotonic() - self._held_at < CLOSEST

    def unconfirmed(self, now: float) -> None:
        self.health.unconfirmed()
        if self.health.in_question(now, self.is_computing):
            self._nudged.set()

    def compare(self, now: float, answered: int, failed: int) -> None:
        """Compare the engine's failures with those of its siblings, after one of its requests failed.

        `answered`, `failed`: the recent requests of all other engines of the model together.
        """
        if self.health.compare(now, answered, failed):
            self._judge(now)

    def _doubt(self, reason: str) -> None:
        """Stop traffic until whatever answers at the engine's address has shown that it is an engine."""
        self._must_prove = True
        self.tell(self.replica, Event.DOUBTED, reason)

    # What probes show

    async def tick(self, full: bool = False) -> bool:
        """Probe the engine, fully if this is due or something is new; return whether it answered and was identified."""
        replica = self.replica
        if replica.state in (State.DRAINING, State.STOPPED) or (replica.managed and replica.pid is None):
            return False
        pid, now, was_proven = replica.pid, monotonic(), replica.is_proven
        full = full or replica.state is not State.READY or now - self._facts_at >= FACTS
        facts = None if full else await self._brief(now)
        if facts is None:
            full = True
            facts = await self.access.find(
                DEADLINE, in_use=replica.state in IN_USE, patience=replica.dialect.health_seconds
            )
        if replica.pid != pid:
            return False  # the process ended meanwhile: the answer is about the past
        self._is_large = facts.large
        self._keep_proof(facts, full, was_proven)
        if self._excuses(facts, now):
            return False
        replica.fault = facts.fault
        if facts.fault not in ("", "timeout", "own"):  # these do not show what is there
            replica.foreign = facts.fault == "refused"
        if full:
            self._facts_at = monotonic()
        now, answered = self.pulse.clock(), False
        if facts.fault == "own":
            replica.reason = facts.error
        elif facts.fault:
            turned_away = facts.turns_away and replica.state in IN_USE and self.holds()
            if turned_away and facts.fault != "connect" and (scrape := (await self._figures())[1]) is not None:
                replica.scraped(scrape)
            self._missed(self.pulse.clock(), facts, turned_away)
        elif (self._moved or not await self._stalls(now, facts)) and await self._warm(facts):
            if full and (problem := await engine_ids(self.access.session, replica, DEADLINE)) is not None:
                facts.problems["transfer"] = problem
            if replica.pid != pid:
                return False
            self._answered(self.pulse.clock(), facts, full)
            await self._question()
            answered = True
        self.looked()
        return answered

    def _excuses(self, facts: Facts, since: float) -> bool:
        """Return whether to ignore a failed probe and repeat it at once, since this process was stalled meanwhile.

        `since`: when the probe began. Two failures in a row are not ignored: a machine that always stalls must not hide
        that an engine is gone.
        """
        self._was_excused = bool(facts.fault) and not self._was_excused and not self.pulse.saw(since, monotonic())
        if self._was_excused:
            self._nudged.set()
        return self._was_excused

    def _keep_proof(self, facts: Facts, full: bool, was_proven: bool) -> None:
        """Keep a connection as the proof that the process still exists, or drop one that proves nothing.

        A connection proves nothing if the engine closes its connections, announced or not, or answers so late that this
        process closes them. If the connection kept so far was already broken (`was_proven` is false), a failed probe
        keeps the broken one, so that whatever answers next has to identify itself.
        """
        self._closes = facts.closes
        if not facts.fault:
            closed = facts.closes or (full and facts.over is not None and facts.over.is_closing())
            self.replica.proof = None if closed else facts.over
        elif facts.fault in ("timeout", "own") and was_proven:
            self.replica.proof = None

    async def _question(self) -> None:
        """Send a test request if it is unclear whether the engine or its requests are at fault (rule 6 of `health`)."""
        replica, health = self.replica, self.health
        if health.in_question(self.pulse.clock(), self.is_computing):
            name, aborted = next(iter(replica.models), ""), replica.dialect.aborted[ANY_PATH]
            status = await asked(self.access.session, replica.url, name, DEADLINE, aborted)
            if health is self.health:  # else it is another process by now
                self.hear()
                now = self.pulse.clock()
                health.asked(now, status in ILL if status else None, self.is_computing)
                self._judge(now)

    @property
    def is_computing(self) -> bool:
        """Whether the engine has work, and its counters changed within the last STALLED seconds."""
        scrape = self.replica.scrape
        return scrape is not None and bool(scrape.running) and scrape.at - self.replica.moved_at < STALLED

    async def ask_models(self) -> None:
        """Read the models that the engine serves now, as a client wants one that no engine is known to serve."""
        replica, pid = self.replica, self.replica.pid
        found = await served_models(self.access.session, replica.url, SHORT_DEADLINE)
        before = self._told()
        if found.models and replica.pid == pid and replica.state is State.READY:
            replica.models, replica.adapter_roots = found.models, found.adapter_roots
            if self._told() != before:
                self.changed(replica)

    async def _warm(self, facts: Facts) -> bool:
        """Let an engine that the gateway launched compute its first tokens before clients wait for them.

        The first tokens take 2 s with vLLM on a CPU, and a replica that looks so slow at first would get little traffic
        to correct this impression. Returns False if the engine ended meanwhile or failed: the probe's facts are then
        outdated, and the next probe shows whether the engine died.
        """
        replica, pid = self.replica, self.replica.pid
        if replica.managed and facts.serving and self._warmed_pid != pid:
            self._warmed_pid, replica.reason = pid, "answers, and computes its first tokens"
            log.info("replica %s: %s before it gets requests", replica.id, replica.reason)
            if not await computes(self.access.session, replica.url, next(iter(facts.models), ""), WARMING_DEADLINE):
                return False
        return replica.pid == pid and replica.state not in (State.DRAINING, State.STOPPED)

    async def _brief(self, now: float) -> Facts | None:
        """Read /health, and /metrics if due; None if a full probe is needed because the process may be another one.

        It may be if no open connection leads to the process that was probed last, or if /metrics lacks its figures.
        """
        answer = await health(
            self.access.session, self.replica.url, SHORT_DEADLINE + self.replica.dialect.health_seconds
        )
        facts = Facts(
            alive=not answer.fault,
            fault=answer.fault,
            error=answer.error,
            serving=True,
            closes=answer.closes,
            over=answer.over,
            turns_away=answer.turns_away,
        )
        proof = self.replica.proof
        always_closes = self._closes and facts.closes
        if facts.alive and not always_closes and (proof is None or proof.is_closing()):
            return None
        due = 0.0 if self.busy() else IDLE_SCRAPE
        if facts.alive and now - self._scraped_at >= due:
            page, facts.scrape = await self._figures()
            if page.fault == "timeout":
                facts.over = None  # we closed its connection, which may have been the same
            if (
                page.status
                and page.status < 500
                and self._has_figures
                and (facts.scrape is None or facts.scrape.running is None)
            ):
                return None
            self._scraped_at = monotonic()
        return facts

    async def _figures(self) -> tuple[Answer, Scrape | None]:
        """Read the engine's /metrics; return the answer, and the figures in it (None if the status is not 200)."""
        page = await get(self.access.session, f"{self.replica.url}/metrics", DEADLINE)
        if page.status != 200:
            return page, None
        return page, await read(page.body, parse, page.body, monotonic(), self.replica.dialect.metrics)

    async def _stalls(self, now: float, facts: Facts) -> bool:
        """Return whether the engine answers but makes no progress; if so, report TROUBLE and restart a launched engine.

        `now`: by the clock of `pulse`. An engine is restarted only after HUNG seconds without progress.
        """
        replica, progress = self.replica, self.progress
        if replica.state not in TAKES_TRAFFIC or not facts.scrape:
            return False
        progress.look(now, facts.scrape, self.waited())
        if not progress.stalled(now):
            return False
        name = next(iter(replica.models), "")
        # it gets no other requests, so nothing else would show
        if await computes(self.access.session, replica.url, name, DEADLINE):
            progress.answered()
            return False
        reason = f"answers /health, but has computed nothing for {progress.still(now):.0f} s with requests waiting"
        self.tell(
            replica, Event.TROUBLE, f"{reason}: its engine core hangs" + ("" if self.supervisor else "; restart it")
        )
        if self.supervisor and progress.hung(now):
            self.supervisor.restart(f"{reason}: its engine core hangs, so it was killed")
        return True

    def _missed(self, now: float, facts: Facts, turned_away: bool) -> None:
        """Handle a failed probe.

        `turned_away`: the engine turned the probe away while requests are on open connections to it.
        """
        replica = self.replica
        self._was_refused |= facts.fault == "connect"
        if replica.state is State.STARTING and replica.managed:
            self._still_starting(facts.error)
        elif replica.state in (State.STARTING, State.FAILED) and not replica.managed:
            self.health.probed(now, facts.fault, facts.error)
            why = self.health.silence(now) if facts.fault == "timeout" else facts.error
            self.tell(replica, Event.GONE, f"{why}; asked again every {self._interval():g} s")
        else:
            self.hear()
            self.health.probed(now, facts.fault, facts.error, turned_away)
            self._judge(now)
            if replica.state is State.READY:
                self._nudged.set()  # probe again at once: a second refusal is decisive, and a timeout took long enough

    def _still_starting(self, error: str) -> None:
        replica, waited = self.replica, self.pulse.ran(self.replica.since, monotonic())
        if waited > self.start_timeout:
            self.supervisor.restart(
                f"not ready {waited:.0f} s after its start ({error}); last log line: {self._log()}; if it only is"
                " slow, raise start_timeout_s in the profile"
            )
        else:
            replica.reason = f"starting for {waited:.0f} s; last log line: {self._log()}"

    def _log(self) -> str:
        return f'"{said(tail.last, tail.grammar)}"' if (tail := self.supervisor.tail).last else "none yet"

    def _answered(self, now: float, facts: Facts, full: bool) -> None:
        replica = self.replica
        unproven = self._unproven(facts) if full else ""
        replica.foreign = bool(unproven) and facts.serving  # else it is an engine that lists no model yet
        another = full and not unproven and self._is_another(facts)
        if not unproven and self._follow_incarnation(facts.scrape, another) and not full:
            return self.nudge()  # what the old process served says nothing about this one
        if full and not unproven:
            self._learn(facts)
        if facts.scrape and not unproven:
            replica.scraped(facts.scrape)
        self.looked()
        wrong = unproven or (facts.error if not facts.serving else self._wrong_model())
        if wrong and replica.state in IN_USE:
            self._doubt(wrong)
        if replica.state in (State.STARTING, State.FAILED):
            self.tell(replica, Event.ANSWERS, "answers /health")
        if replica.state is State.WARMING:
            if wrong:
                if wrong != replica.reason:
                    log.info("replica %s: still warming: %s", replica.id, wrong)
                replica.reason = wrong
                return
            if not self._must_prove:  # else it is the same process, and the results of its requests still count
                self.health = Health(self.limits)
            self._must_prove, self.progress = False, Progress()
            if self.supervisor:
                self.supervisor.works()
            names = ", ".join(replica.models)  # an engine that lists none now may list some later
            self.tell(replica, Event.SERVES, "answers" + (names and f" and serves {names}"))
        self.hear()
        self.health.probed(now)
        self._judge(now)

    def _unproven(self, facts: Facts) -> str:
        """Return why whatever answers may be no engine, or "" if it seems to be one.

        The reason is that it lists no models, although the engine did before, or although a request was answered by
        something that is no engine.
        """
        if facts.models or facts.locked or not (self._known.models or self._must_prove):
            return ""
        what = facts.error or "/v1/models lists no models"
        return f"something else than the engine answers there: {what}"

    def _is_another(self, facts: Facts) -> bool:
        """Return whether version, models or model root show another engine than before.

        This replaces the start time for engines that do not report one.
        """
        before = self._known
        known = set(base_names(before.models))
        now = set(base_names(facts.models))
        versions = (before.version, facts.version) if "version" not in facts.silent else (None, None)
        roots = before.root, facts.root
        return bool(known and now and not known & now) or any(
            None not in pair and pair[0] != pair[1] for pair in (versions, roots)
        )

    def _wrong_model(self) -> str:
        names, required = self.replica.models, self.replica.required_model
        if required is None or not names or required in names:
            return ""
        return (
            f"serves {', '.join(names)}, not {required!r}: another server is on this port, or it was started "
            f"without --served-model-name {required}"
        )

    def _learn(self, facts: Facts) -> None:
        replica = self.replica
        before = self._told()
        replica.models, replica.adapter_roots = facts.models, facts.adapter_roots
        replica.root = facts.root
        replica.max_model_len = facts.max_model_len
        if "version" not in facts.silent:
            replica.dialect, replica.version = facts.dialect, facts.version
        self._known = Known(replica.models, replica.root, replica.version or self._known.version)
        self._has_figures = facts.scrape is not None and facts.scrape.running is not None
        if facts.scrape:
            self._scraped_at = monotonic()
            replica.cache_dtype = facts.scrape.cache_dtype
            if "version" not in facts.silent:  # the version decides whether the page would show it
                replica.unable = facts.told.unable
                given, replica.looks_to_end = replica.launched_to_drop, facts.told.looks_to_end
                replica.finds_parts, replica.takes_priority = facts.told.finds_parts, facts.told.takes_priority
                replica.drops_block = facts.told.drops_block if given is None else given
        replica.block_size = facts.block_of(replica.context_parallel) or replica.block_size
        replica.num_blocks = facts.num_blocks or replica.num_blocks
        if "version" not in facts.silent:
            replica.page_size = facts.told.page_size
        if self.given or facts.sources is not None:  # a late answer says nothing about where events are
            self.sources = facts.events(self.access.events, len(self.sources))
        replica.events = self.sources[0]
        duplicate = self.duplicate(facts.scrape.created if facts.scrape else None)
        problems = [*problems_of(facts, self.given, self.sources).values(), self.access.problem, duplicate]
        replica.problems = tuple(str(one) for one in problems if one)
        if replica.state is State.READY and before != self._told():
            self.changed(replica)

    def _told(self) -> tuple:
        replica = self.replica
        return (
            replica.models,
            replica.adapter_roots,
            self.sources,
            replica.max_model_len,
            replica.block_size,
            replica.num_blocks,
            replica.page_size,
            replica.role,
            replica.drops_block,
            replica.traits,
        )

    @property
    def _moved(self) -> bool:
        """Whether the engine answered at another IP address than its replica has."""
        return bool(self.replica.address) and self.replica.address != self.access.address

    def _follow_incarnation(self, scrape: Scrape | None, another: bool) -> bool:
        """Set the replica's incarnation, and report a restart; return whether there was one.

        Another process has another, empty cache. `another`: the models and versions differ from before.
        """
        replica = self.replica
        before, left, moved = replica.incarnation, replica.address, self._moved
        replica.address = self.access.address
        replica.become(self._name(scrape.started if scrape else None, another, moved))
        self._was_refused = False
        if not before or before == replica.incarnation:
            return False
        self.health, self.progress, self._must_prove = Health(self.limits), Progress(), False
        why = "another process answers: it was restarted, its cache is empty"
        if moved:
            why = f"{replica.host} leads to {replica.address} now, no longer to {left}: another engine, whose cache is not known"
        self.tell(replica, Event.RESTARTED, why)
        return True

    def _name(self, started: float | None, another: bool, moved: bool) -> str:
        """Return the incarnation's name: the start time of the process, which all gateways read alike.

        If the engine reports no start time, the name is its pid if this gateway launched it, else a count of how often
        it came back after refused connections. An incarnation keeps its name even if a later page has a start time or
        lacks it. An engine at another address is another incarnation: if it has the same start time, "@" and its
        address are appended, which gateways leave out when they share what they know of it.
        """
        replica, known = self.replica, self.replica.incarnation
        if replica.managed:
            if replica.pid == self._named_pid:
                return known
            self._named_pid = replica.pid
            return f"{started:.2f}" if started else f"pid-{replica.pid}"
        if started and (self._tells_start or self._was_refused or moved or not known):
            self._tells_start = True
            if moved:
                self._mark = f"@{replica.address}" if known == f"{started:.2f}" else ""
            return f"{started:.2f}{self._mark}"
        if known and not moved and not another and (self._tells_start or not self._was_refused):
            return known
        self._lives += 1
        return f"seen-{self._lives}"

    def _judge(self, now: float) -> None:
        replica = self.replica
        verdict, reason = self.health.opinion(now)
        if verdict is Verdict.LOST:
            self._lost(now, reason)
        elif verdict is Verdict.LEAVING:
            self.tell(replica, Event.LEAVES, reason)
        elif replica.state is State.DEGRADED and self.progress.stalled(now):
            pass  # reported already; requests that were taken from it since then are no new reason
        elif verdict is Verdict.TROUBLE:
            if replica.state is not State.LEAVING or self.health.stayed:  # a late probe does not show that it stays
                self.tell(replica, Event.TROUBLE, reason)
        elif replica.state is State.DEGRADED or (replica.state is State.LEAVING and self.health.answers):
            self.tell(replica, Event.SERVES, "answers probes again")

    def _lost(self, now: float, reason: str) -> None:
        """Report the replica as gone; if the engine hangs and the gateway launched it, restart it.

        A refused connection alone does not restart an engine: if its process were dead, the supervisor would know.
        """
        replica = self.replica
        alive = " though its process is alive" if replica.managed and replica.pid else ""
        if replica.state in (State.WARMING, *IN_USE):
            self.tell(replica, Event.GONE, reason + alive)
        if self.supervisor and self.health.hung(now):
            self.supervisor.restart(f"{reason}{alive}: it hangs, so it was killed")


async def _set_within(seconds: float, event: asyncio.Event) -> bool:
    """Wait until `event` is set, for at most `seconds`; return whether it is set."""
    try:
        # Not `wait_for`: in Python 3.11 it swallows a cancellation that arrives together with the event.
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return event.is_set()

"""The gateway process: makes its parts from the settings, connects, starts and stops them.

Start: the gateway loads the tokenizer and binds both ports before it starts any engine. An error in the settings is
therefore reported at once and leaves nothing running. Engines may become ready later; until then requests get 503.

Stop (on SIGTERM, SIGINT or a closed terminal): new requests are refused, and running ones get `drain_timeout_s` seconds
to end. After that, requests that have no byte of an answer yet get 503, and the other answers are cut off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from cachemap import CacheMap, EventIntake
from cachemap.background import Background, Failures, FaultRecord
from cachemap.events import records
from cachemap.events.records import Blocks
from policies import CostGroup, Ledger, Own
from policies.classes import DEFAULT_CLASS
from replicas import Fleet, Replica, State
from replicas.health import Limits as HealthLimits
from replicas.kept import KeptReplicas
from replicas.pulse import BREAKS_FROM, Pulse

from . import datapath
from .http.server import Server
from .lifetime import cannot_listen, greeting, run
from .model import launches, main_model
from .model_files import HASHED_AS
from .models import Models
from .ops import traces
from .ops.admin import Admin
from .ops.guard import Guard
from .ops.metrics import Metrics, Reading
from .ops.recent.recent import Recent
from .ops.view import View
from .proxy.backend import Backend
from .proxy.failures import retries
from .proxy.placement.decisions import Decisions
from .settings import ConfigError, Secrets, Settings, known_urls, overload_of, read_secrets
from .spaces import ModelSpace
from .tenants.key_file import KeyFileError
from .tenants.keys import CLIENT_KEYS, Keys

if TYPE_CHECKING:
    from cachemap.cluster import SharedIntake

log = logging.getLogger("hitherto")

CARE_SECONDS = 0.25  # seconds between two rounds of `Gateway._care`, which looks after the replicas
# Kinds of background work; failures are counted for each kind
CARE, FOLLOW_KEYS, FOLLOW_CERTIFICATE = "care for replicas", "API keys", "TLS certificate"
METRICS = "metrics"  # a part of the metrics page that failed
CONNECTIONS, CLIENTS = "connections to replicas", "connections of clients"
SHORT = "the gateway has no descriptors left: raise its limit of open files (LimitNOFILE, `ulimit -Hn`)"
FULL = (
    "new ones get 503 gateway_full, since the gateway nears its limit of open files and none is idle that could give way:"
    " raise the limit (LimitNOFILE, `ulimit -Hn`)"
)
FOLLOW_RECENT, FOLLOW_PODS = "recent figures", "pods of the cluster"


class Gateway:
    """One gateway, which serves between `await start()` and `await stop()`.

    A worker process (one of several gateways on one port) has a gateway too, but calls `listen` and `begin` instead of
    `start`.
    """

    def __init__(
        self,
        settings: Settings,
        costs: dict[str, Any] | None = None,
        decision_prefix: str = "",
        secrets: Secrets | None = None,
    ):
        """Make the parts of the gateway from its settings; nothing is started.

        `costs`: the learned costs of tokens, from another gateway's `CostGroup.state`; None to start with none.
        `decision_prefix`: the first characters of the ids of requests that are placed for other proxies (`/decide`).
        `secrets`: the contents of the secret files that the settings name; None to read these files here.
        """
        self.settings = settings
        secrets = read_secrets(settings) if secrets is None else secrets
        self.background = Background()
        for kind in (METRICS, CONNECTIONS, CLIENTS):
            self.background.failures[kind] = Failures()
        self.map = CacheMap(settings.cache_budget)
        self.ledger = Ledger()
        self.costs = CostGroup(costs)
        self.pulse = Pulse()
        self.pulse.on_held_up += [_say_held_up, lambda now, seconds: [one.held_up() for one in self.intakes.values()]]
        self.fleet = Fleet(
            lambda replica: self.ledger.own(replica)[0],
            lambda replica: self.proxy.waited(replica, monotonic()),
            lambda replica: self.proxy.settling.tell_answers(replica),
            holds=lambda engine: self.proxy.handler.failures.holds(engine),
            drain_timeout=settings.drain_timeout_s,
            limits=HealthLimits(lost_after=settings.hung_after_s),
            model=settings.served_model_name,
            authorities=settings.replica_ca,
            engine_key=secrets.engine_key,
            pulse=self.pulse,
        )
        # A gateway with API keys, or with a key for its engines, passes clients' keys on only with `forward_api_keys`.
        keeps_keys = settings.forward_api_keys or (settings.api_keys is None and settings.engine_api_key is None)
        self._hidden = frozenset() if keeps_keys else CLIENT_KEYS
        overload = overload_of(settings)
        classes = overload.classes.all if overload is not None else (DEFAULT_CLASS,) if settings.slo_figures else ()
        try:
            self.keys = Keys(settings.api_keys, settings.class_names) if settings.api_keys is not None else None
        except KeyFileError as error:
            raise ConfigError(str(error), "api_keys") from None
        names, tenants = [one.name for one in classes], self.keys.names if self.keys is not None else ()
        labels = {"replica": self.fleet.replicas, "policy": settings.shadow, "class": names, "tenant": tenants}
        self.metrics = Metrics(labels)
        self.metrics.on_failure = lambda part, error: self.background.failed(METRICS, error, part)
        self.metering = datapath.metering(settings, self.keys, self.metrics, self.background)
        self.certificate = datapath.certificate(settings)
        self.usage_log = datapath.usage_log(settings, self.metrics)
        self.kept = KeptReplicas(settings.replica_file) if settings.replica_file is not None else None
        self.discovery = datapath.discovery(settings, self.fleet)
        self._was_ready = False
        self.slots: dict[str, int] = {}
        self.intakes: dict[str, EventIntake | SharedIntake] = {}
        self.shared = datapath.shared_map(settings, self.map, self.background)
        self.launches = launches(settings)
        self._is_launching = bool(self.launches)
        directory, served_name = main_model(settings, self.launches)
        self.models = Models(settings, directory, served_name, self.costs)
        self.models.moved, self.models.on_change = self._moved, self._models_changed
        self.receiver = traces.receiver()
        self.spans = traces.start()
        self.proxy = datapath.proxy(
            settings,
            self.spans,
            models=self.models,
            cachemap=self.map,
            metrics=self.metrics,
            ledger=self.ledger,
            costs=self.costs,
            replicas=self.fleet.replicas,
            on_traffic=self.traffic,
            ask_models=self.fleet.ask_models,
            keys=self.keys,
            metering=self.metering,
            usage_log=self.usage_log,
            pulse=self.pulse,
            overload=overload,
        )
        placing, known_models = self.proxy.placing, self.proxy.eligible.known
        known_models.unlisted = self._unlisted
        if self.discovery is not None:
            self.discovery.leaving = known_models.expect_back
        for known in (self.proxy.router.transfers, self.proxy.router.pulls):
            known.size_of = self.models.prompt_bytes
        self.shared_ledger = placing.shared = datapath.shared_ledger(
            settings, self.metrics, self.ledger, self.background
        )
        self._in_redis = [one for one in (self.shared, self.shared_ledger) if one is not None]
        if self.metering is not None and self.metering.shared is not None:
            self._in_redis.append(self.metering.shared)
        self.server = Server(self.proxy, datapath.limits(settings, self.models.pipelines))
        self.server.clients.origins = datapath.origins(settings)
        if self.keys is not None:
            self.server.clients.head_fault = self.keys.head_fault
        self.server.clients.on_full = lambda: self.background.failed(CLIENTS, OSError(FULL))
        self.decisions = Decisions(self.proxy, decision_prefix)
        self.view = View(settings, self.metrics, self.fleet.replicas, self.ledger, self.map, self.slots, self.intakes)
        self.view.shared, self.view.shared_ledger = self.shared, self.shared_ledger
        self.view.models, self.view.served_by = self.models, known_models.served_by
        self.view.expected_back, self.view.gone = known_models.expected_back, known_models.gone
        self.view.background, self.view.policies = self.background, self._own_policies()
        self.view.keys, self.view.metering = self.keys, self.metering
        self.view.certificate, self.view.control = self.certificate, self.proxy.control
        self.view.discovery = self.discovery
        if placing.queue is not None:
            self.view.waiting = placing.queue.waiting
        self.metrics.read_from(self.view.reading)
        self.metrics.read_from(self._connections)
        self.recent = Recent(self.view, placing, settings.live_prompts)
        if self.proxy.control is not None:
            self.proxy.control.on_change = self.recent.control_changed
        self.fleet.on_change += [self._replica_changed, self.recent.replica_changed]
        self.fleet.on_changed.append(self._models_changed)
        self.admin = Admin(self, Guard((settings.admin_host, *settings.admin_allow_host), secrets.admin_token))
        self.port = self.admin_port = 0
        self._tasks: list[asyncio.Task[None]] = []

    def _own_policies(self) -> FaultRecord:
        """Return a record that counts the failures of routing policies that come from users' own files.

        These are the policy in effect, and those in shadow mode, whose choices are only compared. Each is set to report
        its failures to the record.
        """
        record, shadows = FaultRecord(), self.proxy.placing.shadows
        in_shadow = shadows.policies.items() if shadows is not None else ()
        for name, policy in ((self.settings.policy, self.proxy.router.policy), *in_shadow):
            if isinstance(policy, Own):
                record.failures[name] = Failures()
                policy.on_failure = partial(record.count, name)
        return record

    # --- start and stop

    async def start(self) -> None:
        await self.listen()
        try:
            self.admin_port = await self.admin.start(self.settings.admin_host, self.settings.admin_port)
            await self.begin(known_urls(self.settings))
        except BaseException:
            await self.stop(0)
            raise

    async def listen(self, shared_port: bool = False) -> None:
        """Begin to accept clients' connections. Raises ConfigError if the gateway cannot listen on its port.

        `shared_port`: other processes of this user may listen on the port too.
        """
        settings = self.settings
        tls = self.certificate.context if self.certificate is not None else None
        try:
            self.port = await self.server.start(settings.host, settings.port, shared_port, tls)
        except OSError as error:
            raise cannot_listen(settings, error) from None

    async def begin(self, urls: Iterable[str]) -> None:
        """Start all background work, add the replicas that run at `urls`, and launch the engines of the settings."""
        for shared in self._in_redis:
            shared.start()
        for url in urls:
            self.fleet.add(url)
        for launch in self.launches:
            await self.fleet.launch(*launch)
        self._is_launching = False
        work = {CARE: self._care, FOLLOW_RECENT: self.recent.follow}
        if self.discovery is not None:
            work[FOLLOW_PODS] = self.discovery.run
        if self.keys is not None:
            work[FOLLOW_KEYS] = self.keys.follow
        if self.certificate is not None:
            work[FOLLOW_CERTIFICATE] = self.certificate.follow
        self._tasks += [self.background.spawn(kind, each) for kind, each in work.items()]
        if self.receiver is not None:
            log.info("traces go to %s", self.receiver)

    @property
    def greeting(self) -> str:
        return greeting(self.settings, self.port, self.admin_port)

    def hurry(self) -> None:
        """Cut short the time that running requests still have while the gateway stops."""
        self.server.hurry()

    async def stop(self, seconds: float) -> None:
        """Refuse new requests, give running ones up to `seconds` to end, then stop everything that was started."""
        self.proxy.drain()
        self.view.draining = True
        begun = monotonic()
        await self.server.drain(seconds)
        refused, ran = self.proxy.refuse_unanswered(), monotonic() - begun
        cut = self.proxy.end_streams()
        cut += await self.server.end()
        if cut or refused:
            log.warning(
                "%d requests were there after %.1f s: %d were cut in the middle of their answers, %d had none yet and got 503",
                cut + refused,
                ran,
                cut,
                refused,
            )
        if self.usage_log is not None:  # before the engines stop: a service manager may kill the gateway meanwhile
            await asyncio.to_thread(self.usage_log.close)
            self.usage_log.tell_lost()
        for task in self._tasks:
            task.cancel()
        self.models.stop()
        for backend in list(self.proxy.backends.values()):
            backend.stop()
        for shared in self._in_redis:
            await shared.stop()
        await self.fleet.stop()
        await self.admin.stop()
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)

    # --- replicas come, change and go

    def _unlisted(self) -> str:
        """Return in words why the list of replicas may be incomplete now, or "" if it is complete."""
        if self._is_launching:
            return "engines are being launched"
        if self.discovery is not None and self.discovery.problem:
            return f"the pods are not known: {self.discovery.problem}"
        return ""

    def traffic(self, replica: str, fault: str | None, count: int) -> None:
        """Report to the replica's health record how requests to it went.

        `fault`: the kind of a failed request (`proxy.failures.retries`), or None for `count` requests that succeeded.
        """
        if fault is None:
            self.fleet.succeeded(replica, count)
        elif fault == retries.OWN:
            self.background.failed(CONNECTIONS, OSError(SHORT), replica)
        elif fault == retries.UNCONFIRMED:
            self.fleet.unconfirmed(replica)
        elif fault not in ("status 503", "status 429"):  # "full, try another": load, not illness
            if fault == retries.ABORTED:  # an engine that shuts down aborts every new request: check whether it does
                self.fleet.unconfirmed(replica)
            self.fleet.failed(replica, _FAULTS.get(fault, "5xx"))

    def _replica_changed(self, replica: Replica, old: State, new: State) -> None:
        if self.fleet.replicas.get(replica.id) is not replica:  # its engine restarted with other ranks
            backend = self.proxy.backends.get(replica.id)
            if backend is not None and backend.replica is replica:
                self._forget(backend)
        elif new is State.READY:
            self._meet(replica)

    def _meet(self, replica: Replica) -> None:
        """Add or update the `Backend` (connections and load) of a replica that is now ready; follow its KV events."""
        backend = self.proxy.backends.get(replica.id)
        if backend is not None and backend.replica is not replica:  # removed, and added again before `_care` ran
            self._forget(backend)
            backend = None
        if backend is not None:
            self.map.resize(backend.slot, replica.num_blocks)
            backend.candidate.rank_paths, backend.hidden = replica.rank_paths, self._hidden_from(replica)
        if backend is not None and backend.incarnation == replica.incarnation:
            self.models.adopt(replica)
            self.proxy.settling.follow_drop(backend)
            self._follow_adapters(backend)
            if backend.source != replica.events:
                self._listen(backend)
            return
        if backend is None:
            observed = replica.events is not None
            slot = self.slots[replica.id] = self.map.attach(replica.id, replica.num_blocks, observed)
            candidate = self.proxy.router.add(replica.id, slot, replica.rank_paths)
            backend = Backend(replica, candidate, self.fleet.prove, self._hidden_from(replica))
            self.proxy.add(backend)
        else:  # another process behind the same address: its cache is empty
            self.map.clear(backend.slot)
            backend.event_format = None
            self.proxy.router.lost(replica.id)
        backend.follow_incarnation()
        self.proxy.settling.follow_drop(backend)
        self.models.adopt(replica)
        self._say_unfit(replica)
        self._listen(backend, anew=True)

    def _say_unfit(self, replica: Replica) -> None:
        if problem := replica.unfit(self.settings.block_size):
            log.warning("replica %s: %s. To mend it, %s", replica.id, problem.what, problem.remedy)

    def _hidden_from(self, replica: Replica) -> frozenset[bytes]:
        """Return the names of the client headers that are not passed on to the replica.

        Where the gateway itself sets priorities (priority classes), the engine's priority header is among them.
        """
        header = replica.dialect.priority_header
        return self._hidden if header is None or not self.proxy.handler.writes_priorities else self._hidden | {header}

    def _follow_adapters(self, backend: Backend) -> None:
        """Clear the cached blocks of LoRA adapters that the engine has reloaded from another folder.

        The engine no longer finds blocks of the old adapter. KV events do not show this, since they carry only the
        adapter's name, which stays the same. Without KV events, the replica's whole part of the cache map is cleared.
        """
        for name in backend.adapters_moved():
            log.warning("replica %s: adapter %r was loaded from %s: what was cached under that name is forgotten",
                        backend.id, name, backend.adapter_roots[name])  # fmt: skip
            if backend.intake is not None:
                backend.intake.forget_adapter(name)
            else:
                self.map.clear(backend.slot)

    def _moved(self, replica: Replica, space: ModelSpace) -> None:
        """Update the router and the event intake after the replica's prompts were moved to another space.

        `space`: the new tokenizer, template and block size of its prompts. If the block format has changed, the
        replica's part of the cache map is cleared and its KV events are followed again.
        """
        backend = self.proxy.backends[replica.id]
        backend.candidate.space = space.number
        self.proxy.router.regroup(replica.id, space.costs)
        if backend.incarnation == replica.incarnation and backend.event_format not in (None, space.format.blocks):
            self._listen(backend, anew=True)

    def _models_changed(self) -> None:
        self.proxy.changed()
        if not self._was_ready and self.view.why_not_ready() is None:
            self._was_ready = True
            log.info("ready for requests")
        self.server.clients.limits = datapath.limits(self.settings, self.models.pipelines)

    def _listen(self, backend: Backend, anew: bool = False) -> None:
        """Follow the KV events of a replica at the address where it publishes them now.

        `anew`: whether to clear the replica's part of the cache map first. If the replica publishes no KV events, its
        cached blocks are guessed from the prompts that are sent to it.
        """
        source = backend.source = backend.replica.events
        block_size, looks_ahead = backend.event_format = self.models.blocks(backend.id)

        def begin() -> None:
            if anew:
                self.map.clear(backend.slot)
            self.map.observed(backend.slot, source is not None)

        if source is None:
            backend.listen(None, begin, self.background)
            self.intakes.pop(backend.id, None)
            why = next((one for one in backend.replica.problems if "events" in one), "no KV events are known of it")
            if "cache is guessed" not in why:
                why = f"its cache is guessed from what is sent to it. {why[0].upper()}{why[1:]}"
            log.warning("replica %s: %s", backend.id, why)
            return
        following = {
            "endpoint": source.endpoint,
            "replay": source.replay,
            "decode": backend.replica.dialect.event_decoder(records),
            "topic": "",  # all topics: an endpoint has one publisher, and its topic may be any
            "model": HASHED_AS,
            "block_size": block_size,
            "looks_ahead": looks_ahead,
            "told": backend.stored_as,
            "page_size": backend.replica.page_size,
            "on_change": lambda state, reason: log.info("events of %s: %s: %s", backend.id, state, reason),
        }
        if self.shared is not None:
            intake = self.shared.intake(backend.slot, backend.id, backend.incarnation, **following)
        else:
            intake = EventIntake(self.map, backend.slot, **following)
        self.intakes[backend.id] = intake
        backend.listen(intake, begin, self.background)

    async def _care(self) -> None:
        """Run `_care_for` on each replica, once every CARE_SECONDS, until cancelled.

        It removes the state of replicas that are gone, adopts the block format that KV events show, and passes the
        engine metrics of a new scrape on to the router and the ledger.
        """
        seen: dict[str, float] = {}
        while True:
            due = monotonic() + CARE_SECONDS
            await asyncio.sleep(CARE_SECONDS)
            self.metrics.loop_delay_seconds.observe((), max(0.0, monotonic() - due))
            for backend in list(self.proxy.backends.values()):
                if self.fleet.replicas.get(backend.id) is not backend.replica:
                    await asyncio.sleep(0)  # forgetting one takes some ms, and 100 ranks of one engine go at once
                    if self.proxy.backends.get(backend.id) is not backend:
                        continue  # its replica was added again and is ready: `_meet` has dropped this backend
                try:
                    self._care_for(backend, seen)
                except Exception as error:  # an error with one replica must not stop the loop for the others
                    self.background.failed(CARE, error, backend.id)

    def _care_for(self, backend: Backend, seen: dict[str, float]) -> None:
        if self.fleet.replicas.get(backend.id) is not backend.replica:
            self._forget(backend)
            self._models_changed()
            return
        if backend.intake is not None and backend.incarnation == backend.replica.incarnation:
            self._follow_blocks(backend, backend.intake.stored_as)
        scrape = backend.replica.scrape
        if scrape is None or seen.get(backend.id) == scrape.at:
            return
        seen[backend.id] = scrape.at
        self.ledger.scraped(backend.id, scrape.waiting, scrape.kv_usage)
        self.proxy.router.learn_max_num_seqs(backend.id, scrape.running)
        idle = backend.candidate.load.requests == 0 and monotonic() - scrape.at < 0.5
        self.proxy.settling.compare_counts(backend, scrape.prefix_queries, scrape.prefix_hits, idle)

    def _follow_blocks(self, backend: Backend, told: Blocks) -> None:
        """Hash prompts in the block format that the replica's KV events show, if that format has changed.

        `told`: the format that the events show. If its Mamba blocks are smaller than its full-attention blocks, a cache
        hit may end after each Mamba block, and prompts are hashed in blocks of the Mamba size.
        """
        if told == backend.stored_as:
            return
        backend.stored_as, replica = told, backend.replica
        before = replica.unfit(self.settings.block_size)
        if replica.store_as(told.size, told.ahead, told.parts):
            self.proxy.settling.follow_drop(backend)
            self.models.adopt(replica)
            self._models_changed()
            if replica.unfit(self.settings.block_size) != before:
                self._say_unfit(replica)

    def _forget(self, backend: Backend) -> None:
        self.proxy.remove(backend.id)
        self.slots.pop(backend.id, None)
        self.intakes.pop(backend.id, None)
        self.metrics.forget(backend.id)
        self.models.forget(backend.replica)

    def _connections(self) -> Reading:
        elsewhere = self.decisions.on()  # /decide requests count as load, but use no connection of this gateway
        upstream = {
            b.id: len(b.pool.idle) + self.ledger.own(b.id)[0] - elsewhere[b.id] for b in self.proxy.backends.values()
        }
        running = {"tenant_running_requests": self.metering.running()} if self.metering is not None else {}
        followed = {"api_keys": self.keys and self.keys.problem, "tls": self.certificate and self.certificate.problem}
        return {
            **running,
            "unusable_files": {file: int(bool(why)) for file, why in followed.items() if why is not None},
            "client_connections": self.server.open,
            "upstream_connections": upstream,
            "request_bytes": self.server.held,
            "prompt_memo_bytes": sum(one.prefixes.bytes for one in self.models.pipelines if one.prefixes is not None),
        }

    # --- for the admin API

    def status(self) -> dict[str, Any]:
        return self.view.status()

    def differs(self, replica: str) -> Callable[[Sequence[int]], tuple[list[int], list[int]]]:
        """Return a function that compares the cache map's record of a replica's GPU blocks with the engine's own keys.

        The function takes the keys of all blocks that the engine has on the GPU. It returns the positions of the keys
        that the map lacks, and the hashes of the blocks that only the map has.
        """
        return self.map.differs(self.slots[replica])

    def requests_at(self, replicas: Collection[str]) -> list[str]:
        return self.proxy.requests_at(replicas)

    async def explain(self, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
        """Return how this request would be routed now, without sending it or counting it as load."""
        return await datapath.explain(self.proxy, path, body, headers)


# The proxy's name of a kind of failure -> the name of that kind in `replicas/health.py`
_FAULTS = {retries.CONNECT: "connect", retries.CLOSED: "closed", retries.PROTOCOL: "closed", retries.TIMEOUT: "timeout",
           retries.STALLED: "timeout", retries.HUNG: "timeout", retries.ABORTED: "closed",
           retries.FOREIGN_ANSWER: "foreign"}  # fmt: skip


def _say_held_up(now: float, seconds: float) -> None:
    if seconds >= BREAKS_FROM:
        log.warning(
            "this process did not run for %.1f s: it or its machine was stopped, or has too little CPU. No replica is"
            " blamed for what was due meanwhile",
            seconds,
        )


def serve(settings: Settings) -> int:
    """Run one gateway until a signal and return the exit code. Raises ConfigError before anything is started."""
    return run(settings, lambda: Gateway(settings), datapath.started)

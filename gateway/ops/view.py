"""The gateway's state for people and for Prometheus, collected from all parts of the gateway.

The live page, `GET /status` and `/readyz` show the result of `View.status()`. `View.reading()` returns the values that
a Prometheus scrape shows besides the counters. Both only read. Tokens and blocks are counts, times are seconds.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gateway import __version__
from gateway.models import Models
from gateway.ops.chats import OTHER_TOKENS
from gateway.ops.comparison import OTHERWISE, UP_TO_DATE
from gateway.ops.metrics import Metrics, Reading
from gateway.proxy.admission.control import OverloadControl
from gateway.proxy.failures.blame import OVERLOADED, PASSED_ON, REQUEST
from gateway.proxy.observers.shadow import told
from gateway.proxy.states import Leg
from gateway.settings import Settings
from gateway.spaces import ModelSpace
from gateway.tenants.keys import Keys
from gateway.tenants.limits import WORDS
from gateway.tenants.metering import Metering
from gateway.tls import Certificate
from policies import Ledger, Load
from policies.decisions import DECISIONS, REFUSED
from replicas.discovery import Discovery
from replicas.lifecycle import ENGINE_THERE, TAKES_TRAFFIC, State
from replicas.problems import DRAINED, NO_CACHED_TOKENS, Problem
from replicas.replica import Replica

_EVENT_COUNTS = {
    "event_batches": "batches",
    "event_blocks_stored": "blocks_stored",
    "event_blocks_removed": "blocks_removed",
    "event_blocks_orphaned": "orphans",
    "event_blocks_ignored": "ignored",
    "event_gaps": "gaps",
    "event_batches_replayed": "replayed",
}
# Attributes of a replica that are copied unchanged into its entry in a status.
_COPIED = ("id", "rank", "role", "spill", "url", "reason", "managed", "pid", "restarts", "version", "required_model",
           "num_blocks", "max_model_len", "tokenizer", "takes_ids")  # fmt: skip
# Counters of tokens whose sums are in a status.
_TOKENS = ("prompt_tokens", "predicted_cached_tokens", "reported_prompt_tokens", "reported_cached_tokens")
MOST_REFUSED = 10  # entries in a status of tenants whose limits refused requests
_SCRAPED = {
    "replica_waiting_requests": "waiting",
    "replica_running_requests": "running",
    "replica_kv_usage_ratio": "kv_usage",
}


class View:
    """The state of one gateway. Set `draining` when the gateway stops taking new requests.

    `slots`: by replica id, the number of its column in the cache map. `intakes`: by replica id, the EventIntake that
    follows its KV events, for replicas that publish any. These two and `replicas` are the gateway's own dicts, and may
    change at any time.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        replicas: Mapping[str, Replica],
        ledger: Ledger,
        cachemap: Any,
        slots: Mapping[str, int],
        intakes: Mapping[str, Any],
    ) -> None:
        self.settings, self.metrics = settings, metrics
        self.replicas, self.ledger, self.cachemap = replicas, ledger, cachemap
        self.slots, self.intakes = slots, intakes
        self.started = time.monotonic()
        self.draining = False
        self.models: Models | None = None  # what is known of each model
        # Returns the names of the models that a replica reported last, also while it is down.
        self.served_by: Callable[[str], frozenset[str]] = lambda id: frozenset()
        self.expected_back: Callable[[], Mapping[str, float]] = dict  # model -> seconds since a pod that served it went
        self.gone: Callable[[], Iterable[str]] = tuple  # models that no replica has served since a pod of them went
        self.slow: Callable[[str], dict[str, Any] | None] = lambda id: None  # a replica's entry from `recent.pace`
        self.shared_ledger: Any = None  # SharedLedger, with Redis
        self.background: Any = None  # Background, whose failures are shown
        self.policies: Any = None  # FaultRecord of the operator's own policies
        self.keys: Keys | None = None  # with --api-keys
        self.metering: Metering | None = None  # with --api-keys
        self.certificate: Certificate | None = None  # with TLS
        self.control: OverloadControl | None = None  # where classes have limits
        self.waiting: Callable[[], Mapping[str, int]] = dict  # with a queue: how many wait there now, by class
        self.discovery: Discovery | None = None  # with --discover
        self.shared: Any = None  # SharedMap, where several gateways share one map

    def why_not_ready(self) -> str | None:
        """Return in words why no request can be served now, or None if requests can be served."""
        if self.draining:
            return "the gateway is stopping and finishes what it has"
        if self.models is not None and (missing := self.models.waiting_for):
            return f"waiting for {missing}"
        if any(replica.state in TAKES_TRAFFIC for replica in self.replicas.values()):
            return None
        if not self.replicas and self.discovery is not None:
            return f"no pod is a replica yet: {self.discovery.problem or 'none has the labels of discover.selector'}"
        if not self.replicas:
            return "there is no replica; add one with hitherto replicas add http://HOST:PORT"
        states = (f"{one.id} is {one.state} ({one.reason})" for one in self.replicas.values())
        return f"no replica is ready: {'; '.join(states)}"

    def status(self) -> dict[str, Any]:
        """Return the gateway's state as JSON data, for `GET /status`."""
        metrics, why_not, stats = self.metrics, self.why_not_ready(), self.cachemap.stats()
        numbers, keys = counted_of(metrics, self.replicas), None
        if self.keys is not None and self.metering is not None:
            keys = {**self.keys.status(), "limits": self.metering.status()}
        replicas = [{**self._replica(one, stats["slots"]), **numbers[one.id]} for one in self.replicas.values()]
        return {
            "version": __version__,
            "policy": self.settings.policy,
            "models": sorted({name for replica in self.replicas.values() for name in replica.models}),
            "spaces": _spaces(self.models.spaces) if self.models is not None else [],
            "uptime_seconds": round(time.monotonic() - self.started, 3),
            "most_open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "ready": why_not is None,
            "why_not": why_not,
            "stopping": self.draining,
            "loading": sorted(self.models.loading) if self.models is not None else [],
            "unserved": self._unserved(),
            "expected_back": {name: round(seconds, 3) for name, seconds in self.expected_back().items()},
            **counted(metrics, self.settings.shadow, replicas, self.waiting()),
            "map": {
                **{name: stats[name] for name in ("blocks", "bytes", "evicted")},
                "budget_bytes": self.settings.cache_budget,
                **self._sharing(),
            },
            "control": self.control.status() if self.control is not None else None,
            "api_keys": keys,
            "tls": self.certificate.status() if self.certificate is not None else None,
            "discovery": self.discovery.to_dict() if self.discovery is not None else None,
            "background_failures": self.background.recent() if self.background else {},
            "policy_failures": self.policies.recent() if self.policies else {},
            "replicas": replicas,
        }

    def _unserved(self) -> list[str]:
        """Return the known models for which no replica takes requests now.

        A model is known if a replica serves it, served it earlier, or was added as a replica of it.
        """
        known = {*self.gone(), *self.expected_back()}
        for replica in self.replicas.values():
            known |= {*self.served_by(replica.id), *replica.models}
            if replica.required_model:
                known.add(replica.required_model)
        taking = [replica for replica in self.replicas.values() if replica.state in TAKES_TRAFFIC]
        return sorted(known - {name for replica in taking for name in replica.models})

    def _replica(self, replica: Replica, blocks: Mapping[int, int]) -> dict[str, Any]:
        load, intake, given = self._load(replica.id), self._intake(replica), self.settings.block_size
        return {
            **{name: getattr(replica, name) for name in _COPIED},
            **{name: getattr(replica.scrape, name, None) for name in ("running", "waiting", "kv_usage")},
            **{name: getattr(load, name) for name in ("prefill_tokens", "context_tokens")},
            "inflight": load.requests,
            "transfer": replica.transfer.id if replica.transfer is not None else None,
            "bootstrap": replica.bootstrap or None,
            "peer": replica.peer or None,
            "address": replica.address or None,
            "state": str(replica.state),
            "fault": replica.fault or None,
            "since_seconds": round(time.monotonic() - replica.since, 3),
            "models": list(replica.models),
            "served_models": sorted(self.served_by(replica.id) or replica.models),
            "adapters": {name: parent for name, parent in replica.models.items() if parent},
            "block_size": replica.stored_size or replica.block_size,
            "problems": [*replica.problems, *_seen(replica, intake, given), *self._of_template(replica)],
            "slow": self.slow(replica.id),
            "events": intake.state if intake else "off",
            "event_source": replica.events._asdict() if replica.events is not None else None,
            "events_reason": intake.reason if intake else _why_no_events(replica),
            "map_role": getattr(intake, "role", None),
            "map_role_reason": getattr(intake, "role_reason", None),
            "map_blocks": self._blocks(replica.id, blocks),
        }

    def _of_template(self, replica: Replica) -> list[str]:
        """Return the problems with the model's files and its chat template, in words, that affect this replica."""
        member = self.models.members.get(replica.id) if self.models is not None else None
        if member is None:
            return []
        if why := member.problem or member.space.problem:
            text = "its prompts are matched as text, as its model's files cannot be used"
            return [f"{text}: {why}. They are looked at again"]
        why = member.space.pipeline.template_exceeds
        return [f"some of its chats are matched as text: {why}"] if why else []

    def _intake(self, replica: Replica) -> Any:
        """Return the intake that follows the replica's KV events, or None if it has none or its engine is gone."""
        return self.intakes.get(replica.id) if replica.state in ENGINE_THERE else None

    def reading(self) -> Reading:
        """Return the values that Prometheus' scrapes show besides the counters; meant for `Metrics.read_from`."""
        ids, stats = list(self.replicas), self.cachemap.stats()
        loads = {id: self._load(id) for id in ids}
        lags = {id: getattr(self.intakes.get(id), "lag_seconds", None) for id in ids}
        reading: dict[str, Any] = {
            "inflight_requests": {id: load.requests for id, load in loads.items()},
            "reserved_prefill_tokens": {id: load.prefill_tokens for id, load in loads.items()},
            "reserved_context_tokens": {id: load.context_tokens for id, load in loads.items()},
            "reservations": self.ledger.total().requests,
            "replica_state": {(id, str(one)): float(self.replicas[id].state is one) for id in ids for one in State},
            "model_gone": dict.fromkeys(self.gone(), 1.0),
            "replica_models": {(id, name): 1.0 for id in ids for name in self.replicas[id].models},
            "event_lag_seconds": {id: lag for id, lag in lags.items() if lag is not None},
            "replica_restarts": {id: self.replicas[id].restarts for id in ids if self.replicas[id].managed},
            "map_blocks": stats["blocks"],
            "map_bytes": stats["bytes"],
            "map_budget_bytes": self.settings.cache_budget,
            "map_evicted_blocks": stats["evicted"],
            "map_replica_blocks": {id: self._blocks(id, stats["slots"]) for id in ids},
            "events_state": {(id, intake.state): 1.0 for id in ids if (intake := self._intake(self.replicas[id]))},
            "uptime_seconds": time.monotonic() - self.started,
            "build_info": {(__version__, self.settings.policy): 1},
            "background_failures": self.background.counts if self.background else {},
            "policy_failures": self.policies.counts if self.policies else {},
            **self._shared_reading(),
        }
        for name, field in _SCRAPED.items():
            # An engine that does not report a figure has no sample, rather than a zero.
            found = {id: getattr(replica.scrape, field, None) for id, replica in self.replicas.items()}
            reading[name] = {id: number for id, number in found.items() if number is not None}
        for name, attribute in _EVENT_COUNTS.items():
            reading[name] = {id: getattr(self.intakes.get(id), attribute, 0) for id in ids}
        return reading

    def _sharing(self) -> dict[str, Any]:
        shared, ledger = self.shared, self.shared_ledger
        if ledger is None:
            return {}
        told = {"ledger_joined": ledger.joined, "ledger_reason": ledger.reason}
        if shared is not None:
            names = ("deployment", "reachable", "trouble", "leases", "lag_seconds")
            told |= {"place": str(shared.place), **{name: getattr(shared, name) for name in names}}
        return {"redis": told}

    def _shared_reading(self) -> dict[str, Any]:
        shared, ledger = self.shared, self.shared_ledger
        joined = {} if ledger is None else {"ledger_joined": float(ledger.joined), "ledger_repairs": ledger.repairs}
        if shared is None:
            return joined
        names = ("leases", "reloads", "takeovers", "snapshots")
        return {
            **joined,
            **{f"map_{name}": getattr(shared, name) for name in names},
            "map_role": {(id, intake.role): 1.0 for id, intake in self.intakes.items()},
            "map_redis_up": float(shared.usable),
            "map_follower_lag_seconds": shared.lag_seconds,
            "map_redis_errors": shared.errors,
        }

    def _blocks(self, id: str, by_slot: Mapping[int, int]) -> int:
        return by_slot.get(self.slots.get(id, -1), 0)

    def _load(self, id: str) -> Load:
        """Return the load on the replica that comes from this gateway alone, without that of other gateways."""
        return Load(*self.ledger.own(id))


def _why_no_events(replica: Replica) -> str:
    if replica.state not in ENGINE_THERE:
        return f"the replica is {replica.state}: its events are followed when an engine answers there"
    unknown = "it is not known where the engine publishes KV events, if it does"
    return f"{unknown}: its cache is guessed from what is sent there"


def _spaces(spaces: Sequence[ModelSpace]) -> list[dict[str, Any]]:
    """Return an entry for each space (format of a model's prompts) that has replicas.

    It has the model's names, files, block size in tokens, and its number of variants (spaces of the same model).
    """
    return [
        {
            "models": sorted(space.names),
            "replicas": list(space.members),
            "directory": str(space.format.source.directory) if space.format.source else None,
            "block_size": space.format.block_size,
            "max_model_len": space.context,
            "versions": sorted({one.replica.version for one in space.members.values() if one.replica.version}),
            "variants": sum(bool(one.names & space.names) for one in spaces if one.members),
        }
        for space in spaces
        if space.members
    ]


def counted(
    metrics: Metrics, shadows: Sequence[str], replicas: Sequence[Mapping[str, Any]], waiting: Mapping[str, int]
) -> dict[str, Any]:
    """Return the fields of a status that come from counters, of one gateway process or of several together.

    `shadows`: the policies compared in shadow mode. `replicas`: the replicas' entries in the status. `waiting`: by
    priority class, the number of requests that wait now.
    """
    return {
        "totals": {
            "requests": metrics.requests.total(),
            "errors": metrics.requests.total(status="5xx") + metrics.requests.total(status="cut"),
            "refused_by_engines": {why: metrics.rejections.total(reason=why) for why in sorted({*PASSED_ON.values()})},
            "retries": metrics.retries.total(),
            "inflight": sum(one["inflight"] for one in replicas),
            **{name: getattr(metrics, name).total() for name in (*_TOKENS, "prefill_saved_tokens")},
            "prompts": {mode: count for (mode,), count in metrics.prompts.values.items()},
        },
        **{
            name: {f"p{percent}": getattr(metrics, name).quantile(percent / 100) for percent in (50, 99)}
            for name in ("ttft_seconds", "request_seconds")
        },
        "legs": _legs(metrics),
        "shadow": told(metrics, shadows),
        "admission": _admission(metrics, waiting),
        "refused_tenants": _refused_tenants(metrics),
    }


def _refused_tenants(metrics: Metrics) -> list[dict[str, Any]]:
    """Return which limits of which tenants have refused the most requests since the start, most first."""
    refused = sorted(metrics.tenant_refusals.values.items(), key=lambda one: (-one[1], one[0]))[:MOST_REFUSED]
    return [{"tenant": tenant, "limit": WORDS[kind], "requests": number} for (tenant, kind), number in refused]


def _legs(metrics: Metrics) -> dict[str, Any]:
    """Return how many requests were split into two legs (prefill, decode), and how these legs ended.

    Only requests that could be split are counted. `apart`: the number that were split. `whole`: the number that were
    not.
    """
    ended: dict[str, dict[str, float]] = {str(leg.value): {} for leg in Leg}
    for (leg, outcome), number in metrics.legs.values.items():
        ended[leg][outcome] = number
    return {**{choice: metrics.leg_choices.total(choice=choice) for choice in ("apart", "whole")}, **ended}


def _admission(metrics: Metrics, waiting: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return, for each priority class, the counts of admission's decisions, and times to first token.

    The predicted and the real mean time to first token are both given, for comparison. `waiting`: by class, the number
    of requests that wait now. In the result, `queued` counts all that ever waited.
    """
    found: dict[str, dict[str, Any]] = {}
    for (decision, name, reason), number in metrics.admission.values.items():
        one = found.setdefault(name, {"class": name, **dict.fromkeys(DECISIONS, 0), "refused_for": {}})
        one[decision] += number
        if decision == REFUSED:
            one["refused_for"][reason] = number
    for name, one in found.items():
        of_class = {"class": name}
        count = metrics.predicted_answers.total(**of_class)
        one |= {
            outcome: metrics.slo_requests.total(**of_class, outcome=outcome) for outcome in ("met", "missed", "failed")
        }
        one |= {
            "waiting": waiting.get(name, 0),
            "predicted_ttft_seconds": metrics.predicted_ttft_seconds.total(**of_class) / count if count else None,
            "ttft_seconds": metrics.delivered_ttft_seconds.total(**of_class) / count if count else None,
            "queue_p99_seconds": metrics.queue_seconds.quantile(0.99, name),
        }
    return [*found.values()]


def counted_of(metrics: Metrics, replicas: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return, by replica, the fields of its entry in a status that come from counters.

    Ask for all replicas at once, since each call goes through the series of all replicas.
    """
    sums = {name: getattr(metrics, name).by("replica") for name in _TOKENS}
    sums["requests"] = metrics.replica_requests.by("replica")
    sums["errors"] = metrics.upstream_errors.by("replica", kind={REQUEST, *OVERLOADED})
    return {
        id: {
            **{name: by_replica.get(id, 0) for name, by_replica in sums.items()},
            "ttft_p50_seconds": metrics.replica_ttft_seconds.quantile(0.5, id),
            "ttft_p99_seconds": metrics.replica_ttft_seconds.quantile(0.99, id),
        }
        for id in replicas
    }


def _seen(replica: Replica, intake: Any, block_size: int | None) -> list[str]:
    """Return in words the problems of a replica that the gateway has found in traffic, KV events or its settings.

    Problems that the engine itself reports (`Replica.problems`) are not among them. `intake`: the intake of its KV
    events, or None. `block_size`: the block size that the operator set, or None.
    """
    found = [*(intake.problems if intake else ()), *replica.unlike]
    if problem := replica.unfit(block_size):
        found.append(str(problem))
    if replica.state is State.LEAVING:
        found.append(f"its engine ends: it {replica.reason}")
    if replica.state is State.STOPPED:
        found.append(str(Problem(f"{DRAINED} ({replica.reason})", f"hitherto replicas add {replica.url}")))
    if intake and intake.state == "unobserved":
        found.append(f"KV events are not followed, the cache is guessed from traffic: {intake.reason}")
    if replica.cached_tokens is False:
        found.append(str(Problem(NO_CACHED_TOKENS, replica.dialect.remedies.cached_tokens)))
    told, _, otherwise = replica.tokenizer.partition(OTHERWISE)
    if told.startswith(f"differs: {OTHER_TOKENS}"):
        found.append(f"it fills its chat template in another way, so its chats are matched as text; it {told}")
    elif told.startswith("differs"):
        found.append(f"its tokenizer is not the gateway's, so its prompts are matched as text; it {told}")
    elif otherwise:
        found.append(f"it makes other tokens of some bodies, so bodies of that kind are matched as text: {otherwise}")
    if why := told.partition(UP_TO_DATE)[2]:
        found.append(f"its chats are exact only up to the date that their template prints: {why}")
    if ": no, " in replica.takes_ids:
        found.append(f"long prompts are tokenized by the engine once more: {replica.takes_ids}")
    return found

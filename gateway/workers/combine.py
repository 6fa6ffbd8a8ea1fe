"""Pure functions that combine several workers' metrics pages and statuses into one.

The metrics page keeps the workers apart by a label, as Prometheus keeps gateways apart by `instance`. It has no sums
over workers. A worker that is replaced starts to count at zero, so a sum would fall, and Prometheus' `rate()` misreads
a counter that falls. A status is for people, who want one answer. Counts are added up there; where workers differ
otherwise, the worst worker's view is shown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from ..ops.metrics import Metrics
from ..ops.view import counted, counted_of

# If workers report different states of a replica, the first of these is shown, so a replica is ready or drained once it
# is so for all workers. The supervisor's own view is included: only it sees the process of an engine that it launched.
STATES = ("draining", "starting", "warming", "failed", "leaving", "degraded", "ready", "stopped")
# The same order, worst first, for the state of a replica's KV events and for the role of its part of the cache map.
EVENTS = ("unobserved", "gap", "connecting", "off", "live")
ROLES = ("standalone", "joining", "leader", "follower", None)


def pages(by_worker: Mapping[str, bytes], own: bytes) -> bytes:
    """Return one metrics page made of the workers' pages and the supervisor's `own`.

    `by_worker`: each worker's page in Prometheus' text format, by its number. Its samples get the label `worker`.
    """
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}  # name -> comment lines, samples
    for worker, page in [*by_worker.items(), ("", own)]:
        said, samples = [], []
        for line in page.splitlines():
            if line.startswith(b"# "):
                name = line.split(b" ", 3)[2]
                said, samples = families.setdefault(name, ([], []))
                if line not in said:
                    said.append(line)
            elif line:
                samples.append(_labelled(line, worker) if worker else line)
    return b"".join(b"\n".join([*said, *samples, b""]) for said, samples in families.values())


def _labelled(sample: bytes, worker: str) -> bytes:
    name, end = re.split(rb"([ {])", sample, maxsplit=1)[:2]
    label = b'{worker="%b"%b' % (worker.encode(), b"," if end == b"{" else b"} ")
    return name + label + sample[len(name) + 1 :]


def statuses(
    found: Mapping[int, Mapping[str, Any]],
    launched: Mapping[str, Mapping[str, Any]],
    shadows: Sequence[str],
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """Return one status made from the workers' statuses.

    `found`: the answers of `Worker.counted` by the worker's number, at least one. `launched`: the supervisor's view of
    its engines, by replica. `shadows`: the policies that are compared in shadow mode. `own`: the supervisor's fields,
    with the failures of its own background work.
    """
    metrics = Metrics()
    for one in found.values():
        metrics.add(one["counts"])
    each = [one["status"] for one in found.values()]
    views: dict[str, list[Mapping[str, Any]]] = {}
    for status in each:
        for replica in status["replicas"]:
            views.setdefault(replica["id"], []).append(replica)
    numbers = counted_of(metrics, views)
    replicas = [{**_replica(seen, launched.get(id)), **numbers[id]} for id, seen in views.items()]
    waiting: Counter[str] = Counter()
    for status in each:
        waiting.update({one["class"]: one["waiting"] for one in status["admission"]})

    def known(name: str) -> list[Any]:
        return [status[name] for status in each if status[name] is not None]

    return {
        **min(each, key=lambda status: status["ready"]),
        **{name: sorted({*chain(*known(name))}) for name in ("models", "loading", "unserved")},
        "stopping": any(known("stopping")),
        "spaces": max(known("spaces"), key=len),
        "discovery": _worst(known("discovery")),
        "expected_back": {name: seconds for names in known("expected_back") for name, seconds in names.items()},
        **counted(metrics, shadows, replicas, waiting),
        "map": _map(known("map")),
        "control": _control(known("control")),
        "tls": _worst(known("tls")),
        "api_keys": _worst(known("api_keys")),
        "replicas": replicas,
        "policy_failures": _failures(known("policy_failures")),
        **own,
        "background_failures": _failures([*known("background_failures"), own.get("background_failures", {})]),
    }


def _replica(views: Sequence[Mapping[str, Any]], launched: Mapping[str, Any] | None) -> dict[str, Any]:
    said = min(views, key=lambda view: STATES.index(view["state"]))
    events = min(views, key=lambda view: EVENTS.index(view["events"]))
    role = min(views, key=lambda view: ROLES.index(view["map_role"]))
    merged = {
        **said,
        **{name: events[name] for name in ("events", "event_source", "events_reason")},
        **{name: role[name] for name in ("map_role", "map_role_reason")},
        **{name: sum(view[name] for view in views) for name in ("inflight", "prefill_tokens", "context_tokens")},
        "problems": list(dict.fromkeys(problem for view in views for problem in view["problems"])),
        "map_blocks": max(view["map_blocks"] for view in views),
        "slow": max((view["slow"] for view in views if view["slow"]), key=lambda slow: slow["times"], default=None),
    }
    if launched is not None:
        nearer = STATES.index(launched["state"]) <= STATES.index(said["state"])
        merged |= launched if nearer else {name: launched[name] for name in ("managed", "pid", "restarts")}
    return merged


def _worst(parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the worst of the workers' entries on a source that each worker reads for itself; None if there is none.

    The worst entry has a problem or, if none has one, was read longest ago. Such sources are the TLS certificate, the
    file of API keys, and the cluster's API.
    """
    return max(parts, key=lambda one: (bool(one["problem"]), one.get("loaded_seconds_ago", 0.0)), default=None)


def _map(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sizes of the cache map over all workers, and the worst state of their connection to Redis.

    Each worker has a complete copy of the map. `blocks` is therefore the largest of their numbers, not the sum, while
    bytes, budgets and evictions are added up.
    """
    redis = min((one["redis"] for one in each), key=lambda one: (one["ledger_joined"], one.get("reachable", True)))
    if "leases" in redis:
        redis = {**redis, "leases": sum(one["redis"]["leases"] for one in each)}
    sums = {name: sum(one[name] for one in each) for name in ("bytes", "budget_bytes", "evicted")}
    return {"blocks": max(one["blocks"] for one in each), **sums, "redis": redis}


def _control(each: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the state of overload control over all workers, or None if overload control is off.

    Each worker controls its own requests. A model's entry is that of one worker: one that wants more replicas if there
    is any, and of those the one that restricts lower priority classes most. `events` are the last 100 of all workers.
    """
    models = sorted(chain(*(one["models"] for one in each)), key=lambda model: (model["wants_more"], model["level"]))
    events = sorted(chain(*(one["events"] for one in each)), key=lambda event: event["at"])
    worst = {model["model"]: model for model in models}
    return {**each[0], "models": [*worst.values()], "events": events[-100:]} if each else None


def _failures(each: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return, by kind of background work, how often it failed in all workers together, and its last failure."""
    merged: dict[str, dict[str, Any]] = {}
    for kind, one in ((kind, one) for failures in each for kind, one in failures.items()):
        other = merged.get(kind, {"failures": 0, "seconds_ago": float("inf")})
        last = min(one, other, key=lambda known: known["seconds_ago"])
        merged[kind] = {**last, "failures": one["failures"] + other["failures"]}
    return merged

"""What several workers say, as one: their pages of metrics and their statuses. Pure.

A page of metrics keeps the workers apart by a label, as Prometheus keeps gateways apart by `instance`: a worker that is
replaced begins at zero, and a sum made here would then fall, which no `rate()` understands. A status is for people, who
want one answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..ops.metrics import Metrics
from ..ops.view import counted, counted_of

# Which state counts where workers differ, or the supervisor, which alone sees the process of an engine that was
# launched: the first of these. So a replica is ready once it is ready for all, and drained once it is drained for all.
STATES = ("draining", "starting", "warming", "failed", "leaving", "degraded", "ready", "stopped")
SUMS = ("inflight", "prefill_tokens", "context_tokens")
# Of a replica's events, and of its part of the map: the first of these that a worker tells, and why.
EVENTS = ("unobserved", "gap", "connecting", "off", "live")
ROLES = ("alone", "joining", "writer", "mirror", None)


def pages(by_worker: Mapping[str, bytes], own: bytes) -> bytes:
    """One page of metrics out of the workers', whose samples get the label `worker`, and the supervisor's own."""
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}  # name -> what is said of it, samples
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
    name, brace, rest = sample.partition(b"{")
    label = b'worker="' + worker.encode() + b'"'
    if brace and b" " not in name:
        return name + b"{" + label + b"," + rest
    name, _, rest = sample.partition(b" ")
    return name + b"{" + label + b"} " + rest


def statuses(
    found: Sequence[Mapping[str, Any]],
    launched: Mapping[str, Mapping[str, Any]],
    shadows: Sequence[str],
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """One status out of the workers'. `found`: as `worker.WorkerAdmin.counted` answers, with the `worker` that did, at
    least one; `launched`: what the supervisor knows of its engines, by replica; `own`: fields that are the supervisor's
    to say, and how its own background work failed."""
    metrics = Metrics()
    for one in found:
        metrics.add(one["counts"])
    each = [one["status"] for one in found]
    views: dict[str, list[Mapping[str, Any]]] = {}
    for status in each:
        for replica in status["replicas"]:
            views.setdefault(replica["id"], []).append(replica)
    numbers = counted_of(metrics, views)
    replicas = [{**_replica(seen, launched.get(id)), **numbers[id]} for id, seen in views.items()]
    waiting: Counter[str] = Counter()
    for status in each:
        waiting.update({one["class"]: one["waiting"] for one in status["admission"]})
    why_not = next((status["why_not"] for status in each if not status["ready"]), None)
    return {
        **each[0],
        "models": sorted({name for status in each for name in status["models"]}),
        "spaces": _spaces([status["spaces"] for status in each]),
        "discovery": _discovery([status["discovery"] for status in each]),
        "ready": why_not is None,
        "why_not": why_not,
        "stopping": any(status["stopping"] for status in each),
        "loading": sorted({name for status in each for name in status["loading"]}),
        "unserved": sorted({name for status in each for name in status["unserved"]}),
        "expected_back": {name: seconds for status in each for name, seconds in status["expected_back"].items()},
        **counted(metrics, shadows, replicas, waiting),
        "map": _map([status["map"] for status in each]),
        "control": _control([(one["worker"], one["status"]["control"]) for one in found]),
        "tls": max((status["tls"] for status in each), key=lambda tls: tls["problem"] if tls else "", default=None),
        "api_keys": _keys([status["api_keys"] for status in each]),
        "replicas": replicas,
        **own,
        "background_failures": _failures(
            one["background_failures"] for one in (*each, own) if "background_failures" in one
        ),
        "policy_failures": _failures(one["policy_failures"] for one in each),
    }


def _replica(views: Sequence[Mapping[str, Any]], launched: Mapping[str, Any] | None) -> dict[str, Any]:
    said = min(views, key=lambda view: STATES.index(view["state"]))
    problems = list(dict.fromkeys(problem for view in views for problem in view["problems"]))
    merged = {**said, "problems": problems, **{name: sum(view[name] for view in views) for name in SUMS}}
    events = min(views, key=lambda view: EVENTS.index(view["events"]))
    merged |= {name: events[name] for name in ("events", "event_source", "events_reason")}
    role = min(views, key=lambda view: ROLES.index(view["map_role"]))
    merged |= {name: role[name] for name in ("map_role", "map_role_reason")}
    merged["map_blocks"] = max(view["map_blocks"] for view in views)
    merged["slow"] = max((view["slow"] for view in views if view["slow"]), key=lambda slow: slow["times"], default=None)
    if launched is not None:
        merged |= {name: launched[name] for name in ("managed", "pid", "restarts")}
        if STATES.index(launched["state"]) <= STATES.index(said["state"]):
            merged |= {name: launched[name] for name in ("state", "reason", "fault", "since_seconds")}
    return merged


def _spaces(each: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Each worker finds models and variants by itself. What they tell apart alike is one; where they differ, a replica
    is in as many as it is told of."""
    merged: list[dict[str, Any]] = []
    for spaces in each:
        left = [*merged]  # a worker's own are different ones
        for space in spaces:
            known = max(
                (one for one in left if _is_same_space(one, space)), key=lambda one: _common(one, space), default=None
            )
            if known is None:
                merged.append({**space})
                continue
            left.remove(known)
            known |= {name: sorted({*known[name], *space[name]}) for name in ("models", "versions")}
            known["replicas"] = [*dict.fromkeys([*known["replicas"], *space["replicas"]])]
            known["max_model_len"] = max(known["max_model_len"] or 0, space["max_model_len"] or 0) or None
    for one in merged:
        one["variants"] = sum(not {*one["models"]}.isdisjoint(other["models"]) for other in merged)
    return merged


def _is_same_space(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    alike = all(one[name] == other[name] for name in ("directory", "block_size"))
    return alike and (one["models"] == other["models"] or not {*one["models"]}.isdisjoint(other["models"]))


def _common(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    return len({*one["replicas"]} & {*other["replicas"]})


def _discovery(each: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Each worker asks for the pods by itself: what is wrong for one of them is told, and the fewest."""
    known = [one for one in each if one is not None]
    if not known:
        return None
    problem = next((one["problem"] for one in known if one["problem"]), None)
    return {**known[0], "replicas": min(one["replicas"] for one in known), "problem": problem}


def _map(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each worker has the whole map: blocks are those of the fullest one, bytes are those of all."""
    redis = [one["redis"] for one in each]
    alone = next((one for one in redis if not one["ledger_joined"]), redis[0])
    shared = {"ledger_joined": alone["ledger_joined"], "ledger_reason": alone["ledger_reason"]}
    if "reachable" in redis[0]:
        shared |= {
            "place": redis[0]["place"],
            "deployment": redis[0]["deployment"],
            "reachable": all(one["reachable"] for one in redis),
            "trouble": next((one["trouble"] for one in redis if one["trouble"]), redis[0]["trouble"]),
            "leases": sum(one["leases"] for one in redis),
            "lag_seconds": max(one["lag_seconds"] for one in redis),
        }
    return {
        "blocks": max(one["blocks"] for one in each),
        "bytes": sum(one["bytes"] for one in each),
        "budget_bytes": sum(one["budget_bytes"] for one in each),
        "evicted": sum(one["evicted"] for one in each),
        "redis": shared,
    }


def _control(each: Sequence[tuple[int, Mapping[str, Any] | None]]) -> dict[str, Any] | None:
    """Each worker controls what comes to it: of a model it is told what is taken at most, how near a class is to its
    limits at worst, and what each of them did."""
    known = [one for _, one in each if one is not None]
    if not known:
        return None
    models: dict[str, Mapping[str, Any]] = {}
    for one in (model for status in known for model in status["models"]):
        models[one["model"]] = _controlled(one, models.get(one["model"], one))
    events = [{**event, "worker": worker} for worker, one in each if one is not None for event in one["events"]]
    events.sort(key=lambda event: event["at"])
    return {**known[0], "models": [*models.values()], "events": events[-100:]}


def _controlled(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    most = max(one, other, key=lambda model: model["level"])
    pressures = {}
    for qos, value in one["pressures"].items():
        known = [each for each in (value, other["pressures"].get(qos)) if each is not None]
        pressures[qos] = max(known, default=None)
    either = {name: one[name] or other[name] for name in ("wants_more", "on_trial")}
    return {**most, "pressures": pressures, **either}


def _keys(each: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Each worker follows the file by itself: what is wrong for one of them is told, and the oldest reading."""
    known = [one for one in each if one is not None]
    if not known:
        return None
    worst = max(known, key=lambda one: (one["problem"], one["loaded_seconds_ago"]))
    return {**worst, "limits": min((one["limits"] for one in known), key=lambda limits: bool(limits["joined"]))}


def _failures(each: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """How often each kind of work failed in all workers, and how it failed last."""
    merged: dict[str, dict[str, Any]] = {}
    for failures in each:
        for kind, one in failures.items():
            other = merged.get(kind, {"failures": 0, "seconds_ago": float("inf")})
            last = min(one, other, key=lambda known: known["seconds_ago"])
            merged[kind] = {**last, "failures": one["failures"] + other["failures"]}
    return merged

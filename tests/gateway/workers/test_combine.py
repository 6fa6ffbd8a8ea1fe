"""What several workers say, put together."""

from collections import Counter
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from gateway.ops.metrics import Metrics, lines
from gateway.ops.view import _admission
from gateway.workers import combine
from gateway.workers.combine import pages


def statuses(found: list[dict], launched: Mapping = {}, own: Mapping = {}) -> dict:
    """Of workers 0, 1, ... in this order."""
    return combine.statuses(dict(enumerate(found)), launched, (), own)


async def page(requests: int) -> bytes:
    metrics = Metrics({"replica": ('odd "name" {here}',)})
    metrics.requests.inc("chat", "2xx", by=requests)
    return (await metrics.exposition())[0]


def samples(page: bytes, **more: str) -> list[tuple]:
    """Of a page, with these labels as well."""
    families = text_string_to_metric_families(page.decode())
    each = [one for family in families for one in family.samples]
    return [(one.name, *sorted({**one.labels, **more}.items()), one.value) for one in each]


async def test_one_page_keeps_workers_apart_and_every_series():
    first, second = await page(3), await page(4)
    reading = {"worker_up": {"0": 1.0, "1": 0.0}, "worker_restarts": 2, "replica_restarts": {"a": 1}}
    own = "".join(lines(reading)).encode()
    whole = pages({"0": first, "1": second}, own)
    assert Counter(samples(whole)) == Counter(
        [*samples(first, worker="0"), *samples(second, worker="1"), *samples(own)]
    )
    assert whole.count(b"# TYPE hitherto_requests_total counter") == 1


def said(state: str = "ready", requests: int = 1, inflight: int = 0, joined: bool = True, unserved=(), **more) -> dict:
    """As one worker answers, of one replica. `more`: of that replica."""
    metrics = Metrics()
    metrics.requests.inc("chat", "2xx", by=requests)
    metrics.replica_requests.inc("a", "2xx", by=requests)
    replica = {
        "id": "a", "state": state, "reason": f"it is {state}", "since_seconds": 1.0, "problems": [], "slow": None,
        "inflight": inflight, "prefill_tokens": 0, "context_tokens": 0, "managed": False, "pid": None, "restarts": 0,
        "events": "live", "event_source": None, "events_reason": "all replayed",
        "map_role": "follower", "map_role_reason": "another one follows", "map_blocks": requests, **more,
    }  # fmt: skip
    redis = {"ledger_joined": joined, "ledger_reason": "joined" if joined else "away"}
    status = {
        "models": ["sim"], "ready": state == "ready", "why_not": None if state == "ready" else f"a is {state}",
        "stopping": state == "draining", "loading": ["one"] * (state == "warming"), "expected_back": {},
        "unserved": list(unserved), "admission": [],
        "replicas": [replica], "background_failures": {}, "policy_failures": {}, "api_keys": None, "tls": None, "control": None,
        "spaces": [], "discovery": None,
        "map": {"blocks": 10 * requests, "bytes": 100, "budget_bytes": 1000, "evicted": 1, "redis": redis},
    }  # fmt: skip
    return {"status": status, "counts": metrics.counts(), "connections": 1}


def test_a_status_adds_up_and_is_no_better_than_the_least_ready_worker():
    worse = said("degraded", requests=4, inflight=2, joined=False, problems=["slow"])
    both = statuses([said(requests=3, inflight=1), worse], own={"uptime_seconds": 5})
    (replica,) = both["replicas"]
    summed = {"state": "degraded", "inflight": 3, "requests": 7, "problems": ["slow"]}
    assert {name: replica[name] for name in summed} == summed
    assert (both["ready"], both["why_not"], both["uptime_seconds"]) == (False, "a is degraded", 5)
    assert both["totals"]["requests"] == 7 and both["totals"]["inflight"] == 3
    redis = {"ledger_joined": False, "ledger_reason": "away"}
    assert both["map"] == {"blocks": 40, "bytes": 200, "budget_bytes": 2000, "evicted": 2, "redis": redis}


def test_a_replica_is_as_slow_as_the_worker_says_that_saw_it_worst_and_what_any_cannot_serve_is_unserved():
    slow = [None, {"times": 4.1, "text": "takes 4 x"}, {"times": 8.2, "text": "takes 8 x"}]
    both = statuses([said(slow=one, unserved=("m",) if one else ()) for one in slow])
    assert both["replicas"][0]["slow"] == slow[2] and both["unserved"] == ["m"]


def test_of_an_engine_that_was_launched_the_supervisor_knows_why_it_is_not_there():
    state = {"state": "failed", "reason": "exit code 1: out of memory", "fault": None, "since_seconds": 3.0}
    launched = {"a": {"managed": True, "pid": None, "restarts": 2, **state}}
    (replica,) = statuses([said("failed"), said("failed")], launched)["replicas"]
    assert {name: replica[name] for name in launched["a"]} == launched["a"]
    launched["a"] |= {"state": "ready", "reason": "serves"}
    (replica,) = statuses([said("ready"), said("draining", inflight=1)], launched)["replicas"]
    assert replica["state"] == "draining"


def test_the_control_of_overload_is_told_of_the_worker_that_takes_most_and_all_that_they_did():
    def control(level, wants_more, *more, at=()):
        models = [{"model": "m", "level": level, "wants_more": wants_more}, *more]
        return {"window_seconds": 30.0, "models": models, "events": [{"at": one} for one in at]}

    found = [said() for _ in range(4)]
    for one, more in zip(found[:3], (control(1, False), control(1, True), control(3, False))):
        one["status"]["control"] = more
    assert statuses([found[0], found[2], found[3]])["control"] == control(3, False)
    assert statuses(found)["control"] == control(1, True), "though another one takes more"
    other = {"model": "n", "level": 2, "wants_more": True}
    found[0]["status"]["control"] = control(1, False, other, at=(5.0, 7.0))
    found[2]["status"]["control"] = control(3, False, {**other, "wants_more": False}, at=(6.0,))
    told = statuses([found[0], found[2]])["control"]
    assert {one["model"]: one["level"] for one in told["models"]} == {"m": 3, "n": 2}
    assert [one["at"] for one in told["events"]] == [5.0, 6.0, 7.0]


def test_those_that_wait_in_any_worker_are_told_beside_those_that_ever_waited():
    found = []
    for waiting in (2, 3):
        metrics = Metrics()
        metrics.admission.inc("queued", "free", "full", by=10)
        found.append(said() | {"counts": metrics.counts()})
        found[-1]["status"]["admission"] = _admission(metrics, {"free": waiting})
    (told,) = statuses(found)["admission"]
    assert (told["class"], told["queued"], told["waiting"]) == ("free", 20, 5)


def test_models_are_told_as_the_worker_has_them_that_tells_the_most_apart():
    found = [said() for _ in range(3)]
    for one, spaces in zip(found, (["m"], ["m", "other"], ["m"]), strict=True):
        one["status"]["spaces"] = spaces
    assert statuses(found)["spaces"] == ["m", "other"]


def test_of_pods_and_files_the_worker_is_told_that_has_a_problem_with_them():
    found = [said() for _ in range(4)]
    for number, (one, problem) in enumerate(zip(found[:3], (None, "refused", None), strict=True)):
        one["status"]["discovery"] = {"selector": "app=vllm", "replicas": number, "problem": problem}
        one["status"]["tls"] = {"certificate": "c.pem", "problem": problem or ""}
        one["status"]["api_keys"] = {"file": "keys", "loaded_seconds_ago": number, "problem": problem or ""}
    for told, seconds in ((statuses(found), 1), (statuses([found[0], found[2]]), 2)):
        assert {told[name]["problem"] for name in ("discovery", "tls", "api_keys")} <= {"refused", None, ""}
        assert told["api_keys"]["loaded_seconds_ago"] == seconds
    assert statuses(found)["discovery"] == {"selector": "app=vllm", "replicas": 1, "problem": "refused"}
    assert statuses(found)["tls"]["problem"] == "refused"


def test_of_a_replicas_events_and_map_the_worst_is_told_with_its_reason():
    first, second, third = found = [said(requests=number) for number in (1, 5, 3)]
    for one, intake in (
        (first, {"map_role": "leader", "map_role_reason": "it follows"}),
        (second, {"events": "gap", "events_reason": "3 were lost"}),
        (third, {"map_role": "standalone", "map_role_reason": "another block size"}),
    ):
        one["status"]["replicas"][0] |= intake

    def told(*found: dict) -> tuple:
        (one,) = statuses(found)["replicas"]
        return tuple(one[name] for name in ("events", "events_reason", "map_role", "map_role_reason", "map_blocks"))

    assert told(*found) == ("gap", "3 were lost", "standalone", "another block size", 5)
    assert told(third, first) == ("live", "all replayed", "standalone", "another block size", 3)
    assert told(said(), first) == ("live", "all replayed", "leader", "it follows", 1)


def test_what_failed_in_the_background_of_any_process_is_told():
    def failed(count: int, ago: float) -> dict:
        return {"work": {"failures": count, "last": f"{ago} s ago", "seconds_ago": ago}}

    found = [said() for _ in range(2)]
    found[1]["status"]["background_failures"] = failed(2, 7.0)
    for ago, one in enumerate(found):
        one["status"]["policy_failures"] = failed(4, 7.0 + ago)
    told = statuses(found, own={"background_failures": failed(1, 3.0)})
    assert told["background_failures"] == {"work": {"failures": 3, "last": "3.0 s ago", "seconds_ago": 3.0}}
    assert told["policy_failures"] == {"work": {"failures": 8, "last": "7.0 s ago", "seconds_ago": 7.0}}

"""The last 15 minutes of one gateway, and of several workers as one."""

import time
from types import SimpleNamespace

import pytest

from gateway.ops.recent.recent import holders, merged, told
from replicas.lifecycle import State

from ..stand_in import Gateway, count

NOW = 1_000_000_000.0


@pytest.fixture
def gateway():
    return Gateway()


def said(gateway):
    return [(one["replica"], one["text"], one["level"]) for one in gateway.recent.journal.to_list(99)]


def test_replicas_that_come_change_and_go_are_told_of(gateway):
    recent, fleet = gateway.recent, gateway.fleet
    fleet.add("http://a:1")
    recent.look(NOW)
    replica = fleet.replicas["a:1"]
    replica.state, replica.reason = State.FAILED, "exit code 1; asked again every 1 s"
    recent.replica_changed(replica, State.READY, State.FAILED)
    assert recent.kept()["failures"]["a:1"]["why"] == "exit code 1"
    del fleet.replicas["a:1"]
    recent.look(NOW + 1)
    assert said(gateway)[::-1] == [
        ("a:1", "joined the fleet; 1 replica now", "plain"),
        ("", "not ready: no replica is ready", "plain"),
        ("a:1", "ready → failed: exit code 1; asked again every 1 s", "bad"),
        ("a:1", "left the fleet; 0 replicas now", "plain"),
    ]
    assert recent.kept()["failures"] == {}


def test_failures_of_requests_are_told_of_but_not_those_that_are_the_requests_own(gateway):
    gateway.fleet.add("http://a:1")
    gateway.metrics.upstream_errors.inc("a:1", "request", by=5)
    gateway.recent.look(NOW)
    assert not gateway.recent.journal.failures
    gateway.metrics.upstream_errors.inc("a:1", "connect", by=3)
    gateway.recent.look(NOW + 1)
    gateway.recent.look(NOW + 2)
    (entry,) = [one for one in gateway.recent.journal.to_list(9) if one["kind"] == "failure"]
    assert (entry["text"], entry["times"], entry["at"]) == ("a request failed there: connect", 3, NOW + 1)
    gateway.metrics.upstream_errors.inc("a:1", "status 429", by=4)
    gateway.recent.look(NOW + 3)
    assert said(gateway)[0] == ("a:1", "it was full and refused a request: status 429", "warn")
    assert gateway.recent.kept()["failures"] == {"a:1": {"at": NOW + 1, "why": "a request failed there: connect"}}
    assert gateway.status()["replicas"][0]["errors"] == 3, "a full engine has not failed"


def test_a_replica_that_writes_slowly_is_named_within_a_minute_and_again_when_it_is_quick(gateway, caplog):
    caplog.set_level("INFO")
    begun = time.time()  # at which its figures began
    for url in ("http://a:1", "http://b:1"):
        gateway.fleet.add(url, State.READY)
    gateway.recent.look(begun)
    wrote = {"replica_decode_tokens": {"a:1": 200, "b:1": 200}}
    count(gateway.metrics, **wrote, replica_decode_seconds={"a:1": 2.0, "b:1": 16.0})
    gateway.recent.look(begun + 40)
    assert said(gateway)[0] == ("b:1", "takes 8 x as long per token as the others", "warn")
    assert "replica takes 8 x as long per token as the others" in caplog.messages
    slow = {one["id"]: one["slow"] for one in gateway.status()["replicas"]}
    assert slow["a:1"] is None and slow["b:1"]["times"] == 8
    count(gateway.metrics, **wrote, replica_decode_seconds={"a:1": 2.0, "b:1": 2.0})
    gateway.recent.look(begun + 140)
    assert said(gateway)[0] == ("b:1", "is as quick per token as the others again", "good")
    assert "replica is as quick per token as the others again" in caplog.messages


def test_tenants_that_their_limits_refuse_are_named(gateway, caplog):
    refusals = gateway.metrics.tenant_refusals
    refusals.inc("acme", "requests", by=3)
    gateway.recent.look(NOW)
    refusals.inc("acme", "requests", by=2)
    refusals.inc("bolt", "day", by=7)
    gateway.recent.look(NOW + 1)
    acme, bolt = "acme is refused by its limit of requests per minute", "bolt is refused by its limit of tokens per day"
    noted = {one["text"]: (one["kind"], one["times"]) for one in gateway.recent.journal.to_list(9)}
    assert noted[acme] == ("limits", 5) and noted[bolt] == ("limits", 7)
    assert caplog.messages.count(f"tenant {acme}") == 1
    assert [one["tenant"] for one in gateway.status()["refused_tenants"]] == ["bolt", "acme"]


def test_the_last_failure_of_a_replica_that_is_down_is_as_it_was_last_told(gateway):
    replica = gateway.fleet.add("http://a:1")
    replica.state, replica.reason = State.DEGRADED, "/health did not answer within 1 s"
    gateway.recent.replica_changed(replica, State.READY, State.DEGRADED)
    replica.reason = "/health did not answer within 2 s"
    gateway.recent.look(NOW)
    assert gateway.recent.kept()["failures"] == {"a:1": {"at": NOW, "why": "/health did not answer within 2 s"}}


def test_what_becomes_of_events_and_of_the_map_is_told_of(gateway):
    gateway.fleet.add("http://a:1")
    intake = gateway.view.intakes["a:1"] = SimpleNamespace(state="live", reason="all replayed", problems=())
    gateway.recent.look(NOW)
    intake.state, intake.reason = "gap", "7 batches are missing"
    gateway.metrics.heals.inc("a:1")
    gateway.recent.look(NOW + 1)
    intake.reason = "8 batches are missing"
    gateway.recent.look(NOW + 2)
    assert [one for one in said(gateway)[::-1] if one[0]][1:] == [
        ("a:1", "live: all replayed", "good"),
        ("a:1", "its part of the map had drifted and was read again", "warn"),
        ("a:1", "gap: 7 batches are missing", "warn"),
    ]


def kept(number, **more):
    gateway = Gateway()
    gateway.metrics.requests.inc("chat", "2xx", by=number)
    gateway.fleet.add("http://a:1")
    gateway.recent.look(NOW + number)
    return {**gateway.recent.kept(), **more}


def test_workers_figures_and_journals_are_one():
    both = told(merged([kept(1), kept(2)]), NOW + 3)
    assert both["figures"]["whole"]["requests"] == 3
    joined = [one for one in both["journal"] if one["kind"] == "fleet"]
    assert len(joined) == 1 and joined[0]["times"] == 1, "both workers saw it, and it happened once"


def test_workers_decisions_are_in_the_order_of_time():
    one, other = ([{"at": at, "number": number} for number, at in enumerate(times)] for times in ((5.0, 3.0), (4.0,)))
    both = merged([kept(1, decisions=one), kept(2, decisions=other)])
    assert [decision["at"] for decision in both["decisions"]] == [5.0, 4.0, 3.0]


def test_an_engine_that_is_gone_holds_nothing_now():
    """Nor does one of another model, or one that lacks a block."""
    ready, failed, starting, draining = State.READY, State.FAILED, State.STARTING, State.DRAINING
    states, spaces = (ready, failed, starting, draining, ready, ready), (0, 0, 0, 0, 1, 0)
    known = [
        SimpleNamespace(id=id, slot=slot, candidate=SimpleNamespace(space=space), replica=SimpleNamespace(state=state))
        for slot, (id, state, space) in enumerate(zip("abcdef", states, spaces))
    ]
    assert holders(known, 0, [2, 2, 2, 3, 2, 1], 2) == ["a", "d"]


def test_workers_prefixes_are_those_of_the_worker_that_sampled_most():
    one, other = ({"samples": samples, "nodes": [{"id": str(samples)}]} for samples in (3, 10))
    assert merged([kept(1, prefixes=one), kept(2, prefixes=other)])["prefixes"] == other

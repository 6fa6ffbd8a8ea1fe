"""Models that nobody serves now: which of them are expected back, which are gone, and which are refused for good."""

import json
import re
from unittest.mock import AsyncMock

import pytest

from gateway.proxy.placement import known_models, model_refresh
from replicas import Replica, State

from .replies import BODY, answers, post
from .stack import backend_for, stack


@pytest.fixture(autouse=True)
def questions_without_a_pause(monkeypatch):
    """Nothing here depends on the pause between two refreshes, for which `test_model_refresh` has a test."""
    monkeypatch.setattr(model_refresh, "PAUSE_SECONDS", 0.0)


async def status_of(s, model: str, path: bytes = b"/v1/chat/completions") -> int:
    return (await s.ask(post(BODY.replace(b'"m"', b'"%b"' % model.encode()), path)))[0]


async def test_a_model_whose_only_replica_is_away_is_not_unknown_and_a_misspelt_one_is():
    async with stack(answers(), answers()) as s:
        other, away = (backend.replica for backend in s.proxy.backends.values())
        away.models = {"away": None}
        s.proxy.changed()
        away.models = {}
        s.becomes(away, State.FAILED)
        assert [await status_of(s, model) for model in ("away", "none")] == [503, 404]
        models, other.models = other.models, {}
        s.becomes(other, State.FAILED)
        assert [await status_of(s, model) for model in ("m", "away", "none")] == [503, 503, 404]
        other.models = models
        s.becomes(other, State.READY)
        s.proxy.remove(away.id)
        assert await status_of(s, "away") == 404 and s.proxy.eligible.names == models


async def test_a_model_that_only_a_degraded_replica_serves_is_listed_with_its_adapters():
    """Its prompts go there, so an adapter's blocks have to be told from the model's own."""
    async with stack(answers(), answers()) as s:
        ready, degraded = (one.replica for one in s.proxy.backends.values())
        ready.models = {"m": None, "both": None}
        degraded.models = {"other": None, "red": "other", "both": "other"}
        s.becomes(degraded, State.DEGRADED)
        talk = await s.talk()
        _, _, told = await talk.ask(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        listed = {one["id"]: one["parent"] for one in json.loads(told)["data"]}
        assert listed == {"m": None, "both": None, "other": None, "red": "other"}
        assert s.proxy.eligible.adapters == {"red"}
        status, headers, _ = await talk.ask(post(BODY.replace(b'"m"', b'"red"')))
        assert (status, headers["x-hitherto-replica"]) == (200, degraded.id)


async def test_a_model_whose_pod_went_is_waited_for_for_a_while(monkeypatch):
    async with stack(answers(), answers(), answers()) as s:
        _, first, second = (one.replica for one in s.proxy.backends.values())
        first.models, second.models = {"away": None, "red": "away"}, {"removed": None}
        s.proxy.changed()
        first.models = {}  # its engine went first
        s.proxy.changed()
        s.proxy.eligible.known.expect_back([first])
        for replica in (first, second):
            s.proxy.remove(replica.id)
        said = r"no replica of 'away' is ready \(a pod of it went \d+ s ago\)"
        for status, why, later in await refusals(s, b"away"):
            assert status == 503 and re.fullmatch(said, why) and later == "1"
        for model, status in (("red", 503), ("away", 503), ("removed", 404)):
            assert await status_of(s, model, b"/v1/rerank") == status, model
        monkeypatch.setattr(known_models, "EXPECTED_SECONDS", 0.0)
        assert {status for status, *_ in await refusals(s, b"away")} == {404}


async def test_a_pod_that_went_is_waited_for_though_an_operator_removed_another_of_its_model():
    """In a rollout the next pod is found a place first, and the operator spoke of the other replica alone."""
    async with stack(answers(), answers(), answers()) as s:
        _, pod, broken = (one.replica for one in s.proxy.backends.values())
        pod.models = broken.models = {"away": None}
        s.proxy.changed()
        s.proxy.eligible.known.expect_back([pod])
        for replica in (pod, broken):
            s.proxy.remove(replica.id)
        assert {status for status, *_ in await refusals(s, b"away")} == {503}


async def test_a_model_is_gone_from_when_its_last_pod_goes_until_a_replica_serves_it(monkeypatch):
    monkeypatch.setattr(known_models, "EXPECTED_SECONDS", 0.0)
    async with stack(answers(), answers(), answers()) as s:
        eligible, (_, first, last) = s.proxy.eligible, (one.replica for one in s.proxy.backends.values())
        first.models = last.models = {"away": None}
        s.proxy.changed()
        eligible.known.expect_back([first])
        s.proxy.remove(first.id)
        assert not eligible.known.gone(), "another replica serves it"
        s.becomes(last, State.FAILED)
        assert not eligible.known.gone(), "another replica has served it since"
        s.becomes(last, State.READY)
        eligible.known.expect_back([last])
        assert not eligible.known.gone(), "it still takes requests"
        s.becomes(last, State.DRAINING)
        assert eligible.known.gone() == ["away"], "new requests are refused from now on"
        s.proxy.remove(last.id)
        handed_on = eligible.known.handed_on()
        assert eligible.known.gone() == ["away"] == [*handed_on["since_pod_went"]] == handed_on["gone"]
        last = backend_for(s.proxy, last.port, ("away",)).replica
        s.proxy.changed()
        assert not eligible.known.gone()
        s.proxy.remove(last.id)
        assert not eligible.known.gone(), "an operator removed it"


@pytest.mark.parametrize("state", [State.STOPPED, State.DRAINING, State.FAILED, State.WARMING])
async def test_a_model_is_gone_with_its_last_pod_though_a_replica_that_serves_no_more_is_known(state):
    """Whether that one is drained, failed or removed later: clients get an error all the same."""
    async with stack(answers(), answers(), answers()) as s:
        known, (_, pod, static) = s.proxy.eligible.known, (one.replica for one in s.proxy.backends.values())
        pod.models = static.models = {"away": None}
        s.proxy.changed()
        s.becomes(static, state)
        assert not known.gone(), "the pod serves it"
        known.expect_back([pod])
        s.proxy.remove(pod.id)
        assert known.gone() == ["away"] and {status for status, *_ in await refusals(s, b"away")} == {503}
        s.proxy.remove(static.id)  # as the runbook of HithertoReplicaDown says
        assert known.gone() == ["away"]


def test_a_scrape_looks_at_each_name_that_is_gone_once_and_at_no_replica():
    """It reads them on the event loop: 4096 names and 200 replicas took 63 ms when each was looked for in each."""
    looked_up = 0

    class Name(str):
        __slots__ = ()

        def __hash__(self):
            nonlocal looked_up
            looked_up += 1
            return super().__hash__()

    names = [Name(f"lora{number}") for number in range(100)]
    replicas = {str(port): away(port, models={f"m{port}": None}) for port in range(20)}
    known = known_models.KnownModels({}, replicas)
    for id, replica in replicas.items():
        known.served_before(id, replica.models)
    known.expect_back([away(99, models=dict.fromkeys(names))])
    looked_up = 0
    assert known.gone() == sorted(names) and looked_up <= len(names)


async def test_another_process_waits_for_the_models_that_this_one_waits_for(monkeypatch):
    async with stack(answers(), answers(), answers()) as s:
        _, gone, drained = (one.replica for one in s.proxy.backends.values())
        gone.models, drained.models = {"gone": None}, {"drained": None}
        s.proxy.changed()
        s.proxy.eligible.known.expect_back([gone])
        s.proxy.remove(gone.id)
        drained.state = State.STOPPED
        told = json.loads(json.dumps(s.proxy.eligible.known.handed_on()))
    replicas = {drained.id: away(drained.port, State.STOPPED)}
    async with stack(answers(), replicas=replicas) as s:
        eligible = s.proxy.eligible
        eligible.known.resume(told["since_pod_went"], told["gone"])
        assert eligible.known.gone() == ["gone"]
        eligible.known.served_before(drained.id, told["served"][drained.id])
        s.proxy.changed()
        for model, waited_for in ((b"gone", r"a pod of it went \d+ s ago"), (b"drained", f"{drained.id} is stopped")):
            for status, said, _ in await refusals(s, model):
                assert status == 503 and re.search(waited_for, said)
        assert {status for status, *_ in await refusals(s, b"none")} == {404}
        replicas.clear()  # an operator has removed it
        monkeypatch.setattr(known_models, "EXPECTED_SECONDS", 0.0)
        for model in (b"gone", b"drained"):
            assert {status for status, *_ in await refusals(s, model)} == {404}
        assert eligible.known.expected_back() == {}


async def test_of_pods_that_went_the_latest_names_are_kept(monkeypatch):
    monkeypatch.setattr(known_models, "MOST_NAMES", 2)
    async with stack(answers()) as s:
        for model in ("one", "two", "one", "three"):
            s.proxy.eligible.known.expect_back([away(9, models={}, required_model=model)])
        found = {model: {status for status, *_ in await refusals(s, model)} for model in (b"one", b"two", b"three")}
        assert found == {b"one": {503}, b"two": {404}, b"three": {503}}


def away(port: int, state: State = State.FAILED, **facts) -> Replica:
    name = f"127.0.0.1:{port}"
    return Replica(name, f"http://{name}", "127.0.0.1", port, state=state, reason="nothing listens there", **facts)


async def refusals(s, model: bytes) -> set[tuple[int, str, str | None]]:
    """How a request for this model is refused in each API, and where its description is asked for."""
    talk, found = await s.talk(), set()
    chat, text = b'{"model":"%b","messages":[{"role":"user","content":"x"}]}', b'{"model":"%b","input":"x"}'
    for path, body in (
        (b"/v1/chat/completions", chat),
        (b"/v1/completions", b'{"model":"%b","prompt":"x"}'),
        (b"/v1/responses", text),
        (b"/v1/messages", chat[:-1] + b',"max_tokens":1}'),
        (b"/v1/embeddings", text),
        (b"/v1/models/" + model, None),
    ):
        status, headers, told = await talk.ask(
            post(body % model, path) if body else b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path
        )
        found.add((status, json.loads(told)["error"]["message"], headers.get("retry-after")))
    return found


async def test_a_model_is_not_unknown_while_a_replica_has_not_told_what_it_serves():
    replicas = {}
    async with stack(answers(), replicas=replicas) as s:
        served_here = "(served here: m)"
        for state in (State.STARTING, State.WARMING, State.FAILED):
            replicas["late"] = away(9, state)
            told = f"these have not told their models yet: 127.0.0.1:9 is {state}: nothing listens there"
            said = f"no replica is known to serve 'late' {served_here}, but {told}"
            assert await refusals(s, b"late") == {(503, said, "1")}
        for state in (State.DRAINING, State.STOPPED):  # on purpose: nobody waits for it
            replicas["late"] = away(9, state)
            ((status, message, again),) = await refusals(s, b"late")
            assert (status, again) == (404, None) and message == "the model 'late' does not exist; served here: m"
        replicas["late"] = away(9, State.WARMING, models={"another": None}, required_model="late")
        ((status, message, _),) = await refusals(s, b"none")  # it has told
        assert status == 404
        del replicas["late"]
        s.proxy.eligible.known.unlisted = lambda: "the pods are not known: not asked yet"
        ((status, message, _),) = await refusals(s, b"late")
        assert status == 503 and message.endswith("told their models yet: the pods are not known: not asked yet")


async def test_what_is_no_engine_keeps_no_model_from_being_unknown():
    replicas = {}
    async with stack(answers(), replicas=replicas) as s:
        for state in (State.WARMING, State.FAILED):
            replicas["page"] = away(9, state, foreign=True)
            assert {(status, again) for status, _, again in await refusals(s, b"none")} == {(404, None)}
        replicas["late"] = away(10, State.STARTING)
        ((status, message, _),) = await refusals(s, b"none")
        told = "not told their models yet: 127.0.0.1:10 is starting: nothing listens there"
        assert status == 503 and message.endswith(told)


async def test_what_is_only_passed_on_reaches_no_engine_while_another_may_serve_its_model():
    replicas, seen = {}, []
    async with stack(answers(seen=seen), replicas=replicas) as s:
        assert await status_of(s, "late", b"/v1/rerank") == 404, "as of a prompt that is read"
        replicas["late"] = away(9)
        assert await status_of(s, "late", b"/v1/rerank") == 503
        del replicas["late"]
        s.proxy.eligible.known.unlisted = lambda: "the pods are not known: not asked yet"
        assert await status_of(s, "late", b"/v1/rerank") == 503 and not seen


async def test_a_model_that_a_replica_has_to_serve_is_not_unknown():
    asks = AsyncMock()
    replicas = {"named": away(9, required_model="named"), "other": away(10, required_model="other")}
    async with stack(answers(), replicas=replicas, ask_models=asks) as s:
        ready = s.proxy.eligible.names
        said = "no replica of 'named' is ready (127.0.0.1:9 is failed: nothing listens there)"
        assert await refusals(s, b"named") == {(503, said, "1")}
        assert not asks.called and ready == {"m": None}, "what is certain needs no question"
        replicas["named"].state, replicas["named"].models = State.WARMING, {"another": None}
        assert {status for status, *_ in await refusals(s, b"named")} == {503}
        del replicas["other"]
        replicas["named"].models = {}
        for state in (State.DRAINING, State.STOPPED):  # on purpose, and it has never served it
            replicas["named"].state = state
            assert {(status, again) for status, _, again in await refusals(s, b"named")} == {(404, None)}


async def test_a_replica_that_tells_no_names_may_serve_any_while_it_is_away():
    replicas = {}
    async with stack(answers(), replicas=replicas) as s:
        known = backend_for(s.proxy, 9).replica
        locked = backend_for(s.proxy, 10, models=()).replica
        replicas |= {known.id: known, locked.id: locked}
        known.state = locked.state = State.FAILED
        known.models = {}
        s.proxy.changed()
        ((status, message, _),) = await refusals(s, b"any")
        assert status == 503 and "127.0.0.1:10 is failed" in message and "127.0.0.1:9 " not in message


async def test_a_model_is_told_of_its_own_replicas_alone():
    replicas = {}
    async with stack(replicas=replicas) as s:
        own, other = backend_for(s.proxy, 9, ("m",)), backend_for(s.proxy, 10, ("n",))
        own.replica.state, own.replica.reason = State.FAILED, "exit code 1"
        replicas |= {one.id: one.replica for one in (own, other)}
        s.proxy.changed()
        status, _, body = await s.ask(post({"model": "m", "messages": []}))
        message = json.loads(body)["error"]["message"]
        assert status == 503 and message == f"no replica of 'm' is ready ({own.id} is failed: exit code 1)"
        assert other.id not in message

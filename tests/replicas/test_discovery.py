"""Replicas that come and go with pods, as a real API server over HTTP tells of them."""

import asyncio
import json

import pytest

from replicas import cluster_api, discovery
from replicas.cluster_api import Pods, PodsError
from replicas.discovery import Discovery
from replicas.pods import Discover, Place, place

from .certificates import server_context
from .cluster import Cluster

APP = {"app": "vllm"}
P, D = APP | {"llm-d.ai/role": "prefill"}, APP | {"llm-d.ai/role": "decode"}


@pytest.fixture
async def cluster():
    cluster = Cluster()
    await cluster.start()
    yield cluster
    await cluster.stop()


@pytest.fixture
async def discover(cluster, fleet, tmp_path, until):
    """Starts a discovery of that cluster's pods, after these pods were created: name=(address, labels). Returns once
    they are replicas and changes are followed."""
    tasks = []

    async def discover(**pods) -> Discovery:
        for name, (address, labels) in pods.items():
            await cluster.create(name, address, labels)
        found = start()
        await until(lambda: len(fleet.replicas) == len(pods), lambda: f"{roles(fleet)}, {found.problem}")
        await cluster.watched.wait()
        return found

    def start() -> Discovery:
        where = Place(f"http://127.0.0.1:{cluster.port}", "inference", tmp_path)
        found = Discovery(fleet, Discover(selector="app=vllm", url="http://{ip}:1"), where)
        tasks.append(asyncio.create_task(found.run()))
        return found

    discover.start = start
    yield discover
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def roles(fleet) -> dict[str, str]:
    return {one.host: one.role for one in fleet.replicas.values()}


@pytest.fixture
def become(fleet, until):
    """Wait until the fleet's replicas have these addresses and roles."""

    async def become(wanted):
        await until(lambda: roles(fleet) == wanted, lambda: str(roles(fleet)))

    return become


async def test_pods_are_replicas_with_the_role_of_their_label(cluster, discover, become):
    await cluster.create("other", "127.0.1.3", {"app": "redis"})
    await cluster.create("unplaced", None, D, "Pending")
    found = await discover(p=("127.0.1.1", P), d=("127.0.1.2", D))
    await become({"127.0.1.1": "prefill", "127.0.1.2": "decode"})
    assert found.to_dict() == {"selector": "app=vllm", "replicas": 2, "problem": None}
    assert cluster.asked[0] == {"labelSelector": "app=vllm", "limit": "100", "namespace": "inference"}


async def test_a_selector_that_finds_ever_more_pods_brings_so_many_and_keeps_those(
    cluster, fleet, discover, become, until, monkeypatch, caplog
):
    monkeypatch.setattr(discovery, "MOST_PODS", 2)
    for number in range(1, 5):
        await cluster.create(f"p{number}", f"127.0.1.{number}", P)
    discover.start()
    await until(lambda: [*roles(fleet)] == ["127.0.1.1", "127.0.1.2"], lambda: str(roles(fleet)))
    assert "finds more than 2 pods (see discover.selector); any other: it gets no requests" in caplog.text
    await cluster.change("p1", D)  # which does not cost it its place
    await become({"127.0.1.1": "decode", "127.0.1.2": "prefill"})
    await cluster.create("a0", "127.0.1.9", P)  # a list begins with it
    await cluster.forget()
    await cluster.delete("p2")
    await become({"127.0.1.1": "decode", "127.0.1.3": "prefill"})


async def test_those_that_come_go_and_change_later_are_followed(cluster, discover, become):
    await discover()
    await cluster.create("d", "127.0.1.2", D)
    await become({"127.0.1.2": "decode"})
    await cluster.create("p", "127.0.1.1", P)
    await become({"127.0.1.2": "decode", "127.0.1.1": "prefill"})
    await cluster.change("d", deletionTimestamp="2026-11-24T00:00:00Z")
    await become({"127.0.1.1": "prefill"})  # a pod that is to end gets no more requests
    await cluster.delete("d")
    await cluster.change("p", D)
    await become({"127.0.1.1": "decode"})
    await cluster.change("p", APP | {"llm-d.ai/role": "encode"})
    await become({})
    await cluster.change("p", P)
    await become({"127.0.1.1": "prefill"})
    await cluster.delete("p")
    await become({})


async def test_one_that_is_to_end_finishes_what_it_has(cluster, fleet, discover, until):
    running = {"127.0.1.1:1": 1}
    fleet.inflight, fleet._drain_timeout = lambda id: running.get(id, 0), 60.0
    await discover(p=("127.0.1.1", P))
    (replica,) = fleet.replicas.values()
    await cluster.change("p", deletionTimestamp="2026-11-24T00:00:00Z")
    await until(lambda: "1 requests to finish" in replica.reason, lambda: f"{replica.state}: {replica.reason}")
    assert replica.id in fleet.replicas
    running.clear()
    await until(lambda: not fleet.replicas)


def pod(**metadata) -> dict:
    return {"metadata": {"uid": "z", "name": "z", **metadata}, "status": {"podIP": "127.0.1.9"}}


LISTS = {"labels": {"items": [pod(labels=["x"])]}, "a label": {"items": [pod(labels={"llm-d.ai/role": ["decode"]})]},
         "name": {"items": [pod(name=["z"])]}, "uid": {"items": [pod(uid={})]},
         "address": {"items": [pod() | {"status": {"podIP": ["127.0.1.9"]}}]}, "status": {"items": [pod() | {"status": ["x"]}]},
         "pod": {"items": ["z"]}, "metadata": {"metadata": ["1"]}, "version": {"metadata": {"resourceVersion": 7}}, "items": {"items": 7}}  # fmt: skip


CHANGES = {"long": b'{"x":"' + b"a" * 5_000_000 + b'"}\n', "deep": b"[" * 200_000 + b"\n", "a type": b'{"type":7}\n'}


@pytest.mark.parametrize("what", [*LISTS, *CHANGES])
async def test_what_no_kubernetes_tells_is_a_problem_and_is_asked_for_again(what, cluster, fleet, discover, until):
    found = await discover(p=("127.0.1.1", P))
    if what in LISTS:
        told = {"metadata": {"resourceVersion": "1"}, "items": [], **LISTS[what]}
        cluster.told = json.dumps(told).encode()
    else:
        cluster.changes = CHANGES[what]
    await cluster.forget()
    await until(lambda: "the answer is not a Kubernetes API's" in found.problem, lambda: found.problem)
    assert roles(fleet) == {"127.0.1.1": "prefill"}
    cluster.told = cluster.changes = None
    await until(lambda: not found.problem)


@pytest.fixture
def pods(cluster, tmp_path):
    """Make what follows that cluster's pods; `told` has the pods of each time at which it told them."""

    def make(told=None) -> Pods:
        where = Place(f"http://127.0.0.1:{cluster.port}", "inference", tmp_path)
        return Pods(Discover(selector="app=vllm"), where, (told if told is not None else []).append)

    return make


def lines(changes) -> bytes:
    """A stream of changes, each of which is its kind and a pod's metadata."""
    told = ({"type": kind, "object": pod(resourceVersion="7", **metadata)} for kind, metadata in changes)
    return b"".join(json.dumps(one).encode() + b"\n" for one in told)


async def test_a_list_of_ten_thousand_pods_comes_in_pages_and_of_their_labels_those_that_are_used(cluster, pods):
    for number in range(10_000):
        name = f"p{number:04}"
        cluster.pods[name] = pod(name=name, uid=name, labels=P | {"note": "x" * 60})
    found = await pods().list()
    assert [one.name for one in found] == [f"p{number:04}" for number in range(10_000)]
    assert {str(one.labels) for one in found} == {"{'llm-d.ai/role': 'prefill'}"}
    assert len(cluster.asked) == 100


@pytest.mark.parametrize("items", (b"{}," * 2**19, b"{}," * 2**23), ids=("values", "bytes"))
async def test_a_page_of_more_than_pods_have_is_not_parsed(items, cluster, pods, monkeypatch):
    parsed = []
    monkeypatch.setattr(cluster_api.orjson, "loads", parsed.append)
    cluster.told = b'{"metadata":{"resourceVersion":"1"},"items":[' + items + b"{}]}"
    with pytest.raises(PodsError, match="more than (524,288 values|16 MiB)"):
        await pods().list()
    assert not parsed


@pytest.mark.parametrize("endless", (False, True))
async def test_more_pods_than_there_can_be_are_a_problem(endless, cluster, pods, monkeypatch):
    monkeypatch.setattr(cluster_api, "MOST_KNOWN", 150)
    items = [] if endless else [pod(uid=f"p{number}") for number in range(151)]
    cluster.told = json.dumps({"metadata": {"resourceVersion": "1", "continue": "x"}, "items": items}).encode()
    with pytest.raises(PodsError, match="more than 150 pods; see discover.selector"):
        await pods().list()
    assert len(cluster.asked) == (2 if endless else 1)


async def test_changes_that_come_together_are_told_together(cluster, pods, until, monkeypatch):
    monkeypatch.setattr(cluster_api, "TELL_SECONDS", 3600)
    await cluster.create("z", "127.0.1.9", P)
    cluster.changes = lines(("MODIFIED", {"uid": "uid-1", "labels": (D, P)[number % 2]}) for number in range(501))
    told = []
    task = asyncio.create_task(pods(told).follow())
    await until(lambda: len(cluster.asked) == 3)  # so the first stream has ended
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(told) == 1  # the next one comes after an hour


async def test_while_the_api_is_away_its_replicas_stay_and_then_follow(cluster, fleet, discover, become, until):
    found = await discover(p=("127.0.1.1", P))
    before, port = [*fleet.replicas.values()], cluster.port
    await cluster.stop()
    await until(lambda: "does not answer" in found.problem, lambda: found.problem)
    assert [*fleet.replicas.values()] == before
    await cluster.delete("p")
    await cluster.create("d", "127.0.1.2", D)
    await cluster.start(port)
    await become({"127.0.1.2": "decode"})
    assert not found.problem


async def test_versions_that_the_api_has_forgotten_are_asked_all_over_again(cluster, fleet, discover, become):
    await discover(p=("127.0.1.1", P))
    (replica,) = fleet.replicas.values()
    cluster.watched.clear()
    await cluster.forget()
    await cluster.watched.wait()
    await cluster.create("d", "127.0.1.2", D)
    await become({"127.0.1.1": "prefill", "127.0.1.2": "decode"})
    assert fleet.replicas[replica.id] is replica, "it lost what was known of its cache"


async def test_what_an_operator_removed_stays_out_until_its_pod_is_another(cluster, fleet, discover, become):
    await discover(p=("127.0.1.1", P))
    await fleet.remove("127.0.1.1:1")
    await cluster.create("d", "127.0.1.2", D)
    await become({"127.0.1.2": "decode"})
    await cluster.delete("p")
    await cluster.create("p", "127.0.1.1", P)
    await become({"127.0.1.2": "decode", "127.0.1.1": "prefill"})


async def test_it_begins_where_other_processes_stand(cluster, discover, become, until):
    gone = []
    await cluster.create("removed", "127.0.1.1", P)
    await cluster.create("drained", "127.0.1.2", D)
    found = discover.start()
    found.gone = gone.append
    found.resume(["127.0.1.1:1", "127.0.1.8:1"], ["127.0.1.1:1", "127.0.1.2:1", "127.0.1.8:1", "127.0.1.9:1"])
    await become({"127.0.1.2": "decode"})
    assert gone == ["127.0.1.8:1", "127.0.1.9:1"], "these went before this process knew of pods"
    await cluster.watched.wait()
    await cluster.delete("removed")
    await until(lambda: gone[2:] == ["127.0.1.1:1"])
    await cluster.create("again", "127.0.1.1", P)
    await become({"127.0.1.2": "decode", "127.0.1.1": "prefill"})
    await cluster.delete("drained")
    await until(lambda: gone[3:] == ["127.0.1.2:1"])


async def test_who_goes_with_its_pod_is_told_before_and_not_what_an_operator_removes(cluster, fleet, discover, until):
    left = []
    (await discover(p=("127.0.1.1", P), d=("127.0.1.2", D))).leaving = left.extend
    first, second = fleet.replicas.values()
    fleet.inflight = lambda id: int(id == first.id and not left)  # the drain goes on meanwhile
    removal = fleet.remove(first.id)
    await cluster.delete("p")
    await cluster.delete("d")
    await until(lambda: not fleet.replicas)
    await removal
    assert left == [second]


async def test_replicas_given_by_their_urls_are_not_touched(cluster, fleet, discover, become):
    fleet.add("http://127.0.1.1:1#role=both")
    await discover(p=("127.0.1.1", P), d=("127.0.1.2", D))
    assert roles(fleet) == {"127.0.1.1": "both", "127.0.1.2": "decode"}
    await cluster.delete("p")
    await cluster.delete("d")
    await become({"127.0.1.1": "both"})


async def test_an_api_that_refuses_is_said_with_what_would_help(cluster, fleet, discover, until):
    cluster.refuses = 403
    found = discover.start()
    await until(lambda: "answers 403: pods is forbidden" in found.problem, lambda: found.problem)
    assert "get, list and watch pods" in found.problem
    cluster.refuses = 0
    await cluster.create("p", "127.0.1.1", P)
    await until(lambda: fleet.replicas)


async def test_inside_a_cluster_the_account_of_the_pod_opens_the_api(fleet, become, until, tmp_path):
    """Over TLS, by the authority and the token that the pod is given, and by the token that replaces it."""
    context = server_context(tmp_path, "IP:127.0.0.1")
    (tmp_path / "ca.pem").rename(tmp_path / "ca.crt")
    (tmp_path / "namespace").write_text("inference")
    (tmp_path / "token").write_text("of this hour")
    cluster = Cluster(token="of this hour")
    await cluster.start(tls=context)
    await cluster.create("p", "127.0.1.1", P)
    settings = Discover(selector="app=vllm")
    there = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(cluster.port)}
    found = Discovery(fleet, settings, place(settings, tmp_path, there))
    task = asyncio.create_task(found.run())
    try:
        await become({"127.0.1.1": "prefill"})
        await cluster.watched.wait()  # first: with the next token it would not be answered
        cluster.token = "of the next one"
        await cluster.forget()
        await until(lambda: "answers 401" in found.problem, lambda: found.problem)
        (tmp_path / "token").write_text("of the next one\n")
        await until(lambda: not found.problem)
        assert roles(fleet) == {"127.0.1.1": "prefill"}
    finally:
        task.cancel()
        await cluster.stop()


async def test_ever_new_pods_in_a_stream_are_a_problem_and_what_was_known_is_told(cluster, pods, monkeypatch):
    monkeypatch.setattr(cluster_api, "MOST_KNOWN", 150)
    monkeypatch.setattr(cluster_api, "TELL_SECONDS", 3600)
    cluster.changes = lines(("ADDED", {"uid": f"u{number}"}) for number in range(200))
    told = []
    with pytest.raises(PodsError, match="more than 150 pods"):
        await asyncio.wait_for(pods(told).follow(), 30)
    assert (len(told[0]), len(told[-1])) == (0, 150)

"""The operator's side over real HTTP, in front of a gateway whose replicas are plain objects."""

import asyncio
import errno
import os
import re
import threading
import time
import types

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway import __version__
from gateway.errors import ApiError
from gateway.ops.admin import Admin
from gateway.ops.guard import Guard
from gateway.ops.metrics import Metrics
from gateway.ops.page import page_file
from gateway.ops.recent.recent import Recent
from gateway.ops.view import View
from gateway.settings import ConfigError, Settings
from policies import Ledger
from replicas import Fleet
from replicas.kept import KeptReplicas
from replicas.lifecycle import State
from replicas.metrics import Scrape
from replicas.replica import Replica, parse_url

from ..http.talk import Talker

JSON = {"Content-Type": "application/json"}


class StandIn:
    """As replicas.Fleet, but nobody probes: the tests set the states."""

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self.engines: dict[str, object] = {}

    async def quiet(self, id: str) -> None:
        pass

    def add(self, url: str) -> Replica:
        address = parse_url(url)
        made = Replica(address.id, address.url, address.host, address.port, role=address.role)
        return self.replicas.setdefault(address.id, made)


class Gateway:
    def __init__(self, fleet=None) -> None:
        self.fleet, self.metrics, self.ledger, self.kept = fleet or StandIn(), Metrics(), Ledger(), None
        self.stats = {"blocks": 10, "bytes": 320, "bytes_per_block": 32.0, "evicted": 4, "slots": {0: 7}}
        self.slots, self.intakes = {"a:1": 0}, {}
        cachemap = types.SimpleNamespace(stats=lambda: self.stats)
        self.view = View(Settings(), self.metrics, self.fleet.replicas, self.ledger, cachemap, self.slots, self.intakes)
        self.metrics.read_from(self.view.reading)
        self.status = self.view.status
        self.recent = Recent(self.view, types.SimpleNamespace(queue=None, shadows=None, onlooker=None))

    def requests_at(self, replicas):
        return self.left

    left = ()  # ids of requests

    async def explain(self, path, body, headers):
        if body == b"bad":
            raise ApiError(400, "messages is missing", param="messages", code="missing")
        return {"path": path, "bytes": len(body)}


@pytest.fixture
async def gateway():
    return Gateway()


@pytest.fixture
async def http(gateway):
    admin = Admin(gateway, Guard())
    port = await admin.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        yield session
    await admin.stop()


async def error_of(response) -> dict:
    shown = (await response.json())["error"]
    assert set(shown) == {"message", "type", "param", "code"} and shown["message"]
    return shown


async def samples(http) -> dict[tuple, float]:
    async with http.get("/metrics") as response:
        assert response.status == 200 and response.headers["Content-Type"].startswith("text/plain; version=")
        page = await response.text()
    return {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(page) for s in f.samples}


async def test_alive_even_when_everything_else_is_broken(http, gateway):
    gateway.status = lambda: 1 / 0
    async with http.get("/livez") as response:
        assert response.status == 200
    async with http.get("/readyz") as response:
        assert response.status == 500
        assert "the gateway's log says why" in (await error_of(response))["message"]


async def test_ready_once_a_replica_takes_traffic(http, gateway):
    async with http.get("/readyz") as response:
        assert response.status == 503
        assert "there is no replica; add one with hitherto replicas add" in (await response.json())["why_not"]
    replica = gateway.fleet.add("http://a:1")
    async with http.get("/readyz") as response:
        why_not = "no replica is ready: a:1 is starting (not heard yet)"
        assert response.status == 503
        assert await response.json() == {"ready": False, "why_not": why_not, "models": {}}
    for state, expected in ((State.READY, 200), (State.DEGRADED, 200), (State.FAILED, 503), (State.DRAINING, 503)):
        replica.state = state
        async with http.get("/readyz") as response:
            assert response.status == expected, state


async def test_readiness_is_of_the_gateway_or_of_the_models_that_are_named(http, gateway):
    """One model without a replica is no reason to take the others' requests from the gateway."""
    up, down = gateway.fleet.add("http://a:1"), gateway.fleet.add("http://b:1")
    up.models, served = {"one": None, "adapter": "one"}, {"b:1": frozenset(["two"])}
    gateway.view.served_by = lambda id: served.get(id, frozenset())  # what an engine told goes with it
    up.state, down.state, down.reason = State.READY, State.FAILED, "connection refused"

    async def ask(query=""):
        async with http.get(f"/readyz{query}") as response:
            return response.status, await response.json()

    each = {"adapter": True, "one": True, "two": False}
    assert await ask() == (200, {"ready": True, "why_not": None, "models": each})
    assert await ask("?model=adapter") == (200, {"ready": True, "why_not": None, "models": {"adapter": True}})
    for query in ("?model=two", "?model=one&model=two"):
        status, said = await ask(query)
        assert status == 503 and said["ready"] is False and said["models"]["two"] is False
        assert said["why_not"] == "no replica of 'two' is ready: b:1 is failed (connection refused)"
    status, said = await ask("?model=three")
    assert (status, said["why_not"]) == (503, "no replica is known to serve 'three'; known are: adapter, one, two")
    status, said = await ask("?model=")
    assert status == 400 and "/readyz?model=NAME" in said["error"]["message"]
    gateway.view.expected_back = lambda: {"gone": 12.3, "two": 4.0}
    status, said = await ask("?model=gone")
    assert (status, said["why_not"]) == (503, "no replica of 'gone' is ready: a pod of it went 12 s ago")
    status, said = await ask("?model=two")
    assert said["why_not"].endswith("b:1 is failed (connection refused); a pod of it went 4 s ago")
    assert (await ask())[1]["models"] == each | {"gone": False}
    assert (await ask("?model=one"))[0] == 200
    gateway.view.expected_back = dict
    served.clear()
    down.required_model = "two"
    status, said = await ask("?model=three")
    assert status == 503 and said["why_not"].startswith("no replica is known to serve 'three'"), (
        "b has to serve another"
    )
    status, said = await ask("?model=two")
    assert said["why_not"] == "no replica of 'two' is ready: b:1 is failed (connection refused)"
    down.state = State.READY
    assert (await ask("?model=three"))[0] == 200, "one that is ready and tells no models serves any"
    gateway.view.draining = True
    status, said = await ask("?model=one")
    assert status == 503 and "is stopping" in said["why_not"] and said["models"] == {"one": False}


async def test_a_model_does_not_wait_for_the_tokenizer_of_another(http, gateway):
    """One whose files are nowhere has none to wait for."""
    for url, name in (("http://a:1", "one"), ("http://b:1", "two")):
        replica = gateway.fleet.add(url)
        replica.state, replica.models = State.READY, {name: None}
    missing = "the tokenizer of two, which is being loaded"
    gateway.view.models = types.SimpleNamespace(waiting_for=missing, loading={"two"}, spaces=[], members={})

    async def ask(query=""):
        async with http.get(f"/readyz{query}") as response:
            return response.status, await response.json()

    assert await ask("?model=one") == (200, {"ready": True, "why_not": None, "models": {"one": True}})
    status, said = await ask("?model=two")
    assert status == 503 and said["why_not"] == "waiting for the tokenizer of 'two', which is being loaded"
    status, said = await ask()
    assert status == 503 and said["why_not"] == f"waiting for {missing}"
    assert said["models"] == {"one": True, "two": False}


@pytest.mark.parametrize(("others", "last"), [({"other": None}, ["sim"]), ({"sim": None}, None), ({}, None)])
async def test_a_drain_names_the_models_that_nobody_serves_now(gateway, others, last):
    """A replica that lists no models may serve any."""
    made = [gateway.fleet.add(f"http://127.0.0.1:{port}") for port in (1, 2)]
    for replica, models in zip(made, ({"sim": None}, others), strict=True):
        replica.state, replica.models = State.READY, models
    gateway.fleet.drain = lambda id: setattr(gateway.fleet.replicas[id], "state", State.DRAINING)
    admin = Admin(gateway, Guard())
    async with aiohttp.ClientSession(f"http://127.0.0.1:{await admin.start('127.0.0.1', 0)}") as http:
        async with http.post(f"/replicas/{made[0].id}/drain") as response:
            assert (await response.json()).get("last_ready_of") == last
    await admin.stop()


@pytest.mark.parametrize("goes_on", [False, True])
async def test_add_list_drain_remove_with_a_real_fleet(unused_tcp_port, goes_on):
    inflight = {"count": 1}
    fleet = Fleet(lambda id: inflight["count"], interval=0.05)
    gateway = Gateway(fleet)
    admin, id = Admin(gateway, Guard()), f"127.0.0.1:{unused_tcp_port}"
    port = await admin.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        async with http.post("/replicas", json={"url": f"http://{id}"}) as response:
            assert response.status == 201 and (await response.json())["id"] == id
        async with http.post("/replicas", json={"url": f"http://{id}/v1"}) as response:
            assert response.status == 200, "known already"
        for other in ("events=tcp://127.0.0.1:5557", "model=other", "role=prefill", "spill=yes"):
            async with http.post("/replicas", json={"url": f"http://{id}#{other}"}) as response:
                shown = await error_of(response)
                assert (response.status, shown["code"]) == (409, "replica_exists")
                assert f"DELETE /replicas/{id} first" in shown["message"]
        async with http.get("/replicas") as response:
            (shown,) = (await response.json())["replicas"]
        assert (shown["id"], shown["url"], shown["events"], shown["managed"]) == (id, f"http://{id}", "off", False)

        async with http.post(f"/replicas/{id}/drain") as response:
            assert response.status == 202 and (await response.json())["state"] == "draining"
        removal = asyncio.create_task(http.delete(f"/replicas/{id}").__aenter__())
        async with http.get("/replicas") as response:
            states = [one["state"] for one in (await response.json())["replicas"]]
            assert states == ["draining"], "a request is still on it"
        inflight["count"], gateway.left = 0, [f"r{number}" for number in range(101)] if goes_on else []
        response = await asyncio.wait_for(removal, 20)
        told = {"left": 101, "requests": gateway.left[:100]} if goes_on else {}
        assert response.status == 200 and await response.json() == {"id": id, "removed": True, **told}
        async with http.get("/replicas") as response:
            assert await response.json() == {"replicas": []}
    await admin.stop()
    await fleet.stop()


@pytest.mark.parametrize("change", ["remove", "drain"])
async def test_a_replica_added_while_it_is_taken_out_is_there_afterwards(unused_tcp_port, tmp_path, change):
    inflight = {"count": 1}
    fleet = Fleet(lambda id: inflight["count"], interval=0.05)
    gateway, id = Gateway(fleet), f"127.0.0.1:{unused_tcp_port}"
    gateway.kept = KeptReplicas(tmp_path / "replicas")
    admin = Admin(gateway, Guard())
    port = await admin.start("127.0.0.1", 0)
    url = f"http://{id}"
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:

        async def add() -> int:
            async with http.post("/replicas", json={"url": url}) as response:
                return response.status

        async def take_out() -> int:
            async with (
                http.delete(f"/replicas/{id}") if change == "remove" else http.post(f"/replicas/{id}/drain") as response
            ):
                return response.status

        assert await add() == 201
        out = asyncio.create_task(take_out())
        while fleet.replicas[id].state is not State.DRAINING:
            await asyncio.sleep(0)
        added = asyncio.create_task(add())
        await asyncio.wait([added], timeout=0.2)
        inflight["count"] = 0
        assert await out in (200, 202)
        assert await added == (201 if change == "remove" else 200)
        assert fleet.replicas[id].state not in (State.DRAINING, State.STOPPED) and fleet.engines[id].removal is None
        assert gateway.kept.urls() == (url,)
    await admin.stop()
    await fleet.stop()


async def test_what_stands_behind_a_url_may_be_a_member_of_its_own(http):
    body = {"url": "http://127.0.0.1:1", "role": "prefill", "events": "tcp://127.0.0.1:2"}
    async with http.post("/replicas", json=body) as response:
        assert response.status == 201 and (await response.json())["role"] == "prefill"
    body = {"url": "http://127.0.0.1:2#role=decode", "spill": False}
    async with http.post("/replicas", json=body) as response:
        assert response.status == 201 and (await response.json())["role"] == "decode"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rolle": "prefill"}, "'rolle' is unknown; besides url it may have events, replay, topic, model, role,"),
        ({"role": "leader"}, "role=leader is none of prefill, decode, both"),
        ({"role": None}, "role is 'None', which is no word or number"),
        ({"model": 5}, "model is '5', which is no word or number; put a name in quotes"),
        ({"role": "prefill,spill=yes"}, "which is no word or number"),
        ({"bootstrap": 0}, "bootstrap=0 is no port"),
    ],
)
async def test_a_member_that_says_nothing_is_not_passed_over(http, more, said):
    async with http.post("/replicas", json={"url": "http://127.0.0.1:1", **more}) as response:
        assert response.status == 400 and said in (await error_of(response))["message"]


BAD = (
    "ftp://b:1",
    "http://b\r\nX: y:1",
    "http://" + "b" * 100_000,
    "http://b c:1",
    "http://b:0",
    "http://b:1#events=tcp://c:x",
)


@pytest.mark.parametrize("url", BAD)
async def test_adding_a_bad_url(http, gateway, url):
    async with http.post("/replicas", json={"url": url}) as response:
        shown = await error_of(response)
        assert (response.status, shown["code"]) == (400, "invalid_url")
        assert shown["message"].startswith("replica URL ") and len(shown["message"]) < 600
    assert not gateway.fleet.replicas


async def test_unknown_replica_names_the_known_ones(http, gateway):
    gateway.fleet.add("http://gpu7:8000")
    for id, known in (("b:1", "; there are: gpu7:8000"), ("gpu7:800", ". Did you mean 'gpu7:8000'?")):
        for method, path in (("POST", f"/replicas/{id}/drain"), ("DELETE", f"/replicas/{id}")):
            async with http.request(method, path) as response:
                assert response.status == 404
                assert (await error_of(response))["message"] == f"there is no replica {id!r}{known}"


async def test_explain_is_handed_on_and_its_refusal_too(http):
    async with http.post("/explain", params={"path": "/v1/completions"}, data=b"12345", headers=JSON) as response:
        assert await response.json() == {"path": "/v1/completions", "bytes": 5}
    async with http.post("/explain", data=b"bad", headers=JSON) as response:
        assert response.status == 400
        shown = await error_of(response)
        assert (shown["message"], shown["param"], shown["code"]) == ("messages is missing", "messages", "missing")


async def test_metrics_show_counters_and_what_the_rooms_know(http, gateway):
    replica = gateway.fleet.add("http://a:1")
    replica.state, replica.managed, replica.restarts = State.READY, True, 3
    replica.scrape = Scrape(0.0, 5, 2, 0.25, None, None, None, 16, 1000)
    gateway.fleet.add("http://b:1")
    gateway.intakes["a:1"] = types.SimpleNamespace(
        state="live", batches=9, blocks_stored=8, blocks_removed=7, orphans=3, ignored=2, gaps=6, replayed=5
    )
    gateway.ledger.add("a:1")
    gateway.ledger.reserve("a:1", uncached=100, tokens=300)
    gateway.metrics.requests.inc("chat", "2xx")
    shown = await samples(http)
    expected = {
        ("hitherto_requests_total", "chat", "2xx"): 1,
        ("hitherto_inflight_requests", "a:1"): 1, ("hitherto_inflight_requests", "b:1"): 0,
        ("hitherto_reserved_prefill_tokens", "a:1"): 100, ("hitherto_reservations",): 1,
        ("hitherto_replica_state", "a:1", "ready"): 1, ("hitherto_replica_state", "a:1", "failed"): 0,
        ("hitherto_replica_state", "b:1", "starting"): 1, ("hitherto_replica_restarts_total", "a:1"): 3,
        ("hitherto_replica_waiting_requests", "a:1"): 2, ("hitherto_replica_kv_usage_ratio", "a:1"): 0.25,
        ("hitherto_map_blocks",): 10, ("hitherto_map_evicted_blocks_total",): 4, ("hitherto_map_replica_blocks", "a:1"): 7,
        ("hitherto_events_state", "a:1", "live"): 1, ("hitherto_event_batches_total", "a:1"): 9, ("hitherto_event_gaps_total", "a:1"): 6,
        ("hitherto_event_blocks_orphaned_total", "a:1"): 3, ("hitherto_event_blocks_ignored_total", "a:1"): 2,
        ("hitherto_build_info", "least_time", __version__): 1,
    }  # fmt: skip
    assert {key: shown.get(key) for key in expected} == expected
    assert ("hitherto_replica_waiting_requests", "b:1") not in shown, "not scraped yet: no made-up zero"


@pytest.mark.parametrize(("asked", "gzipped"), [("gzip", True), ("deflate, GZIP;q=0.5", True), ("gzip;q=0, br", False), ("identity", False)])  # fmt: skip
async def test_metrics_are_gzipped_for_whoever_asks(http, asked, gzipped):
    async with http.get("/metrics", headers={"Accept-Encoding": asked}) as response:
        assert response.headers.get("Content-Encoding") == ("gzip" if gzipped else None)
        assert response.headers["Vary"] == "Accept-Encoding" and b"hitherto_build_info" in await response.read()


async def test_a_file_that_cannot_be_written_is_the_gateways_fault(unused_tcp_port, tmp_path):
    gateway = Gateway()
    gateway.kept = KeptReplicas(tmp_path / "replicas")

    def full(what):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    gateway.kept.add = full
    admin = Admin(gateway, Guard())
    port = await admin.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        async with http.post("/replicas", json={"url": f"http://127.0.0.1:{unused_tcp_port}"}) as response:
            told = await error_of(response)
            assert (response.status, told["type"], told["code"]) == (500, "server_error", "replica_file")
            assert "No space left on device" in told["message"]
        gateway.status = lambda: 1 / 0
        async with http.get("/status") as response:
            assert (response.status, (await error_of(response))["type"]) == (500, "server_error")
    await admin.stop()


async def test_status_sums_up(http, gateway):
    gateway.fleet.add("http://a:1").state = State.READY
    metrics = gateway.metrics
    metrics.requests.inc("chat", "2xx", by=3)
    metrics.requests.inc("chat", "5xx")
    metrics.prompts.inc("exact", by=4)
    metrics.prompt_tokens.inc("a:1", by=1000)
    metrics.predicted_cached_tokens.inc("a:1", by=640)
    metrics.ttft_seconds.observe((), 0.05)
    metrics.replica_ttft_seconds.observe("a:1", 0.05)
    async with http.get("/status") as response:
        status = await response.json()
    assert status["ready"] is True and status["policy"] == "least_time"
    totals = status["totals"]
    assert (totals["requests"], totals["errors"], totals["prompts"]) == (4, 1, {"exact": 4})
    assert status["map"] == {"blocks": 10, "bytes": 320, "budget_bytes": 512 * 2**20, "evicted": 4}
    (replica,) = status["replicas"]
    assert (replica["prompt_tokens"], replica["predicted_cached_tokens"]) == (1000, 640)
    assert 0.04 <= replica["ttft_p50_seconds"] <= 0.06


SCRIPTS = ("parts.js", "fleet.js", "recent.js", "page.js")


async def test_the_page_needs_nothing_from_elsewhere(http):
    texts = {}
    for path in ("/", "/page/style.css", *(f"/page/{name}" for name in SCRIPTS)):
        async with http.get(path) as response:
            policy = response.headers["Content-Security-Policy"]
            assert response.status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
            texts[path] = await response.text()
    for text in texts.values():
        assert not re.search(r"""(src|href)=["']?(https?:)?//""", text) and "@import" not in text and "url(" not in text
        # Names and reasons come from other machines: text nodes only.
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)
    assert {*re.findall(r'(?:src|href)="page/([^"]+)"', texts["/"])} == {"style.css", *SCRIPTS}
    assert " on" not in "".join(re.findall(r"<[^>]+>", texts["/"])) and "style=" not in texts["/"]
    async with http.get("/page/__init__.py") as response:
        assert response.status == 404
    async with http.get("/page/..%2fadmin.py") as response:
        assert response.status == 404


async def test_the_page_uses_only_what_is_told(http, gateway):
    gateway.fleet.add("http://a:1")
    gateway.recent.look(time.time())
    async with http.get("/recent") as response:
        recent = await response.json()
    status, script = gateway.status(), "".join(page_file(name).text for name in SCRIPTS)
    figures = recent["figures"]
    for variable, known in (("s", status), ("r", status["replicas"][0]), ("m", status["map"]), ("recent", recent),
                            ("w", figures["whole"]), ("c", figures["curves"])):  # fmt: skip
        used = set(re.findall(rf"(?<![\w.]){variable}\.([a-z]\w*)", script))
        assert used and used <= {*known, "workers"}, used - set(known)


async def test_a_taken_port_is_a_clear_error(gateway):
    first, second = Admin(gateway, Guard()), Admin(gateway, Guard())
    port = await first.start("127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}.*--admin-port"):
            await second.start("127.0.0.1", port)
    finally:
        await first.stop()


@pytest.mark.parametrize(
    "data",
    (
        b"GET / HTTP/1.1\r\nHost: a\r\nno header\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nA: " + 20_000 * b"a" + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GARBAGE\x00\xff\r\n\r\n",
    ),
    ids=("head", "size", "TLS", "bytes"),
)
async def test_who_sends_what_is_no_http_is_told_and_fills_no_log(gateway, caplog, data):
    admin = Admin(gateway, Guard())
    port = await admin.start("127.0.0.1", 0)
    talker = await Talker.to(port)
    await talker.say(data)
    status, _, body = await talker.response()
    await talker.close()
    await admin.stop()
    assert status == 400 and body
    assert not caplog.records


@pytest.mark.parametrize("path, told", (("/explain", 400), ("/replicas", 400), ("/livez", 405)))
async def test_a_body_that_is_not_encoded_as_it_says_is_told_and_fills_no_log(http, caplog, path, told):
    head = "Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: 2"
    talker = await Talker.to(http._base_url.port)
    await talker.say(f"POST {path} HTTP/1.1\r\n{head}\r\n\r\n{{}}".encode())
    status, _, body = await talker.response()
    await talker.close()
    async with http.get("/livez") as alive:
        assert alive.status == 200
    assert status == told and b'"error"' in body
    assert not caplog.records


async def test_others_are_answered_while_all_blocks_of_an_engine_are_compared(http, gateway):
    """A million of them take a second."""
    gateway.fleet.add("http://a:1")
    begun, let_go = threading.Event(), threading.Event()

    def compare(keys):
        begun.set()
        assert let_go.wait(20)
        return [1], [7]

    gateway.differs = lambda id: compare
    asked = asyncio.ensure_future(http.post("/replicas/a:1/blocks", json={"keys": [5, 6]}))
    assert await asyncio.to_thread(begun.wait, 20)
    assert (await http.get("/livez")).status == 200
    let_go.set()
    assert await (await asked).json() == {"missing": [6], "besides": [f"{7:016x}"]}

"""The operator's side over real HTTP, in front of a gateway whose replicas are plain objects."""

import asyncio
import errno
import os
import re
import threading
import time
import types

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway import __version__
from gateway.ops.admin import Admin
from gateway.ops.guard import Guard
from gateway.ops.page import page_file
from gateway.settings import ConfigError
from replicas import Fleet
from replicas.kept import KeptReplicas
from replicas.lifecycle import State
from replicas.metrics import Scrape

from ..http.talk import Talker
from .stand_in import Gateway, asking, served

JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def gateway():
    return Gateway()


@pytest.fixture
async def http(gateway):
    async with asking(gateway) as session:
        yield session


async def said(http, line: str, status: int = 200, **given):
    """What is answered to this request with this status; of an error, the error itself."""
    method, path = line.split(" ")
    async with http.request(method, path, **given) as response:
        told = await response.json()
        assert response.status == status, told
    if "error" not in told:
        return told
    assert set(told["error"]) == {"message", "type", "param", "code"} and told["error"]["message"]
    return told["error"]


async def samples(http) -> dict[tuple, float]:
    async with http.get("/metrics") as response:
        assert response.status == 200 and response.headers["Content-Type"].startswith("text/plain; version=")
        page = await response.text()
    return {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(page) for s in f.samples}


async def test_alive_even_when_everything_else_is_broken(http, gateway):
    gateway.status = lambda: 1 / 0
    async with http.get("/livez") as response:
        assert response.status == 200
    for path in ("/readyz", "/status"):
        told = await said(http, f"GET {path}", 500)
        assert told["type"] == "server_error" and "the gateway's log says why" in told["message"]


async def test_ready_once_a_replica_takes_traffic(http, gateway):
    told = await said(http, "GET /readyz", 503)
    assert "there is no replica; add one with hitherto replicas add" in told["why_not"]
    replica = gateway.fleet.add("http://a:1")
    why_not = "no replica is ready: a:1 is starting (not heard yet)"
    assert await said(http, "GET /readyz", 503) == {"ready": False, "why_not": why_not, "models": {}}
    for state, expected in ((State.READY, 200), (State.DEGRADED, 200), (State.FAILED, 503), (State.DRAINING, 503)):
        replica.state = state
        await said(http, "GET /readyz", expected)


async def test_readiness_is_of_the_gateway_or_of_the_models_that_are_named(http, gateway):
    """One model without a replica is no reason to take the others' requests from the gateway."""
    gateway.fleet.add("http://a:1", State.READY, {"one": None, "adapter": "one"})
    down, served = gateway.fleet.add("http://b:1", State.FAILED), {"b:1": frozenset(["two"])}
    gateway.view.served_by = lambda id: served.get(id, frozenset())  # what an engine told goes with it
    down.reason = "connection refused"

    async def ready(query="") -> dict:
        told = await said(http, f"GET /readyz{query}")
        assert told["ready"] is True and told["why_not"] is None
        return told["models"]

    async def why_not(query: str) -> str:
        told = await said(http, f"GET /readyz{query}", 503)
        assert told["ready"] is False and False in told["models"].values()
        return told["why_not"]

    each = {"adapter": True, "one": True, "two": False}
    refused = "no replica of 'two' is ready: b:1 is failed (connection refused)"
    unknown = "no replica is known to serve 'three'; known are: adapter, one, two"
    assert (await ready(), await ready("?model=adapter")) == (each, {"adapter": True})
    assert await why_not("?model=two") == await why_not("?model=one&model=two") == refused
    assert await why_not("?model=three") == unknown
    assert "/readyz?model=NAME" in (await said(http, "GET /readyz?model=", 400))["message"]
    gateway.view.expected_back = lambda: {"gone": 12.3, "two": 4.0}
    assert await why_not("?model=gone") == "no replica of 'gone' is ready: a pod of it went 12 s ago"
    assert await why_not("?model=two") == f"{refused}; a pod of it went 4 s ago"
    assert await ready() == each | {"gone": False} and await ready("?model=one")
    gateway.view.expected_back = dict
    served.clear()
    down.required_model = "two"
    assert await why_not("?model=three") == unknown, "b has to serve another"
    assert await why_not("?model=two") == refused
    down.state = State.READY
    assert await ready("?model=three"), "one that is ready and tells no models serves any"
    gateway.view.draining = True
    assert "is stopping" in await why_not("?model=one")


async def test_a_model_does_not_wait_for_the_tokenizer_of_another(http, gateway):
    """One whose files are nowhere has none to wait for."""
    for url, name in (("http://a:1", "one"), ("http://b:1", "two")):
        gateway.fleet.add(url, State.READY, {name: None})
    missing = "the tokenizer of two, which is being loaded"
    gateway.view.models = types.SimpleNamespace(waiting_for=missing, loading={"two"}, spaces=[], members={})
    assert (await said(http, "GET /readyz?model=one"))["models"] == {"one": True}
    told = await said(http, "GET /readyz?model=two", 503)
    assert told["why_not"] == "waiting for the tokenizer of 'two', which is being loaded"
    told = await said(http, "GET /readyz", 503)
    assert told == {"ready": False, "why_not": f"waiting for {missing}", "models": {"one": True, "two": False}}


@pytest.mark.parametrize(("others", "last"), [({"other": None}, ["sim"]), ({"sim": None}, None), ({}, None)])
async def test_a_drain_names_the_models_that_nobody_serves_now(http, gateway, others, last):
    """A replica that lists no models may serve any."""
    for port, models in ((1, {"sim": None}), (2, others)):
        gateway.fleet.add(f"http://127.0.0.1:{port}", State.READY, models)
    gateway.fleet.drain = lambda id: setattr(gateway.fleet.replicas[id], "state", State.DRAINING)
    assert (await said(http, "POST /replicas/127.0.0.1:1/drain", 202)).get("last_ready_of") == last


@pytest.fixture
async def real():
    """A gateway with a real fleet, which has a request on each replica while `inflight` says so."""
    inflight = [1]
    gateway = Gateway(Fleet(lambda id: inflight[0], interval=0.05))
    gateway.inflight = inflight
    yield gateway
    await gateway.fleet.stop()


@pytest.mark.parametrize("goes_on", [False, True])
async def test_add_list_drain_remove_with_a_real_fleet(unused_tcp_port, real, goes_on):
    id = f"127.0.0.1:{unused_tcp_port}"
    async with asking(real) as http:
        assert (await said(http, "POST /replicas", 201, json={"url": f"http://{id}"}))["id"] == id
        await said(http, "POST /replicas", 200, json={"url": f"http://{id}/v1"})  # known already
        for other in ("events=tcp://127.0.0.1:5557", "model=other", "role=prefill", "spill=yes"):
            refused = await said(http, "POST /replicas", 409, json={"url": f"http://{id}#{other}"})
            assert refused["code"] == "replica_exists" and f"DELETE /replicas/{id} first" in refused["message"]
        (shown,) = (await said(http, "GET /replicas"))["replicas"]
        assert (shown["id"], shown["url"], shown["events"], shown["managed"]) == (id, f"http://{id}", "off", False)

        assert (await said(http, f"POST /replicas/{id}/drain", 202))["state"] == "draining"
        removal = asyncio.create_task(said(http, f"DELETE /replicas/{id}"))
        states = [one["state"] for one in (await said(http, "GET /replicas"))["replicas"]]
        assert states == ["draining"], "a request is still on it"
        real.inflight[0], real.left = 0, [f"r{number}" for number in range(101)] if goes_on else []
        told = {"left": 101, "requests": real.left[:100]} if goes_on else {}
        assert await asyncio.wait_for(removal, 20) == {"id": id, "removed": True, **told}
        assert await said(http, "GET /replicas") == {"replicas": []}


@pytest.mark.parametrize("change, status", [("DELETE /replicas/{}", 200), ("POST /replicas/{}/drain", 202)])
async def test_a_replica_added_while_it_is_taken_out_is_there_afterwards(
    unused_tcp_port, tmp_path, real, change, status
):
    real.kept, id = KeptReplicas(tmp_path / "replicas"), f"127.0.0.1:{unused_tcp_port}"
    fleet, given = real.fleet, {"url": f"http://{id}"}
    async with asking(real) as http:
        await said(http, "POST /replicas", 201, json=given)
        out = asyncio.create_task(said(http, change.format(id), status))
        while fleet.replicas[id].state is not State.DRAINING:
            await asyncio.sleep(0)
        added = asyncio.create_task(said(http, "POST /replicas", 201 if "DELETE" in change else 200, json=given))
        await asyncio.wait([added], timeout=0.2)
        real.inflight[0] = 0
        await asyncio.gather(out, added)
        assert fleet.replicas[id].state not in (State.DRAINING, State.STOPPED) and fleet.engines[id].removal is None
        assert real.kept.urls() == (given["url"],)


async def test_what_stands_behind_a_url_may_be_a_member_of_its_own(http):
    for body, role in (
        ({"url": "http://127.0.0.1:1", "role": "prefill", "events": "tcp://127.0.0.1:2"}, "prefill"),
        ({"url": "http://127.0.0.1:2#role=decode", "spill": False}, "decode"),
    ):
        assert (await said(http, "POST /replicas", 201, json=body))["role"] == role


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ({"rolle": "prefill"}, "'rolle' is unknown; besides url it may have events, replay, topic, model, role,"),
        ({"role": "leader"}, "role=leader is none of prefill, decode, both"),
        ({"role": None}, "role is 'None', which is no word or number"),
        ({"model": 5}, "model is '5', which is no word or number; put a name in quotes"),
        ({"role": "prefill,spill=yes"}, "which is no word or number"),
        ({"bootstrap": 0}, "bootstrap=0 is no port"),
    ],
)
async def test_a_member_that_says_nothing_is_not_passed_over(http, more, wrong):
    assert wrong in (await said(http, "POST /replicas", 400, json={"url": "http://127.0.0.1:1", **more}))["message"]


@pytest.mark.parametrize(
    "url",
    [
        "ftp://b:1",
        "http://b\r\nX: y:1",
        f"http://{'b' * 100_000}",
        "http://b c:1",
        "http://b:0",
        "http://b:1#events=tcp://c:x",
    ],
    ids=str.split,
)
async def test_adding_a_bad_url(http, gateway, url):
    told = await said(http, "POST /replicas", 400, json={"url": url})
    assert told["code"] == "invalid_url" and told["message"].startswith("replica URL ") and len(told["message"]) < 600
    assert not gateway.fleet.replicas


async def test_unknown_replica_names_the_known_ones(http, gateway):
    gateway.fleet.add("http://gpu7:8000")
    for id in ("b:1", "gpu7:800"):
        for line in (f"POST /replicas/{id}/drain", f"DELETE /replicas/{id}"):
            assert (await said(http, line, 404))["message"] == f"there is no replica {id!r}; there are: gpu7:8000"


async def test_explain_is_handed_on_and_its_refusal_too(http):
    told = await said(http, "POST /explain?path=/v1/completions", data=b"12345", headers=JSON)
    assert told == {"path": "/v1/completions", "bytes": 5}
    told = await said(http, "POST /explain", 400, data=b"bad", headers=JSON)
    assert (told["message"], told["param"], told["code"]) == ("messages is missing", "messages", "missing")


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
        ("hitherto_build_info", __version__, "least_time"): 1,
    }  # fmt: skip
    assert {key: shown.get(key) for key in expected} == expected
    assert ("hitherto_replica_waiting_requests", "b:1") not in shown, "not scraped yet: no made-up zero"


@pytest.mark.parametrize(("asked", "gzipped"), [("gzip", True), ("deflate, GZIP;q=0.5", True), ("gzip;q=0, br", False), ("identity", False)])  # fmt: skip
async def test_metrics_are_gzipped_for_whoever_asks(http, asked, gzipped):
    async with http.get("/metrics", headers={"Accept-Encoding": asked}) as response:
        assert response.headers.get("Content-Encoding") == ("gzip" if gzipped else None)
        assert response.headers["Vary"] == "Accept-Encoding" and b"hitherto_build_info" in await response.read()


async def test_a_file_that_cannot_be_written_is_the_gateways_fault(http, gateway, tmp_path):
    gateway.kept = KeptReplicas(tmp_path / "replicas")

    def full(what):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    gateway.kept.add = full
    told = await said(http, "POST /replicas", 500, json={"url": "http://127.0.0.1:1"})
    assert (told["type"], told["code"]) == ("server_error", "replica_file")
    assert "No space left on device" in told["message"] and not gateway.fleet.replicas


async def test_status_sums_up(http, gateway):
    gateway.fleet.add("http://a:1", State.READY)
    metrics = gateway.metrics
    metrics.requests.inc("chat", "2xx", by=3)
    metrics.requests.inc("chat", "5xx")
    metrics.prompts.inc("exact", by=4)
    metrics.prompt_tokens.inc("a:1", by=1000)
    metrics.predicted_cached_tokens.inc("a:1", by=640)
    metrics.replica_ttft_seconds.observe("a:1", 0.05)
    status = await said(http, "GET /status")
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
    for path in ("/page/__init__.py", "/page/..%2fadmin.py"):
        await said(http, f"GET {path}", 404)


async def test_the_page_uses_only_what_is_told(http, gateway):
    gateway.fleet.add("http://a:1")
    gateway.recent.look(time.time())
    recent = await said(http, "GET /recent")
    status, script = gateway.status(), "".join(page_file(name).text for name in SCRIPTS)
    figures = recent["figures"]
    for variable, known in (("s", status), ("r", status["replicas"][0]), ("m", status["map"]), ("recent", recent),
                            ("w", figures["whole"]), ("c", figures["curves"])):  # fmt: skip
        used = set(re.findall(rf"(?<![\w.]){variable}\.([a-z]\w*)", script))
        assert used and used <= {*known, "workers"}, used - set(known)


async def test_a_taken_port_is_a_clear_error(gateway):
    async with served(gateway) as port:
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}.*--admin-port"):
            await Admin(gateway, Guard()).start("127.0.0.1", port)


async def answered(http, request: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to these bytes."""
    talker = await Talker.to(http._base_url.port)
    status, _, body = await talker.ask(request)
    await talker.close()
    return status, body


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
async def test_who_sends_what_is_no_http_is_told_and_fills_no_log(http, caplog, data):
    status, body = await answered(http, data)
    assert status == 400 and body
    assert not caplog.records


@pytest.mark.parametrize("path, told", (("/explain", 400), ("/replicas", 400), ("/livez", 405)))
async def test_a_body_that_is_not_encoded_as_it_says_is_told_and_fills_no_log(http, caplog, path, told):
    head = "Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: 2"
    status, body = await answered(http, f"POST {path} HTTP/1.1\r\n{head}\r\n\r\n{{}}".encode())
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

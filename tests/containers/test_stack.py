"""`docker compose up`, run: compose.yaml as it stands, by podman (see stack.py). Each test leaves the stack whole."""

import asyncio
import re
import socket
import subprocess
import sys
import time

import httpx
import pytest

from .stack import FOLDER, ROOT, Stack, until

LEFT_OUT = {
    "grafana": "no package of Debian, so no image without a registry; its files are tested by `make test`",
    "jaeger": "no package of Debian, so no image without a registry",
}
GATEWAYS = ("gateway-1", "gateway-2")
REPLICAS = ("replica-1", "replica-2", "replica-3")
PROMPT = "The committee that was to decide about the bridge met on a Tuesday, and nobody had read the report. " * 60

pytestmark = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason="make test-compose sets up what containers need"),
    pytest.mark.timeout(900),  # the first one waits for the image
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory, request):
    console = request.config.pluginmanager.getplugin("terminalreporter")
    one = Stack("compose.yaml", "hitherto-test", tmp_path_factory.mktemp("stack"), LEFT_OUT)
    for name, why in LEFT_OUT.items():
        console.write_line(f"compose.yaml: left out: {name}: {why}")
    one.down()  # what an interrupted run left
    volumes = one.podman("volume", "ls")
    one.build()
    one.up()
    try:
        for service in (*GATEWAYS, *REPLICAS, "redis", "prometheus"):
            until(lambda service=service: one.healthy(service), 60, lambda service=service: one.logs(service)[-2000:])
        for gateway in GATEWAYS:
            until(lambda gateway=gateway: ready(one, gateway) == 3, 60, lambda gateway=gateway: status(one, gateway))
        yield one
    finally:
        one.down()
        for kind in (("ps", "--all"), ("network", "ls")):
            assert "hitherto-test" not in one.podman(*kind), "`down --volumes` leaves nothing"
        assert one.podman("volume", "ls") == volumes, "not even a volume without a name"


def variable(gateway: str, admin: bool = False) -> str:
    return gateway.upper().replace("-", "_") + ("_ADMIN" if admin else "") + "_PORT"


def admin(stack, gateway, path, body: dict | None = None) -> dict:
    """What the admin side answers, asked with the token that both gateways have."""
    if stack.token is None:
        stack.token = stack.exec("gateway-1", "cat", "/run/hitherto/admin-token")
    url = stack.url(variable(gateway, admin=True)) + path
    answer = httpx.request("POST" if body else "GET", url, json=body, auth=("", stack.token), timeout=10)
    answer.raise_for_status()
    return answer.json()


def status(stack, gateway) -> dict:
    return admin(stack, gateway, "/status")


def states(stack, gateway) -> dict[str, str]:
    return {one["id"].partition(":")[0]: one["state"] for one in admin(stack, gateway, "/replicas")["replicas"]}


def holders(stack, gateway, body: dict) -> set[str]:
    """The replicas that hold this prompt, as the gateway knows."""
    told = admin(stack, gateway, "/explain", body)
    return {one["id"] for one in told["replicas"] if one["overlap_tokens"] > 0.9 * told["tokens"]}


def found(answer: httpx.Response) -> float:
    """The part of the prompt that the engine had in its cache."""
    usage = answer.json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]


def ready(stack, gateway) -> int:
    try:
        return list(states(stack, gateway).values()).count("ready")
    except httpx.HTTPError:
        return 0


def ask(stack, query: str) -> list[dict]:
    """The series that Prometheus answers with."""
    got = httpx.get(stack.url("PROMETHEUS_PORT") + "/api/v1/query", params={"query": query}, timeout=10).json()
    assert got["status"] == "success", got
    return got["data"]["result"]


def value(stack, query: str) -> float:
    found = ask(stack, query)
    return float(found[0]["value"][1]) if found else 0.0


class Clients:
    """Chats that go on in the background, one after the other in each of `count` clients; what each of them got."""

    def __init__(self, url: str, count: int = 6, tokens: int = 40) -> None:
        self.url, self.count, self.tokens = url, count, tokens
        self.got: list[int | str] = []

    async def __aenter__(self):
        self.client = httpx.AsyncClient(base_url=self.url, timeout=30)
        self.tasks = [asyncio.create_task(self._chat(number)) for number in range(self.count)]
        return self

    async def _chat(self, number: int) -> None:
        for turn in range(10_000):
            messages = [{"role": "user", "content": f"Client {number}. {PROMPT[:2000]} Turn {turn}."}]
            body = {"model": "sim", "messages": messages, "max_tokens": self.tokens, "ignore_eos": True}
            try:
                self.got.append((await self.client.post("/v1/chat/completions", json=body)).status_code)
            except httpx.HTTPError as error:
                self.got.append(repr(error))
                await asyncio.sleep(0.05)

    async def more(self, count: int) -> None:
        """Until so many more have been answered."""
        end = len(self.got) + count
        async with asyncio.timeout(60):
            while len(self.got) < end:
                await asyncio.sleep(0.05)

    async def __aexit__(self, *_):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.client.aclose()


async def test_every_service_is_up_and_well_and_confined(stack):
    for service, described in stack.services.items():
        state = stack.inspect(service)["State"]
        if service == "admin-token":
            assert not state["Running"] and state["ExitCode"] == 0
            continue
        assert state["Running"] and stack.healthy(service), service
        with pytest.raises(AssertionError, match="Read-only file system"):
            stack.exec(service, "touch", "/written")
        assert "CapEff:\t0000000000000000" in stack.exec(service, "cat", "/proc/1/status"), "it has no capability"
        assert stack.exec(service, "id", "-u").strip() != "0", "nor is it root"
        assert stack.inspect(service)["HostConfig"]["Memory"] > 0, "and it has a limit of memory"
        assert described["healthcheck"]["test"]


async def test_doctor_in_a_gateway_finds_nothing_but_the_traces_receiver_that_is_left_out(stack):
    for gateway in GATEWAYS:
        code = "import subprocess; print(subprocess.run(['hitherto', 'doctor'], capture_output=True, text=True).stdout)"
        told = stack.exec(gateway, "python", "-c", code).splitlines()
        bad = [
            line for line in told if line.startswith(("warn", "fail")) and " answers in " not in line
        ]  # a busy machine
        assert [line.split()[:2] for line in bad] in ([["warn", "traces"]], []), "\n".join(told)
        assert any(line.startswith("ok") and "redis" in line for line in told), "\n".join(told)


async def test_what_one_gateway_sent_the_other_knows(stack):
    body = {"model": "sim", "messages": [{"role": "user", "content": "Known to both. " + PROMPT}], "max_tokens": 4}
    first = httpx.post(stack.url("GATEWAY_1_PORT") + "/v1/chat/completions", json=body, timeout=30)
    holder = first.headers["x-hitherto-replica"]
    until(lambda: holders(stack, "gateway-2", body) == {holder}, 10, lambda: holders(stack, "gateway-2", body))
    again = httpx.post(stack.url("GATEWAY_2_PORT") + "/v1/chat/completions", json=body, timeout=30)
    assert again.headers["x-hitherto-replica"] == holder and found(again) > 0.9
    assert "hitherto:" in stack.exec("redis", "redis-cli", "--scan")


async def test_load_and_what_prometheus_says_of_it(stack, tmp_path):
    before = {name: value(stack, f"sum({name})") for name in COUNTED}
    report = tmp_path / "load.json"
    load = [sys.executable, "-m", "loadgen.cli", "run", "--base-url", stack.url("GATEWAY_1_PORT"), "--num-prompts", "120",
            "--request-rate", "12", "--seed", "5", "--json", str(report)]  # fmt: skip
    done = subprocess.run(load, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stdout + done.stderr
    counted = dict.fromkeys(COUNTED, 0.0)

    def arrived() -> bool:
        counted.update({name: value(stack, f"sum({name})") - before[name] for name in COUNTED})
        return counted["hitherto_requests_total"] >= 120

    until(arrived, 30, lambda: counted)  # the next scrape
    until(lambda: arrived() and value(stack, "sum(hitherto_inflight_requests)") == 0, 30)
    hit_rate = counted["hitherto_reported_cached_tokens_total"] / counted["hitherto_reported_prompt_tokens_total"]
    predicted = counted["hitherto_predicted_cached_tokens_total"] / counted["hitherto_prompt_tokens_total"]
    assert hit_rate > 0.5, "round robin has .3 of such a load"
    assert predicted == pytest.approx(hit_rate, abs=0.02), "the gateway knows what the engines have"
    # What the engines say themselves is what the gateways say of them.
    said = value(stack, "sum(vllm:prefix_cache_hits_total) / sum(vllm:prefix_cache_queries_total)")
    assert 0.3 < said < 1
    print(f"hit rate {hit_rate:.3f}, predicted {predicted:.3f}")


COUNTED = (
    "hitherto_requests_total", "hitherto_reported_cached_tokens_total", "hitherto_reported_prompt_tokens_total",
    "hitherto_predicted_cached_tokens_total", "hitherto_prompt_tokens_total",
)  # fmt: skip


async def test_prometheus_reaches_all_it_is_to_scrape_and_takes_its_rules(stack):
    def targets() -> dict[str, str]:
        got = httpx.get(stack.url("PROMETHEUS_PORT") + "/api/v1/targets", timeout=10).json()["data"]["activeTargets"]
        return {one["labels"]["instance"]: one["health"] + one["lastError"] for one in got}

    expected = {f"{name}:8081": "up" for name in GATEWAYS} | {f"{name}:8000": "up" for name in REPLICAS}
    until(lambda: targets() == expected, 30, targets)
    files = sorted(path.name for path in (ROOT / "deploy").glob("alerts*.yml"))

    def groups() -> list[dict]:
        return httpx.get(stack.url("PROMETHEUS_PORT") + "/api/v1/rules", timeout=10).json()["data"]["groups"]

    def judged() -> bool:
        return all(rule["health"] != "unknown" for group in groups() for rule in group["rules"])

    until(judged, 90, groups)
    assert {group["file"].rpartition("/")[2] for group in groups()} == set(files)
    bad = [rule["name"] for group in groups() for rule in group["rules"] if rule["health"] != "ok"]
    assert not bad, bad


async def test_a_replica_is_killed_and_no_client_notices(stack):
    async with Clients(stack.url("GATEWAY_1_PORT")) as clients:
        await clients.more(10)
        back = await asyncio.to_thread(stack.kill, "replica-2")
        await clients.more(30)
        await asyncio.to_thread(back)
        await asyncio.to_thread(until, lambda: all(ready(stack, one) == 3 for one in GATEWAYS), 40)
        await clients.more(10)
    assert set(clients.got) == {200}, clients.got
    assert stack.inspect("replica-2")["RestartCount"] == 1


async def test_a_gateway_is_killed_and_comes_back_knowing_what_it_knew(stack):
    url = stack.url("GATEWAY_1_PORT")
    body = {"model": "sim", "messages": [{"role": "user", "content": "Before the kill. " + PROMPT}], "max_tokens": 4}
    holder = httpx.post(url + "/v1/chat/completions", json=body, timeout=30).headers["x-hitherto-replica"]
    async with Clients(stack.url("GATEWAY_2_PORT")) as others:
        await others.more(6)
        back = await asyncio.to_thread(stack.kill, "gateway-1")
        await others.more(20)
        await asyncio.to_thread(back)
        await asyncio.to_thread(until, lambda: ready(stack, "gateway-1") == 3, 40)
        await asyncio.to_thread(until, lambda: holders(stack, "gateway-1", body) == {holder}, 20)
        await others.more(6)
    assert set(others.got) == {200}, "clients of the other gateway notice nothing"
    answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=30)
    assert answer.headers["x-hitherto-replica"] == holder, "it has the map again, from Redis or from the engines"
    assert found(answer) > 0.9


async def test_redis_is_killed_and_the_gateways_go_on(stack):
    async with Clients(stack.url("GATEWAY_1_PORT")) as one, Clients(stack.url("GATEWAY_2_PORT")) as other:
        await one.more(6)
        back = await asyncio.to_thread(stack.kill, "redis")
        await one.more(20)
        await other.more(20)
        await asyncio.to_thread(back)

        def joined() -> bool:
            return all(status(stack, gateway)["map"]["redis"]["ledger_joined"] for gateway in GATEWAYS)

        await asyncio.to_thread(until, joined, 40, lambda: status(stack, "gateway-1")["map"]["redis"])
        await one.more(6)
    assert set(one.got) | set(other.got) == {200}


async def test_a_gateway_that_is_stopped_finishes_what_it_sends(stack):
    body = {"model": "sim", "messages": [{"role": "user", "content": "A long story."}], "max_tokens": 400, "ignore_eos": True,
            "stream": True}  # fmt: skip
    lines = []
    async with httpx.AsyncClient(base_url=stack.url("GATEWAY_2_PORT"), timeout=30) as client:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            stopping = None
            async for line in answer.aiter_lines():
                lines.append(line)
                if len(lines) == 20:
                    begun = time.monotonic()
                    stopping = asyncio.create_task(asyncio.to_thread(stack.compose, "stop", "gateway-2"))
            finished = time.monotonic()
        await stopping
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert finished - begun > 1, "the stop came while it was being written"
    assert stack.inspect("gateway-2")["State"]["ExitCode"] == 0
    stack.compose("start", "gateway-2")
    until(lambda: ready(stack, "gateway-2") == 3, 40)


def stages(services: dict) -> list[list[str]]:
    """What `docker compose down` stops one after the other: first what nothing else depends on."""
    left, order = {name for name, one in services.items() if one.get("restart") != "no"}, []
    while left:
        needed = {other for name in left for other in services[name].get("depends_on", ())}
        order.append(sorted(left - needed))
        left -= set(order[-1])
    return order


async def test_streams_end_whole_when_all_is_stopped_in_the_order_of_compose(stack):
    """Docker Compose's order: podman-compose stops everything at once."""
    order = stages(stack.services)
    first = {name: number for number, names in enumerate(order) for name in names}
    assert max(first[name] for name in GATEWAYS) < min(first[name] for name in (*REPLICAS, "redis"))
    body = {"model": "sim", "messages": [{"role": "user", "content": "A long story."}], "max_tokens": 400, "ignore_eos": True,
            "stream": True}  # fmt: skip
    begun = asyncio.Semaphore(0)

    async def stream(gateway: str) -> str:
        async with httpx.AsyncClient(base_url=stack.url(variable(gateway)), timeout=60) as client:
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = []
                async for line in answer.aiter_lines():
                    lines.append(line)
                    if len(lines) == 4:
                        begun.release()
        return [line for line in lines if line][-1]

    streams = [asyncio.create_task(stream(GATEWAYS[number % 2])) for number in range(8)]
    for _ in streams:
        await begun.acquire()
    for names in order:
        await asyncio.to_thread(stack.compose, "stop", *names)
    assert await asyncio.gather(*streams) == ["data: [DONE]"] * 8
    for names in reversed(order):
        stack.compose("start", *names)
    until(lambda: all(ready(stack, one) == 3 for one in GATEWAYS), 60)


def address() -> str:
    """Of this machine. Docker knows it by the name host-gateway, podman from 4.7 on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 9))  # sends nothing
        return one.getsockname()[0]


async def test_the_gateway_alone_before_an_engine_on_this_machine(stack, tmp_path):
    """compose.gateway.yaml, while the engine is a process of the machine: requests and its events cross the bridge."""
    command = [sys.executable, "-m", "gateway", "replica", "--host", "0.0.0.0", "--port", "0"]
    engine = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    port = next(found[1] for line in engine.stderr if (found := re.search(r"http://0.0.0.0:(\d+)", line)))
    url = f"http://host.docker.internal:{port}"
    variables, settings = {"REPLICA_URLS": url, "HOST_ADDRESS": address()}, {"HITHERTO_MODEL": "sim"}
    alone = Stack("compose.gateway.yaml", "hitherto-test-alone", tmp_path, settings=settings, **variables)
    try:
        alone.down()
        alone.up()
        until(lambda: alone.healthy("gateway"), 60, lambda: alone.logs("gateway")[-2000:])
        body = {"model": "sim", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
        for _ in range(2):
            answer = httpx.post(alone.url("GATEWAY_PORT") + "/v1/chat/completions", json=body, timeout=30)
            assert answer.status_code == 200 and answer.headers["x-hitherto-replica"] == f"host.docker.internal:{port}"
        code = "import subprocess; print(subprocess.run(['hitherto', 'doctor'], capture_output=True, text=True).stdout)"
        told = alone.exec("gateway", "python", "-c", code)
        assert "\nfail" not in told and "\nok    events" in told, told
    finally:
        engine.kill()
        engine.communicate()
        alone.down()

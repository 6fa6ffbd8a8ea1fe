"""Each alert on real gateways before simulated engines: quiet while nothing is wrong, it fires when engines, gateways
or Redis are killed, stopped or slowed, and clears when that is over. Windows and `for` are sixty times shorter than in
deploy/alerts.yml, in a real Prometheus. `make test-alerts`; not part of `make test`."""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from replicas.simulated.model import sim_model_dir

from ..gateway.conftest import Engine
from ..gateway.running import running
from ..redis_server import Proxy, free_port
from ..replicas.cluster import Cluster
from .load import Load
from .prometheus import Prometheus, faster, prometheus

ALERTS = Path(__file__).parents[2] / "deploy/alerts.yml"
RULES = faster(ALERTS.read_text(), 60)
FIRES, CLEARS, CALM = 60.0, 90.0, 8.0  # seconds
pytestmark = pytest.mark.timeout(400)
SLO = {
    "scheduler": {"qos_classes": [{"name": "premium", "priority": 100}, {"name": "free", "priority": 10}]},
    "request_router": {"routes": [{"match": {"header": "x-customer-tier: premium"}, "qos": "premium"}, {"match": {}, "qos": "free"}]},
    "slo": {"ttft": "200ms"}, "admission": {"when_full": "wait", "max_requests": 40},
}  # fmt: skip


class Scene:
    """Gateways that are watched, and what they stand on."""

    def __init__(self, server: Prometheus):
        self.server = server

    async def calm(self) -> None:
        await asyncio.sleep(CALM)
        assert await self.server.alerts() == set(), "nothing is wrong"

    @asynccontextmanager
    async def during(self, *names: str):
        """These alerts fire while the block's fault lasts, and clear after it."""

        async def firing() -> bool:
            return set(names) <= await self.server.alerts()

        async def over() -> bool:
            return not set(names) & await self.server.alerts()

        assert await over(), f"{names}: too early"
        async with asyncio.timeout(FIRES + CLEARS):
            yield lambda: self.server.until(firing, FIRES, f"firing of {names}")
            await self.server.until(over, CLEARS, f"clearing of {names}")


@asynccontextmanager
async def watched(folder: Path, *gateways):
    targets = [str(one.admin.base_url.netloc, "ascii") for one in gateways]
    async with prometheus(folder / "prometheus", {"hitherto": targets}, RULES) as server:
        yield Scene(server)


@pytest.fixture
def engines():
    """Two engines at ports that stay theirs; `again(place)` starts one that was killed."""
    ports, running_ones = [free_port(), free_port()], {}

    class Engines:
        urls = [f"http://127.0.0.1:{port}" for port in ports]

        def again(self, place: int, *flags: str) -> None:
            running_ones[place] = Engine(
                "--port", str(ports[place]), "--profile", "gpu-8b", "--speedup", "4", "--num-blocks", "60000", *flags
            ).wait()

        def kill(self, place: int, how: int = signal.SIGKILL) -> None:
            process = running_ones[place].process
            process.send_signal(how)
            if how == signal.SIGKILL:
                process.wait()
                process.stderr.close()

        async def order(self, **what) -> None:
            async with httpx.AsyncClient() as client:
                for url in self.urls:
                    (await client.post(f"{url}/faults", json=what)).raise_for_status()

        async def order_one(self, place: int, **what) -> None:
            async with httpx.AsyncClient() as client:
                (await client.post(f"{self.urls[place]}/faults", json=what)).raise_for_status()

    made = Engines()
    for place in range(2):
        made.again(place)
    yield made
    for one in running_ones.values():
        if one.process.returncode is None:
            one.process.kill()
            one.process.wait()
            one.process.stderr.close()


async def test_replicas_that_are_killed_stopped_failing_or_slow(tmp_path, engines):
    async with running("--replica-url", *engines.urls, "--model", "sim", "--policy", "round_robin") as gateway:
        await gateway.ready(2)
        async with watched(tmp_path, gateway) as scene, Load(gateway.url, 3):
            await scene.calm()
            async with scene.during("HithertoReplicaDown") as fires:
                engines.kill(0)
                await fires()
                engines.again(0)
            await gateway.ready(2)
            async with scene.during("HithertoReplicaDegraded") as fires:
                engines.kill(0, signal.SIGSTOP)
                await fires()
                engines.kill(0, signal.SIGCONT)
            await gateway.ready(2)
            async with scene.during("HithertoReplicaStopped") as fires:
                drained = (await gateway.status())["replicas"][0]
                await gateway.admin.post(f"/replicas/{drained['id']}/drain")
                await fires()
                await gateway.admin.post("/replicas", json={"url": drained["url"]})
            await gateway.ready(2)
            async with scene.during("HithertoNoReplica", "HithertoErrors") as fires:
                engines.kill(0)
                engines.kill(1)
                await fires()
                engines.again(0)
                engines.again(1)
            await gateway.ready(2)
            async with scene.during("HithertoReplicaSlow", "HithertoReplicaWritesSlowly") as fires:
                await engines.order_one(1, slow=20)
                await fires()
                await engines.order_one(1, slow=1)
            async with scene.during("HithertoErrors") as fires:
                await engines.order(error_share=0.7)
                await fires()
                await engines.order(error_share=0)


async def test_a_model_whose_only_engine_goes(tmp_path, engines):
    other = ("--served-model-name", "other")
    engines.kill(1)
    engines.again(1, *other)
    async with running("--replica-url", *engines.urls) as gateway:
        await gateway.ready(2)
        async with watched(tmp_path, gateway) as scene, Load(gateway.url, 2):
            await scene.calm()
            async with scene.during("HithertoModelAway") as fires:
                engines.kill(1)
                await fires()
                engines.again(1, *other)


async def test_a_model_whose_only_pod_goes(tmp_path, engines):
    """And stays away for longer than a pod takes to be replaced."""
    cluster = Cluster()
    engines.kill(1)
    engines.again(1, "--served-model-name", "other")
    await cluster.start()
    where = {"selector": "app=vllm", "namespace": "inference", "api": f"http://127.0.0.1:{cluster.port}"}
    discover = json.dumps(where | {"url": engines.urls[0].replace("127.0.0.1", "{ip}")})
    try:
        await cluster.create("p", "127.0.0.1", {"app": "vllm"})
        async with running("--discover", discover, "--replica-url", engines.urls[1]) as gateway:
            await gateway.ready(2)
            async with watched(tmp_path, gateway) as scene:
                await scene.calm()
                async with scene.during("HithertoModelGone") as fires:
                    await cluster.delete("p")
                    await fires()
                    await cluster.create("again", "127.0.0.1", {"app": "vllm"})
    finally:
        await cluster.stop()


async def test_events_that_are_lost(tmp_path, start_engine):
    """The way to the publisher is cut: nothing tells of the blocks that the engine forgets meanwhile."""
    events, replay = free_port(), free_port()
    engine = start_engine("--events-port", str(events), "--replay-port", str(replay), "--speedup", "4").wait()
    async with Proxy(events) as way, httpx.AsyncClient(base_url=engine.url) as client:
        url = f"{engine.url}#events=tcp://127.0.0.1:{way.port},replay=tcp://127.0.0.1:{replay}"
        async with running("--replica-url", url, "--model", "sim") as gateway:
            await gateway.ready(1)
            async with watched(tmp_path, gateway) as scene, Load(gateway.url, 3):
                await scene.calm()
                async with scene.during("HithertoEventsNotFollowed") as fires:
                    way.cut()
                    await fires()
                    way.mend()
                async with scene.during("HithertoPredictionsWrong") as fires:
                    way.cut()

                    async def forget() -> None:
                        while True:
                            await client.post("/reset_prefix_cache")
                            await asyncio.sleep(0.05)

                    forgetting = asyncio.create_task(forget())
                    await fires()
                    forgetting.cancel()
                    way.mend()


async def test_a_prefiller_whose_legs_fail(tmp_path, start_engine):
    prefiller, decoder = [one.wait() for one in (start_engine("--kv-connector"), start_engine("--kv-connector"))]
    urls = f"{prefiller.url}#role=prefill", f"{decoder.url}#role=decode"
    async with running("--replica-url", *urls, "--model", "sim", "--policy", "round_robin") as gateway:
        await gateway.ready(2)
        async with watched(tmp_path, gateway) as scene, Load(gateway.url, 3), httpx.AsyncClient() as client:
            await scene.calm()
            async with scene.during("HithertoLegsFailing") as fires:
                (await client.post(f"{prefiller.url}/faults", json={"error_share": 0.5})).raise_for_status()
                await fires()
                (await client.post(f"{prefiller.url}/faults", json={"error_share": 0})).raise_for_status()


async def test_too_much_load_and_answers_that_come_too_late(tmp_path, engines):
    # A limit that a busy machine keeps, too: with 200 ms it was missed without a fault at a load of 20 per core.
    # What overload takes from the lower class it gives back window by window, so that too is made shorter.
    admission = {**SLO["admission"], "control_window": "10s"}
    (tmp_path / "hitherto.yaml").write_text(yaml.safe_dump({**SLO, "slo": {"ttft": "1s"}, "admission": admission}))
    flags = ["--config", str(tmp_path / "hitherto.yaml"), "--replica-url", *engines.urls, "--model", "sim"]
    async with running(*flags) as gateway:
        await gateway.ready(2)
        async with watched(tmp_path, gateway) as scene, Load(gateway.url, 6, tokens=4):
            await scene.calm()
            async with scene.during("HithertoSloBurnFast", "HithertoSloBurnSlow") as fires:
                await engines.order(slow=300)
                await fires()
                await engines.order(slow=1)


async def test_more_load_than_replicas_have_room_for(tmp_path, engines):
    crowded = {
        **SLO,
        "slo": {"ttft": "60s"},
        "admission": {"when_full": "wait", "engine_wait": "1ms", "max_requests": 3},
    }
    (tmp_path / "hitherto.yaml").write_text(yaml.safe_dump(crowded))
    flags = ["--config", str(tmp_path / "hitherto.yaml"), "--replica-url", *engines.urls, "--model", "sim"]
    async with running(*flags) as gateway:
        await gateway.ready(2)
        async with watched(tmp_path, gateway) as scene, Load(gateway.url, 1):
            await scene.calm()
            async with scene.during("HithertoQueueing", "HithertoRefusing") as fires:
                await engines.order(slow=60)
                async with Load(gateway.url, 40, pause=0.5):
                    await fires()
                await engines.order(slow=1)


async def test_limits_that_no_replica_can_keep(tmp_path, engines):
    limits = {"slo": {"ttft": "200ms"}, "admission": {"when_full": "wait", "control_window": "10s"}}
    (tmp_path / "hitherto.yaml").write_text(yaml.safe_dump(limits))
    flags = ["--config", str(tmp_path / "hitherto.yaml"), "--replica-url", *engines.urls, "--model", "sim"]
    async with running(*flags) as gateway:
        await gateway.ready(2)
        async with watched(tmp_path, gateway) as scene, Load(gateway.url, 8, tokens=12):
            await scene.calm()
            async with scene.during("HithertoMoreReplicasWanted") as fires:
                await engines.order(slow=60)
                await fires()
                await engines.order(slow=1)


async def test_an_engine_that_comes_back_with_another_chat_template(tmp_path, engines):
    other = shutil.copytree(sim_model_dir(), tmp_path / "other")
    template = other / "chat_template.jinja"
    template.write_text("Be brief. " + template.read_text())
    async with running("--replica-url", *engines.urls, "--model", "sim") as gateway:
        await gateway.ready(2)
        async with watched(tmp_path, gateway) as scene, Load(gateway.url, 3):
            await scene.calm()
            async with scene.during("HithertoPromptsCountedOtherwise") as fires:
                engines.kill(1)
                engines.again(1, "--model", str(other))
                await fires()
                engines.kill(1)
                engines.again(1)


async def test_no_file_descriptors_left(tmp_path, engines):
    async with running("--replica-url", *engines.urls, "--model", "sim") as gateway:
        await gateway.ready(2)
        async with watched(tmp_path, gateway) as scene, Load(gateway.url, 2):
            await scene.calm()
            async with scene.during("HithertoBackgroundFailures") as fires:
                with no_new_files(gateway.process.pid):
                    await engines.order(drop_events=1)  # which are asked for again, by a socket of its own
                    await fires()
                failures = (await gateway.status())["background_failures"]
                assert "limit of open files" in failures["connections of clients"]["last"]


@contextlib.contextmanager
def no_new_files(pid: int):
    """The process keeps the descriptors that it has, and gets no further ones."""
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = next(number for number in itertools.count() if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, usual[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)


async def test_a_tenant_beyond_its_limits_and_a_policy_of_ones_own_that_fails(tmp_path, engines):
    keys, key, broken = tmp_path / "keys.yaml", "sk-watched-0123456789", tmp_path / "broken"
    digest = hashlib.sha256(key.encode()).hexdigest()
    keys.write_text("- " + json.dumps({"name": "one", "sha256": digest, "concurrent_requests": 1}))
    policy = tmp_path / "mine.py"
    policy.write_text(
        "import pathlib\n\nfrom policies import Choice\n\n\nclass Mine:\n"
        '    name = "mine"\n\n'
        "    def choose(self, demand, candidates, explain=False):\n"
        f"        assert not pathlib.Path({str(broken)!r}).exists()\n"
        "        return Choice(0)\n"
    )
    flags = ["--replica-url", *engines.urls, "--model", "sim", "--api-keys", str(keys), "--policy", f"{policy}:Mine"]
    async with running(*flags) as gateway:
        await gateway.ready(2)
        headers = {"authorization": f"Bearer {key}"}
        async with watched(tmp_path, gateway) as scene:
            async with Load(gateway.url, 1, headers=headers):
                await scene.calm()
                async with scene.during("HithertoPolicyFailing") as fires:
                    broken.touch()
                    await fires()
                    broken.unlink()
            async with scene.during("HithertoTenantRefused") as fires:
                async with Load(gateway.url, 4, headers=headers):
                    await fires()


async def test_redis_that_goes_away(tmp_path, engines, start_redis):
    redis = start_redis()
    # One engine, so one gateway leads and the other follows it: only a follower can be behind.
    flags = ["--redis-url", redis.url, "--replica-url", engines.urls[0], "--model", "sim"]
    async with running(*flags) as one, running(*flags) as other:
        await asyncio.gather(one.ready(1), other.ready(1))
        async with watched(tmp_path, one, other) as scene, Load(one.url, 2), Load(other.url, 2):
            await scene.calm()
            async with scene.during("HithertoRedisAway") as fires:
                redis.kill()
                await fires()
                redis.start()
            async with scene.during("HithertoMapBehind") as fires:
                follower = await who_follows(one, other)
                # It tells the worst of the last 5 to 10 s.
                async with stuttering(follower.process.pid, 2.0, 9.0):
                    await fires()


async def who_follows(*gateways):
    """The one gateway of two that follows the map that the other writes, once they have agreed on it."""
    async with asyncio.timeout(30):
        while True:
            roles = [(await one.status())["replicas"][0]["map_role"] for one in gateways]
            if sorted(roles) == ["follower", "leader"]:
                return gateways[roles.index("follower")]
            await asyncio.sleep(0.1)


async def test_gateways_that_hang_and_files_that_cannot_be_used(tmp_path, engines):
    keys, key = tmp_path / "keys.yaml", "sk-watched-0123456789"
    good = "- " + json.dumps({"name": "one", "sha256": hashlib.sha256(key.encode()).hexdigest()})
    keys.write_text(good)
    flags = ["--replica-url", *engines.urls, "--model", "sim"]
    budget = ["--api-keys", str(keys), "--cache-budget", "1MiB"]
    async with running(*flags, *budget) as one, running(*flags, "--workers", "2") as two:
        await asyncio.gather(one.ready(2), two.ready(2))
        headers = {"authorization": f"Bearer {key}"}
        async with watched(tmp_path, one, two) as scene:
            await scene.calm()
            async with scene.during("HithertoUnusableFile") as fires:
                keys.write_text("- nonsense")
                await fires()
                keys.write_text(good)
            async with scene.during("HithertoMapFull") as fires:
                async with Load(one.url, 4, headers=headers, pause=0.0, words=4000, tokens=2):
                    await fires()
            async with scene.during("HithertoLoopDelayed") as fires:
                async with stuttering(one.process.pid, 0.4, 0.1):
                    await fires()
            async with scene.during("HithertoGatewayDown") as fires:
                os.kill(one.process.pid, signal.SIGSTOP)
                await fires()
                os.kill(one.process.pid, signal.SIGCONT)
            worker = (await two.status())["workers"][0]["pid"]
            async with scene.during("HithertoWorkerDown") as fires:
                os.kill(worker, signal.SIGSTOP)
                await fires()
                os.kill(worker, signal.SIGCONT)


@asynccontextmanager
async def stuttering(pid: int, still: float, runs: float):
    """The process stands still for so many seconds, and then runs for so many, again and again."""

    async def stutter() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(still)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(runs)

    task = asyncio.create_task(stutter())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        os.kill(pid, signal.SIGCONT)


async def test_an_engine_of_ours_that_ends_again_and_again(tmp_path):
    async with running("--launch", "1", "--profile", "sim") as gateway:
        await gateway.ready(1)
        async with watched(tmp_path, gateway) as scene, Load(gateway.url, 1):
            await scene.calm()
            async with scene.during("HithertoReplicaRestarts") as fires:
                for _ in range(2):
                    pid = (await gateway.ready(1))["replicas"][0]["pid"]
                    os.kill(pid, signal.SIGKILL)
                    await gateway.until(lambda status, old=pid: status["replicas"][0]["pid"] not in (None, old))
                await fires()


def test_every_alert_is_made_to_fire():
    calls = re.findall(r"scene\.during\(([^)]*)\)", Path(__file__).read_text())
    made = {name for call in calls for name in re.findall(r'"(\w+)"', call)}
    rules = {rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}
    assert made == rules

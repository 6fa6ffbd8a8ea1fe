"""A gateway before simulated engines, for clients that live in an environment of their own.

`make test-clients` runs this folder with the clients' interpreter; the gateway and its engines run with the product's,
which HITHERTO_PYTHON names. Without the clients (in `make test`) nothing here is collected.
"""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
SERVES = re.compile(r"serves https?://[^:]+:(\d+), .* admin side http://[^:]+:(\d+)")
KEY, LIMITED_KEY = "sk-clients-0123456789", "sk-limited-0123456789"
START_SECONDS = 60
NO_FAULTS = dict.fromkeys(("error_503", "error_500", "error_stream", "error_mid_stream", "refuse", "die_mid_stream"), 0)

collect_ignore_glob = [] if importlib.util.find_spec("openai") else ["test_*.py"]


class Gateway:
    """`hitherto serve ARGS` on free ports."""

    def __init__(self, *args: str, ready: int = 1, seconds: float = START_SECONDS) -> None:
        python = os.environ["HITHERTO_PYTHON"]
        self.log = tempfile.NamedTemporaryFile(prefix="gateway-", suffix=".log")
        self.process = subprocess.Popen(
            [python, "-m", "gateway", "serve", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0", *args],
            cwd=ROOT, stderr=self.log, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        try:
            self.wait(ready, seconds)
        except BaseException:
            self.process.terminate()
            raise

    def wait(self, ready: int, seconds: float) -> None:
        """Until so many replicas are ready."""
        found = self.until(lambda: SERVES.search(self.said()), seconds)
        self.url = f"http://127.0.0.1:{found[1]}"
        self.admin = httpx.Client(base_url=f"http://127.0.0.1:{found[2]}", timeout=30)
        self.until(lambda: sum(one["state"] == "ready" for one in self.status()["replicas"]) >= ready, seconds)
        self.until(lambda: self.admin.get("/readyz").status_code == 200, seconds)

    def said(self) -> str:
        return Path(self.log.name).read_text()

    def until(self, true, seconds: float = START_SECONDS):
        """What `true()` returns once it is true."""
        end = time.monotonic() + seconds
        while not (value := true()):
            assert self.process.poll() is None, f"the gateway ended:\n{self.said()}"
            assert time.monotonic() < end, f"did not become true in time:\n{self.said()[-4000:]}"
            time.sleep(0.02)
        return value

    def status(self) -> dict:
        return self.admin.get("/status").json()

    def fault(self, *replicas: str, **faults) -> None:
        """Order faults of these engines, or of all."""
        for name in replicas or [one["id"] for one in self.status()["replicas"]]:
            assert self.admin.post(f"/replicas/{name}/engine/faults", json=faults).status_code == 200

    def counted(self, name: str, **labels: str) -> float:
        page = self.admin.get("/metrics").text
        samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
        return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())

    def idle(self) -> bool:
        """Whether neither the gateway nor an engine has anything to do."""
        pages = [self.admin.get(f"/replicas/{one['id']}/engine/metrics").text for one in self.status()["replicas"]]
        running = [
            float(number) for page in pages for number in re.findall(r"^vllm:num_requests_running\S* (\S+)", page, re.M)
        ]
        return bool(running) and not sum(running) and not self.counted("hitherto_inflight_requests")

    def stop(self) -> None:
        self.admin.close()
        self.process.terminate()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


@pytest.fixture(scope="session")
def start_gateway():
    """`start_gateway(*args)` starts one; all are stopped at the end."""
    started: list[Gateway] = []

    def start(*args: str, **options) -> Gateway:
        started.append(Gateway(*args, **options))
        return started[-1]

    yield start
    for gateway in started:
        gateway.stop()


@pytest.fixture(scope="session")
def shared_gateway(start_gateway) -> Gateway:
    return start_gateway("--launch", "2", "--profile", "sim", ready=2)


@pytest.fixture
def gateway(shared_gateway):
    """Two simulated engines behind a gateway; no fault is left behind."""
    yield shared_gateway
    shared_gateway.fault(slow=1, **NO_FAULTS)
    shared_gateway.until(lambda: all(one["state"] == "ready" for one in shared_gateway.status()["replicas"]))


@pytest.fixture(scope="session")
def guarded(start_gateway, tmp_path_factory) -> Gateway:
    """One that asks for a key. Both keys may use the model `sim`, LIMITED_KEY four times a minute."""
    file, limits = tmp_path_factory.mktemp("keys") / "keys.yaml", {KEY: {}, LIMITED_KEY: {"requests_per_minute": 4}}
    lines = [
        {"name": f"team-{number}", "sha256": hashlib.sha256(key.encode()).hexdigest(), "models": ["sim"], **limit}
        for number, (key, limit) in enumerate(limits.items())
    ]
    file.write_text(json.dumps(lines))
    return start_gateway("--launch", "1", "--profile", "sim", "--api-keys", str(file))

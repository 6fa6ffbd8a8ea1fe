"""A real Prometheus for tests: Debian's package, scraping what it is told to, as often as tests need."""

from __future__ import annotations

import asyncio
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ..redis_server import free_port

SECOND = {"s": 1, "m": 60, "h": 3600}


def faster(text: str, times: float) -> str:
    """Durations of rules (`[5m]`, `for: 1m`) by so many times shorter; no window below 4 s: it needs scrapes to
    compare."""

    def shorter(match: re.Match[str]) -> str:
        seconds = int(match[2]) * SECOND[match[3]]
        return f"{match[1]}{max(4 if match[1] == '[' else 1, round(seconds / times)) if seconds else 0}s{match[4]}"

    text = re.sub(r"(\[)(\d+)([smh])(\])", shorter, text)
    return re.sub(r"(for: )(\d+)([smh])(\s)", shorter, text)


class Prometheus:
    def __init__(self, port: int):
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20)

    async def query(self, expression: str) -> list[float]:
        """The values of an instant vector, or of a scalar; what is no number left out."""
        answer = await self.client.get("/api/v1/query", params={"query": expression})
        told = answer.json()
        assert told["status"] == "success", f"{expression}: {told}"
        data = told["data"]
        rows = [data["result"]] if data["resultType"] == "scalar" else [one["value"] for one in data["result"]]
        return [number for _, text in rows if math.isfinite(number := float(text))]

    async def alerts(self) -> set[str]:
        """Those that are firing."""
        told = (await self.client.get("/api/v1/alerts")).json()["data"]["alerts"]
        return {one["labels"]["alertname"] for one in told if one["state"] == "firing"}

    async def until(self, true: Callable[[], Any], seconds: float, what: str) -> float:
        """Wait until `await true()`; returns the seconds that took."""
        begun = time.monotonic()
        while not await true():
            assert time.monotonic() - begun < seconds, f"{what} did not come within {seconds} s: {await self.alerts()}"
            await asyncio.sleep(0.2)
        return time.monotonic() - begun


@asynccontextmanager
async def prometheus(folder: Path, jobs: Mapping[str, list[str]], rules: str | None = None, interval: str = "1s"):
    """`jobs`: name -> HOST:PORT to scrape."""
    if not shutil.which("prometheus"):
        pytest.skip("Prometheus is not installed (Debian: apt-get install prometheus)")
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": targets}]} for name, targets in jobs.items()
        ],
    }
    if rules is not None:
        (folder / "rules.yml").write_text(rules)
        config["rule_files"] = [str(folder / "rules.yml")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    with open(folder / "log", "wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=1h", "--log.level=warn",
            stdout=log, stderr=log,
        )  # fmt: skip
    made = Prometheus(port)
    try:
        async with made.client:

            async def up() -> bool:
                assert process.returncode is None, (folder / "log").read_text()
                try:
                    return (await made.client.get("/-/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            end = time.monotonic() + 40
            while not await up():
                assert time.monotonic() < end, (folder / "log").read_text()
                await asyncio.sleep(0.1)
            yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()

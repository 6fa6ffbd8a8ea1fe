"""Traces of a gateway process, with a collector that answers, one that never does, and none at all."""

import asyncio
import os
import signal
import sys

import pytest
from aiohttp import web

from tests.gateway.collector import collecting
from tests.gateway.http.talk import free_port
from tests.gateway.running import running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "20"}  # milliseconds
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine().wait().url


async def test_spans_of_a_gateway_and_its_access_log(engine):
    async with collecting() as collector:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, **SOON, "OTEL_SERVICE_NAME": "edge",
                   "OTEL_RESOURCE_ATTRIBUTES": "team=search", "OTEL_EXPORTER_OTLP_HEADERS": "x-key=secret"}  # fmt: skip
        async with running("--replica-url", engine, "--access-log", env=environ) as gateway:
            await gateway.ready(1)
            gateway.client.headers["traceparent"] = HEADER
            assert (await gateway.chat(HELLO, stream=True)).status_code == 200
            assert (await gateway.chat(HELLO)).status_code == 200
            await collector.until(lambda it: len(it.spans) == 4)
        said = b"".join(gateway.log).decode()
    first, second = collector.of("SERVER")
    assert {first.trace, second.trace} == {TRACE} and first.parent == PARENT
    assert first.resource["service.name"] == "edge" and first.resource["team"] == "search"
    assert collector.headers[0]["x-key"] == "secret"
    assert said.count(f"trace_id={TRACE}") == 2 and f"traces go to {collector.url}/v1/traces" in said


async def silent(request: web.Request) -> web.Response:
    await asyncio.Event().wait()


@pytest.mark.parametrize("there", [True, False], ids=["never answers", "nobody listens"])
async def test_a_dead_collector_holds_up_nothing(engine, there):
    async with collecting(silent) as collector:
        url = collector.url if there else f"http://127.0.0.1:{free_port()}"
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_TIMEOUT": "60", **SOON,
                   "OTEL_BSP_MAX_QUEUE_SIZE": "4", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1"}  # fmt: skip
        async with running("--replica-url", engine, env=environ) as gateway:
            await gateway.ready(1)
            for _ in range(20):  # 40 spans, and 4 are kept
                assert (await gateway.chat(HELLO)).status_code == 200
            gateway.process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(gateway.process.wait(), 60) == 0
    said = [line for line in gateway.log if b"hitherto.traces" in line]
    assert 1 <= len(said) < 8
    assert not there or b"did not take the last spans within 2 s" in said[-1]
    assert not [line for line in gateway.log if b"opentelemetry" in line]


async def test_a_receiver_and_nothing_to_send_with(tmp_path):
    """Said before anything is started."""
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry/__init__.py").touch()  # in the way of the real one
    for workers in ("1", "2"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "serve", "--launch", "1", "--workers", workers, "--port", "0", "--admin-port", "0",
            stderr=asyncio.subprocess.PIPE, env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        _, said = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 2
        assert said.decode().splitlines() == [
            "hitherto: the environment names a receiver of traces (http://127.0.0.1:4318), and what sends them is not installed: "
            "pip install 'hitherto[otel]', or set OTEL_SDK_DISABLED=true"
        ]


async def test_without_a_receiver_nothing_of_it_is_imported(engine):
    async with running("--replica-url", engine, "--access-log", env={"PYTHONPROFILEIMPORTTIME": "1"}) as gateway:
        await gateway.ready(1)
        gateway.client.headers["traceparent"] = HEADER
        assert (await gateway.chat(HELLO)).status_code == 200
    said = b"".join(gateway.log)
    assert b"gateway.ops.traces" in said and b"httptools" in said
    assert not [line for line in gateway.log if b"| " in line and b"opentelemetry" in line]
    assert b"gateway.proxy.traced" not in said and b"trace_id" not in said

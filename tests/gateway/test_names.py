"""A whole gateway before engines that are known by name or have IPv6 addresses: one machine for requests and for
events."""

import asyncio
import json
import re
import socket
import sys
from contextlib import asynccontextmanager

import pytest

from tests.replicas.certificates import server_context

from .http.talk import free_port
from .running import running

# In a gateway's process, names are resolved by a table that the test may change: what getaddrinfo would say.
RESOLVER = """
import json, socket
real = socket.getaddrinfo
def getaddrinfo(host, port, *args, **more):
    with open({table!r}) as file:
        table = json.load(file)
    if host not in table:
        return real(host, port, *args, **more)
    return [entry for one in table[host] for entry in real(one, port, *args, **more)]
socket.getaddrinfo = getaddrinfo
"""
LONG = [{"role": "user", "content": "It was a bright cold day in April, and the clocks were striking thirteen. " * 20}]


@pytest.fixture
def resolver(tmp_path):
    """`resolver(name=[addresses])` sets the table; `resolver.env` is what the gateway's process needs."""
    table = tmp_path / "hosts.json"
    (tmp_path / "sitecustomize.py").write_text(RESOLVER.format(table=str(table)))

    def say(**names):
        (tmp_path / "new").write_text(
            json.dumps({name.replace("_", "."): addresses for name, addresses in names.items()})
        )
        (tmp_path / "new").rename(table)

    say.env = {"PYTHONPATH": str(tmp_path)}
    return say


@asynccontextmanager
async def engine(host: str, ports=(0, 0, 0), *flags: str):
    """A simulated engine on one address alone, as a machine is; gives its process and its port."""
    http, events, replay = map(str, ports)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "replicas.simulated", "--host", host, "--port", http, "--events-port", events, "--replay-port", replay,
        "--profile", "cpu-tiny", "--speedup", "50", *flags, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        said = b""
        while not (found := re.search(rb"simulated engine .* on http://\S*:(\d+),", said)):
            line = await process.stderr.readline()
            assert line, said.decode()
            said += line
        process.port = int(found[1])
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()


async def served(gateway, times: int) -> None:
    for _ in range(times):
        assert (await gateway.chat(LONG)).status_code == 200


def as_reported(one: dict) -> bool:
    return (
        one["reported_prompt_tokens"] == one["prompt_tokens"]
        and one["predicted_cached_tokens"] == one["reported_cached_tokens"]
    )


async def test_a_name_with_two_addresses_is_one_engine_for_requests_and_events_and_then_the_other(resolver):
    ports = [free_port() for _ in range(3)]
    resolver(gpu_test=["127.0.0.3", "127.0.0.2"])
    url = ("--replica-url", f"http://gpu.test:{ports[0]}")
    async with (
        engine("127.0.0.2", ports) as first,
        engine("127.0.0.3", ports),
        running("--model", "sim", *url, env=resolver.env) as gateway,
    ):
        await gateway.until(lambda status: status["replicas"][0]["events"] == "live")
        await served(gateway, 8)
        status = await gateway.until(
            lambda status: as_reported(status["replicas"][0]) and status["replicas"][0]["map_blocks"]
        )
        one = status["replicas"][0]
        assert one["address"] == "127.0.0.2" and one["predicted_cached_tokens"] > 0 and one["errors"] == 0
        assert any("leads to other addresses as well (127.0.0.3)" in problem for problem in one["problems"])

        first.kill()
        await gateway.until(
            lambda status: status["replicas"][0]["address"] == "127.0.0.3" and status["replicas"][0]["state"] == "ready"
        )
        await gateway.until(
            lambda status: status["replicas"][0]["events"] == "live" and not status["replicas"][0]["map_blocks"]
        )
        await served(gateway, 4)
        status = await gateway.until(
            lambda status: as_reported(status["replicas"][0]) and status["replicas"][0]["map_blocks"]
        )
        assert status["replicas"][0]["requests"] == 12


async def test_an_engine_at_an_ipv6_address_gets_requests_and_its_events_are_read():
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    async with (
        engine("::1") as process,
        running("--model", "sim", "--replica-url", f"http://[::1]:{process.port}") as gateway,
    ):
        await gateway.until(lambda status: status["replicas"][0]["events"] == "live")
        await served(gateway, 3)
        status = await gateway.until(
            lambda status: as_reported(status["replicas"][0]) and status["replicas"][0]["map_blocks"]
        )
        assert (
            status["replicas"][0]["id"] == f"[::1]:{process.port}"
            and status["replicas"][0]["predicted_cached_tokens"] > 0
        )


@asynccontextmanager
async def tls_in_front_of(port: int, context):
    """A server at 127.0.0.2 that takes TLS off; gives its port."""

    async def carry(reader, writer) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

    async def connected(reader, writer) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.2", port)
        ways = [asyncio.create_task(carry(reader, outer)), asyncio.create_task(carry(inner, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        writer.close()
        outer.close()

    server = await asyncio.start_server(connected, "127.0.0.2", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_an_https_engine_gets_plain_and_streamed_requests_and_its_events_are_read(resolver, tmp_path):
    resolver(gpu_test=["127.0.0.2"])
    async with (
        engine("127.0.0.2") as process,
        tls_in_front_of(process.port, server_context(tmp_path, "DNS:gpu.test")) as port,
    ):
        flags = (
            "--model",
            "sim",
            "--replica-url",
            f"https://gpu.test:{port}",
            "--replica-ca",
            str(tmp_path / "ca.pem"),
        )
        async with running(*flags, env=resolver.env) as gateway:
            await gateway.until(lambda status: status["replicas"][0]["events"] == "live")
            await served(gateway, 3)
            streamed = await gateway.chat(LONG, stream=True)
            assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
            # more than one write, refused by the engine as too long
            large = [{"role": "user", "content": "x " * 100_000}]
            assert (await gateway.chat(large)).status_code == 400
            status = await gateway.until(lambda status: status["replicas"][0]["map_blocks"])
            assert status["replicas"][0]["errors"] == 0 and status["replicas"][0]["predicted_cached_tokens"] > 0

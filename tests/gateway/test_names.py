"""A whole gateway before engines that are known by name or have IPv6 addresses: one machine for requests and for
events."""

import asyncio
import json
import socket
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
        (tmp_path / "new").write_text(json.dumps({name.replace("_", "."): names[name] for name in names}))
        (tmp_path / "new").rename(table)

    say.env = {"PYTHONPATH": str(tmp_path)}
    return say


async def served(gateway, times: int) -> None:
    for _ in range(times):
        assert (await gateway.chat(LONG)).status_code == 200


async def reported(gateway) -> dict:
    """The only replica, once its blocks are known, and its engine has reported what was predicted."""

    def agrees(status: dict) -> bool:
        (one,) = status["replicas"]
        counts = [
            (one[f"{by}_cached_tokens"], one[name])
            for by, name in (("predicted", "prompt_tokens"), ("reported", "reported_prompt_tokens"))
        ]
        return bool(one["map_blocks"]) and counts[0] == counts[1]

    return (await gateway.until(agrees))["replicas"][0]


async def test_a_name_with_two_addresses_is_one_engine_for_requests_and_events_and_then_the_other(
    resolver, start_engine
):
    flags = [f"--{name}={free_port()}" for name in ("port", "events-port", "replay-port")]
    first, other = start_engine("--host", "127.0.0.2", *flags), start_engine("--host", "127.0.0.3", *flags)
    resolver(gpu_test=["127.0.0.3", "127.0.0.2"])
    first.wait(), other.wait()
    url = f"http://gpu.test:{first.port}"
    async with running("--model", "sim", "--replica-url", url, env=resolver.env) as gateway:
        await gateway.until(lambda status: status["replicas"][0]["events"] == "live")
        await served(gateway, 8)
        one = await reported(gateway)
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
        assert (await reported(gateway))["requests"] == 12


async def test_an_engine_at_an_ipv6_address_gets_requests_and_its_events_are_read(start_engine):
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    port = start_engine("--host", "::1").wait().port
    async with running("--model", "sim", "--replica-url", f"http://[::1]:{port}") as gateway:
        await gateway.until(lambda status: status["replicas"][0]["events"] == "live")
        await served(gateway, 3)
        one = await reported(gateway)
        assert one["id"] == f"[::1]:{port}" and one["predicted_cached_tokens"] > 0


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


async def test_an_https_engine_gets_plain_and_streamed_requests_and_its_events_are_read(
    resolver, start_engine, tmp_path
):
    resolver(gpu_test=["127.0.0.2"])
    engine, context = start_engine("--host", "127.0.0.2").wait(), server_context(tmp_path, "DNS:gpu.test")
    async with tls_in_front_of(engine.port, context) as port:
        flags = ("--replica-url", f"https://gpu.test:{port}", "--replica-ca", str(tmp_path / "ca.pem"))
        async with running("--model", "sim", *flags, env=resolver.env) as gateway:
            await gateway.until(lambda status: status["replicas"][0]["events"] == "live")
            await served(gateway, 3)
            streamed = await gateway.chat(LONG, stream=True)
            assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
            # more than one write, refused by the engine as too long
            large = [{"role": "user", "content": "x " * 100_000}]
            assert (await gateway.chat(large)).status_code == 400
            status = await gateway.until(lambda status: status["replicas"][0]["map_blocks"])
            assert status["replicas"][0]["errors"] == 0 and status["replicas"][0]["predicted_cached_tokens"] > 0

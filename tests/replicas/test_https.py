"""Engines behind https: whose certificates are believed, and what is said of others."""

import re
import socket

import pytest
from aiohttp import web

from replicas import Fleet, State
from replicas.health import Limits
from tests.replicas.certificates import server_context


@pytest.fixture
def hosts(monkeypatch):
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **named: real("127.0.0.2" if host.endswith(".test") else host, *more, **named),
    )


@pytest.fixture
async def port(tmp_path, hosts):
    """Of an engine that is gpu.test and speaks TLS."""

    async def answer(request):
        return web.Response(text='{"data": [{"id": "m"}]}' if request.path == "/v1/models" else "")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.2", 0, ssl_context=server_context(tmp_path, "gpu.test")).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@pytest.mark.parametrize(
    "url, believed, state, said",
    [
        ("https://gpu.test", True, State.READY, "answers and serves m"),
        (
            "https://gpu.test",
            False,
            State.FAILED,
            "is not believed: unable to get local issuer certificate; name the file .* with --replica-ca",
        ),
        ("https://other.test", True, State.FAILED, "is not believed: Hostname mismatch, .* not valid for 'other.test'"),
        ("http://gpu.test", True, State.FAILED, ""),
    ],
)
async def test_a_certificate_is_checked_against_the_host_in_the_url(port, tmp_path, until, url, believed, state, said):
    fleet = Fleet(
        interval=0.1, limits=Limits(fall=2, lost_after=1.0), authorities=tmp_path / "ca.pem" if believed else None
    )
    try:
        replica = fleet.add(f"{url}:{port}")
        await until(lambda: replica.state is state, lambda: f"{replica.state}: {replica.reason}")
        assert re.search(said, replica.reason), replica.reason
    finally:
        await fleet.stop()


async def test_https_to_an_engine_without_tls_says_so(serve, hosts, until):
    async def answer(request):
        return web.Response()

    fleet = Fleet(interval=0.1)
    try:
        replica = fleet.add((await serve(answer)).replace("http:", "https:"))
        await until(lambda: replica.state is State.FAILED)
        assert "no TLS with" in replica.reason and "write http://" in replica.reason
    finally:
        await fleet.stop()

"""Engines behind https: whose certificates are believed, and what is said of others."""

import re
import socket

import pytest

from replicas import State
from replicas.health import Limits

from .certificates import server_context
from .conftest import answering


@pytest.fixture
def hosts(monkeypatch):
    real = socket.getaddrinfo

    def getaddrinfo(host, *more, **named):
        return real("127.0.0.2" if host.endswith(".test") else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


PAGES = answering({"/health": "", "/v1/models": {"data": [{"id": "m"}]}})


@pytest.mark.parametrize(
    "url, believed, state, said",
    [
        ("https://gpu.test", True, State.READY, "answers and serves m"),
        ("https://gpu.test", False, State.FAILED, "is not believed: unable to get local issuer .* with --replica-ca"),
        ("https://other.test", True, State.FAILED, "is not believed: Hostname mismatch, .* not valid for 'other.test'"),
        ("http://gpu.test", True, State.FAILED, ""),
    ],
)
async def test_whose_certificates_are_believed(serve, hosts, fleets, tmp_path, until, url, believed, state, said):
    served = await serve(PAGES, host="127.0.0.2", tls=server_context(tmp_path, "DNS:gpu.test"))
    limits, authorities = Limits(fall=2, lost_after=1.0), tmp_path / "ca.pem" if believed else None
    replica = fleets(limits=limits, authorities=authorities).add(f"{url}:{served.rpartition(':')[2]}")
    await until(lambda: replica.state is state, lambda: f"{replica.state}: {replica.reason}")
    assert re.search(said, replica.reason), replica.reason


async def test_https_to_an_engine_without_tls_says_so(serve, fleet, comes):
    replica = await comes(fleet.add((await serve(PAGES)).replace("http:", "https:")), State.FAILED)
    assert "no TLS with" in replica.reason and "write http://" in replica.reason

"""Whether this process could listen somewhere, as it would."""

import asyncio
import errno
import socket

import pytest

from gateway.ports import addresses, bound, why_taken


@pytest.fixture
def listener():
    """Makes one on an address of this machine and returns its port; skips where there is no such address."""
    made = []

    def listen(host: str) -> int:
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            one = bound(kind, (host, 0), shared=False)
        except OSError as error:
            pytest.skip(f"there is no {host} here: {error}")
        made.append(one)
        one.listen()
        return one.getsockname()[1]

    yield listen
    for one in made:
        one.close()


@pytest.mark.parametrize("theirs", ["0.0.0.0", "127.0.0.1", "::", "::1"])
@pytest.mark.parametrize("ours", ["", "0.0.0.0", "127.0.0.1", "localhost", "::", "::1"])
async def test_a_port_is_taken_exactly_where_a_server_could_not_have_it(listener, ours, theirs):
    port = listener(theirs)
    found = why_taken(ours, port)
    try:
        server = await asyncio.start_server(lambda reader, writer: None, ours, port)
    except OSError as error:
        assert found is not None and found.errno == error.errno == errno.EADDRINUSE
    else:
        server.close()
        await server.wait_closed()
        assert found is None


def test_an_address_of_another_machine_is_none_of_ours():
    assert why_taken("192.0.2.7", 8080).errno == errno.EADDRNOTAVAIL


def test_a_family_that_the_kernel_has_no_sockets_for_takes_no_port(monkeypatch):
    class Socket(socket.socket):
        def __init__(self, kind, *given):
            if kind == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(kind, *given)

    monkeypatch.setattr(socket, "socket", Socket)
    assert {kind for kind, *_ in addresses("", 0)} == {socket.AF_INET}
    assert why_taken("", 0) is None
    with bound(socket.AF_INET, ("0.0.0.0", 0), shared=False) as one:
        port = one.getsockname()[1]
    assert why_taken("", port) is None
    assert why_taken("::1", port).errno == errno.EAFNOSUPPORT


def test_some_port_is_always_free():
    assert why_taken("", 0) is None

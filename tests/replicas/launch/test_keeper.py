"""The keeper with real processes and real signals: whatever dies, the engine and all below it die too."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from replicas.launch.supervisor import KEEPER

SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def keep():
    """keep(*python code or flags) -> (keeper process, our end of its control socket)."""
    started = []

    def keep(*command: str, grace: float = 5.0):
        ours, theirs = socket.socketpair()
        ours.settimeout(10)
        argv = [sys.executable, "-I", "-S", str(KEEPER), str(theirs.fileno()), str(grace), *command]
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        started.append((process, ours))
        return process, ours

    yield keep
    for process, ours in started:
        ours.close()
        process.kill()
        process.wait()


def line(control: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n"):
        piece = control.recv(1)
        assert piece, "the keeper hung up"
        data += piece
    return data.decode().strip()


def pid_of(control: socket.socket) -> int:
    word, number = line(control).split()
    assert word == "pid"
    return int(number)


def handles_sigterm(pid: int):
    """A condition: the process is past exec and has its handler in place."""

    def check() -> bool:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(re.search(r"SigCgt:\s+(\w+)", status)[1], 16)
        before_exec = b"keeper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return not before_exec and bool(caught & 1 << signal.SIGTERM - 1)

    return check


@pytest.fixture
async def family(keep, tmp_path, until, fake_engine_argv):
    """A keeper and an engine with a child and a grandchild that left its group and lost its parent."""
    file = tmp_path / "pids"
    process, control = keep(*fake_engine_argv("--children", str(file), "--silent-start"))
    engine = pid_of(control)
    await until(file.exists, "the engine never told its children")
    return process, control, [engine, *map(int, file.read_text().split())]


async def test_stop_is_a_sigterm_and_the_engine_may_take_its_time(keep, until):
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); signal.pause()"
    _, control = keep(sys.executable, "-I", "-S", "-c", code)
    await until(handles_sigterm(pid_of(control)))
    control.sendall(b"stop 30\n")
    assert await asyncio.to_thread(line, control) == "exit 5"


async def test_the_gateways_death_ends_the_engine_and_all_below_it(family, until, alive):
    process, control, pids = family
    assert all(alive(pid) for pid in pids)
    control.close()
    await until(lambda: not any(alive(pid) for pid in pids), "orphans")
    assert await asyncio.to_thread(process.wait, 10) == 0


@pytest.mark.parametrize("crashes", [True, False])
async def test_all_of_an_engine_that_crashes_or_hangs_is_swept(family, until, alive, crashes):
    _, control, pids = family
    os.kill(pids[0], signal.SIGSEGV if crashes else signal.SIGSTOP)
    if not crashes:
        await until(lambda: Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        control.sendall(b"stop 0.1\n")
    assert await asyncio.to_thread(line, control) == ("exit -11" if crashes else "exit -9")
    assert not [pid for pid in pids if alive(pid)]


async def test_sigterm_to_the_keeper_stops_the_engine(keep, until, alive):
    process, control = keep(sys.executable, "-I", "-S", "-c", SLEEP)
    engine = pid_of(control)
    process.terminate()
    assert await asyncio.to_thread(line, control) == "exit -15"
    assert not alive(engine)


def test_an_engine_has_no_way_to_the_control_socket(keep):
    """Else an engine's forgotten child would keep the gateway's end of file from being seen."""
    code = "import os; raise SystemExit(len(os.listdir('/proc/self/fd')))"
    _, control = keep(sys.executable, "-I", "-S", "-c", code)
    pid_of(control)
    assert line(control) == "exit 4"  # in, out, err and the listing itself

"""The processes of workers, one at a time, and the looks at them."""

import asyncio
import shutil
import socket
import subprocess
import sys

import pytest

from gateway.app import Gateway
from gateway.settings import ConfigError, load
from gateway.workers.process import GONE, HANGS, QUIET, Places, WorkerProcess
from gateway.workers.supervisor import one_workers_settings
from replicas.simulated.model import sim_model_dir

from .scripted import ScriptedWorker

NO_SETTINGS = {"settings": {"log_level": "info"}}  # of which a worker ends once it looks for others


async def failure_of(tmp_path, hello=NO_SETTINGS) -> str:
    """Why a worker that is told this does not start."""
    worker = await WorkerProcess.start(0, tmp_path / "socket", hello, {})
    with pytest.raises(ConfigError) as failed:
        await worker.admin_open()
    await worker.ended()
    assert not worker.serves and not worker.hears_changes
    with pytest.raises(GONE):  # for whoever asks it a moment later
        await worker.ask("GET", "/worker/costs", [], b"", 1.0)
    assert await worker.query("/worker/costs") is None
    return str(failed.value)


async def test_a_worker_that_cannot_start_is_said_at_once(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "a worker ended with exit code 7 while it started" in await failure_of(tmp_path)


async def test_workers_are_of_the_supervisors_own_package_and_a_signal_to_the_whole_group_ends_none_that_starts(
    tmp_path, monkeypatch
):
    """As a service manager sends it, while a worker's interpreter comes up."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.kill(os.getpid(), 15)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway/__init__.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert "exit code 1 " in await failure_of(tmp_path)


async def test_a_setting_that_only_workers_can_judge_is_said_as_by_one_gateway(tmp_path):
    model = shutil.copytree(sim_model_dir(), tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{")
    settings = load({"workers": 2, "model": str(model)}, {}).settings
    hello = {"settings": one_workers_settings(settings, 0, "unix:///nowhere"), "secrets": (None, None), "costs": None}
    with pytest.raises(ConfigError) as alone:
        Gateway(settings)
    assert await failure_of(tmp_path, hello) == str(alone.value) and "tokenizer_config.json" in str(alone.value)


async def test_a_worker_that_does_not_answer_is_not_waited_for(tmp_path):
    with socket.socket(socket.AF_UNIX) as stuck:
        stuck.bind(str(tmp_path / "socket"))
        stuck.listen()
        ours, theirs = socket.socketpair()
        with theirs:
            worker = await started_without_process(tmp_path / "socket", ours)
            assert await worker.query("/worker/loads", 0.01) is None
    await worker.ended()


async def test_a_worker_whose_first_line_is_too_long_is_ended_at_once(tmp_path):
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(100_000 * b"x")
        worker = await started_without_process(tmp_path / "socket", ours)
        with pytest.raises(ConfigError, match="while it started"):
            await worker.admin_open()
    await worker.ended()


async def started_without_process(path, end) -> WorkerProcess:
    """A worker whose process is a child that waits for its standard input to end, and `end` the supervisor's end of
    their socket."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return WorkerProcess(0, process, *await asyncio.open_connection(sock=end), path, {})


async def test_a_worker_that_leaves_too_many_looks_in_a_row_unanswered_is_killed():
    """Of one look alone nothing follows: after this process was frozen, its timers run before it reads answers."""
    places = Places(2)
    stuck, other = ScriptedWorker(0), ScriptedWorker(1)
    places.workers = {0: stuck, 1: other}
    for _ in range(HANGS - 1):
        stuck.gone = True
        await places.look(counts=True)
    assert (places.answering, places.serving) == ([other], [stuck, other]) and not stuck.killed
    stuck.gone = False
    await places.look()
    assert places.answering == [stuck, other]
    stuck.gone = True
    await asyncio.gather(*(places.look() for _ in range(HANGS)))  # as so many changes of the replicas do
    for look in range(HANGS):
        assert not stuck.killed and (stuck in places.answering) == (look < QUIET)
        await places.look(counts=True)
    assert stuck.killed and not other.killed


async def test_what_workers_have_on_replicas_is_added_up():
    places = Places(2)
    places.workers = {n: ScriptedWorker(n, loads={"a": [n + 1, n + 0.5]}) for n in range(2)}
    await places.look()
    assert (places.inflight("a"), places.waited("a"), places.inflight("b")) == (3, 1.5, 0)

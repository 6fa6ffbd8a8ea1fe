"""The processes of workers, one at a time, and the looks at them."""

import asyncio
import shutil
import socket

import pytest

from gateway.app import Gateway
from gateway.settings import ConfigError, load
from gateway.workers.process import GONE, HANGS, QUIET, START_SECONDS, Places, WorkerProcess
from gateway.workers.supervisor import one_workers_settings
from replicas.simulated.model import sim_model_dir

from .scripted import NOTHING, ScriptedWorker

NO_SETTINGS = {"settings": {"log_level": "info"}}  # of which a worker ends once it looks for others


async def failure_of(tmp_path, hello=NO_SETTINGS) -> str:
    """Why a worker that is told this does not start."""
    worker = await WorkerProcess.start(0, tmp_path / "socket", {})
    worker.tell(index=0, socket=str(tmp_path / "socket"), patience=0.0, **hello)
    with pytest.raises(ConfigError) as failed:
        await worker.opened(START_SECONDS)
    assert not worker.serves
    with pytest.raises(GONE):  # for whoever asks it a moment later
        await worker.ask("GET", "/worker/known", [], b"", 1.0)
    assert await worker.query("/worker/known") is None
    return str(failed.value)


async def test_a_worker_that_cannot_start_is_said_at_once(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os\nprint('hello', flush=True)\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "a worker ended with exit code 7 while it started" in await failure_of(tmp_path)


async def test_a_worker_that_only_closes_its_output_is_waited_for_no_longer(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os, time\nos.close(1)\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = await WorkerProcess.start(0, tmp_path / "socket", {})
    async with asyncio.timeout(30):
        with pytest.raises(ConfigError, match="not ready within 5 s"):
            await worker.opened(5)
    assert await worker.ended() == -9


async def test_workers_are_of_the_supervisors_own_package(tmp_path, monkeypatch):
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway/__init__.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert "exit code 1 " in await failure_of(tmp_path)


async def test_a_setting_that_only_workers_can_judge_is_said_as_by_one_gateway(tmp_path):
    model = shutil.copytree(sim_model_dir(), tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{")
    settings = load({"workers": 2, "model": str(model)}, {}).settings
    each = one_workers_settings(settings, 0, "unix:///nowhere")
    hello = {"settings": each, "secrets": (None, None), "known": NOTHING}
    with pytest.raises(ConfigError) as alone:
        Gateway(settings)
    assert await failure_of(tmp_path, hello) == str(alone.value) and "tokenizer_config.json" in str(alone.value)


async def test_a_worker_that_does_not_answer_is_not_waited_for(tmp_path):
    with socket.socket(socket.AF_UNIX) as stuck:
        worker = await WorkerProcess.start(0, tmp_path / "socket", {})
        stuck.bind(str(tmp_path / "socket"))
        stuck.listen()
        assert await worker.query("/worker/loads", 0.01) is None
        with pytest.raises(ConfigError, match="not ready within 0.01 s"):
            await worker.opened(0.01)
        assert await worker.ended() == -9


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

"""`hitherto calibrate` as a process: against a simulated engine, and against what is none."""

import argparse
import asyncio
import os
import re
import signal
import sys

import aiohttp
import pytest
from aiohttp import web

from replicas.calibrate import cli
from replicas.simulated.profile import load_profile

# Short of context, so that there is little to ask.
KNOWN = """
num_blocks: 1024
max_num_seqs: 8
max_num_batched_tokens: 512
max_model_len: 2048
request: {latency: 5, work: 1, token: 0.002}
step: {base: 3, prefill: 3, prefill_token: 0.01, attention: 2.0e-5, decode_sequence: 0.2}
"""


@pytest.fixture
async def engine(tmp_path):
    """URL of a simulated engine of the profile above."""
    file = tmp_path / "known.yaml"
    file.write_text(KNOWN)
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "replicas.simulated", "--port", "0", "--profile", str(file),
                                                   "--no-events", stderr=asyncio.subprocess.PIPE)  # fmt: skip
    async with asyncio.timeout(60):
        while not (found := re.search(rb"on (http://\S+?),", await process.stderr.readline())):
            assert process.returncode is None
    yield found[1].decode()
    process.terminate()
    await process.communicate()


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", "calibrate", *flags, preexec_fn=_heeding_interrupts,
                                                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)  # fmt: skip


def _heeding_interrupts() -> None:
    """In the child: a shell starts what runs in the background with SIGINT ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def calibrate(*flags: str) -> tuple[int, str, str]:
    process = await start(*flags)
    out, err = await asyncio.wait_for(process.communicate(), 100)
    return process.returncode, out.decode(), err.decode()


async def test_a_profile_is_written_that_an_engine_takes(engine, tmp_path):
    """How near its times are is another test's (test_known_engine): this machine may be busy."""
    out = tmp_path / "found.yaml"
    code, said, err = await calibrate(engine, "--out", str(out), "--seconds", "3", "--seed", "1")
    assert code == 0, err
    assert "will send" in said and "Use the profile with" in said
    known, found = load_profile(tmp_path / "known.yaml"), load_profile(out)
    for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs"):
        assert getattr(found, name) == getattr(known, name), name
    assert found.step.seconds(0, 0.0, 1, 64, 0.0) > 0.001 and found.request.latency + found.request.work > 0
    text = out.read_text()
    assert "reported by the engine" in text and "seen: of 64 requests 8 ran at once" in text
    assert "0.33.0+simulated" in text and "# date: 20" in text and "new prompt  " in text


async def test_interrupted_it_writes_nothing_and_leaves_nothing_behind(engine, tmp_path):
    process = await start(engine, "--out", str(tmp_path / "found.yaml"))
    async with asyncio.timeout(60):
        while b"will send" not in await process.stdout.readline():
            assert process.returncode is None
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 130 and b"nothing was written" in err
    assert [path.name for path in tmp_path.iterdir()] == ["known.yaml"]
    async with aiohttp.ClientSession() as session, asyncio.timeout(10):
        while "num_requests_running{" not in (
            page := await (await session.get(engine + "/metrics")).text()
        ) or not re.search(r"^vllm:num_requests_running\{.*\} 0\.0$", page, re.M):
            await asyncio.sleep(0.05)


async def test_an_engine_that_works_for_others_is_left_alone(engine, tmp_path):
    async with aiohttp.ClientSession() as session:
        body = {"model": "sim", "prompt": [300] * 64, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        async with session.post(engine + "/v1/completions", json=body) as response:
            await response.content.readany()
            code, _, err = await calibrate(engine, "--out", str(tmp_path / "found.yaml"))
    assert code == 1 and "serving others (1 requests)" in err and "--busy" in err


async def test_an_unknown_model(engine):
    code, _, err = await calibrate(engine, "--model", "other")
    assert code == 1 and "no model 'other'; it serves sim" in err


async def test_nobody_there_and_no_folder(tmp_path):
    code, _, err = await calibrate("http://127.0.0.1:9")
    assert code == 1 and "no engine answers at http://127.0.0.1:9" in err and "nothing listens" in err
    code, _, err = await calibrate("http://127.0.0.1:9", "--out", str(tmp_path / "no" / "x.yaml"))
    assert code == 2 and "no folder" in err


@pytest.mark.parametrize("out, says", [(".", "Is a directory"), ("/proc/x.yaml", "No such file or directory")])
async def test_what_cannot_be_written_is_refused_before_the_engine_is_asked(tmp_path, out, says):
    """/proc is a folder in which nobody can make a file, root included."""
    path = tmp_path / out
    code, _, err = await calibrate("http://127.0.0.1:9", "--out", str(path))
    assert code == 2 and err == f"hitherto calibrate: --out {path} cannot be written: {says}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kind, says", [("loop", "Too many levels of symbolic links"), ("pipe", "it is no regular file")]
)
async def test_neither_a_loop_of_links_nor_a_pipe_is_replaced(tmp_path, kind, says):
    out = tmp_path / "out"
    if kind == "loop":
        out.symlink_to(out)
    else:
        os.mkfifo(out)
    code, _, err = await calibrate("http://127.0.0.1:9", "--out", str(out))
    assert code == 2 and err == f"hitherto calibrate: --out {out} cannot be written: {says}\n"


def test_what_a_link_points_to_is_written(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "found.yaml")
    cli.check_savable(link)
    cli.save(link, "num_blocks: 1024")
    assert link.is_symlink() and (tmp_path / "found.yaml").read_text() == "num_blocks: 1024"


def test_a_profile_that_cannot_be_written_any_more_is_printed(tmp_path, monkeypatch, capsys):
    out = tmp_path / "found.yaml"

    async def calibrated(args):
        out.mkdir()  # while it measures
        return "num_blocks: 1024"

    monkeypatch.setattr(cli, "calibrate", calibrated)
    assert cli.run(argparse.Namespace(url="http://127.0.0.1:9", out=out)) == 1
    said, err = capsys.readouterr()
    assert "num_blocks: 1024" in said and f"{out} cannot be written: Is a directory; the profile is printed" in err
    assert [path.name for path in tmp_path.iterdir()] == ["found.yaml"], "nothing half written is left"


async def test_a_time_that_cannot_be_is_refused_before_an_engine_is_asked():
    code, _, err = await calibrate("http://127.0.0.1:9", "--seconds", "-1")
    assert code == 2 and "--seconds: -1 is not above zero" in err


@pytest.mark.parametrize("paths, says", [
    ({}, "is not ready"),
    ({"/v1/models": 401}, "OPENAI_API_KEY"),
    ({"/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}}, "/v1/completions answers 404"),
    ({"/v1/models": {"data": [{"id": "m"}]}, "/v1/completions": 401}, "OPENAI_API_KEY"),
])  # fmt: skip
async def test_what_is_no_engine_or_wants_a_key(serve, paths, says):
    async def handler(request):
        answer = {"/health": 200, **paths}.get(request.path, 404)
        return web.Response(status=answer) if isinstance(answer, int) else web.json_response(answer)

    paths = paths or {"/v1/models": {"data": []}}
    code, said, err = await calibrate(await serve(handler))
    assert code == 1 and says in err, err
    if "/v1/completions" in says:
        assert "does not report how many requests" in said


async def test_the_key_is_sent(serve, monkeypatch):
    seen = set()

    async def handler(request):
        seen.add(request.headers.get("authorization"))
        return web.Response(status=200 if request.path == "/health" else 404)

    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    code, _, _ = await calibrate(await serve(handler), "--model", "m")
    assert code == 1 and seen == {"Bearer sk-1"}

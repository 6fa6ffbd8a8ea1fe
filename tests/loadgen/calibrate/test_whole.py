"""`loadgen calibrate` as it is typed: against a simulated engine, and against what is none."""

import argparse
import asyncio
import re
import signal
import subprocess
import sys

import aiohttp
import pytest
from aiohttp import web
from rich.console import Console

from loadgen.calibrate import verb
from loadgen.calibrate.ask import CalibrationError, Client
from loadgen.cli import build_parser, main
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


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    file = tmp_path_factory.mktemp("calibrate") / "known.yaml"
    file.write_text(KNOWN)
    return file


@pytest.fixture(scope="module")
def engine(known):
    """URL of a simulated engine of the profile above."""
    command = [sys.executable, "-m", "replicas.simulated", "--port", "0", "--profile", str(known), "--no-events"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        while not (found := re.search(rb"on (http://\S+?),", process.stderr.readline())):
            assert process.poll() is None
        yield found[1].decode()
        process.terminate()
        process.communicate()


async def calibrate(*flags: str) -> tuple[str, str]:
    """What it says, and what it ends with: nothing where a profile was written."""
    args, console = build_parser("loadgen").parse_args(["calibrate", *flags]), Console(record=True, width=200)
    try:
        assert await verb.calibrate_verb(args, console) == 0
    except CalibrationError as error:
        return console.export_text(), str(error)
    return console.export_text(), ""


async def test_a_profile_is_written_that_an_engine_takes(engine, known, tmp_path):
    """How near its times are is another test's (test_known_engine): this machine may be busy."""
    out = tmp_path / "found.yaml"
    said, why = await calibrate(engine, "--out", str(out), "--seconds", "3", "--seed", "1")
    assert not why and "will send" in said and "Use the profile with" in said
    known, found = load_profile(known), load_profile(out)
    for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs"):
        assert getattr(found, name) == getattr(known, name), name
    assert found.step.seconds(0, 0.0, 1, 64, 0.0) > 0.001 and found.request.latency + found.request.work > 0
    text = out.read_text()
    assert "reported by the engine" in text and "seen: of 64 requests 8 ran at once" in text
    assert "0.33.0+simulated" in text and "# date: 20" in text and "new prompt  " in text


def _heeding_interrupts() -> None:
    """In the child: a shell starts what runs in the background with SIGINT ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def test_interrupted_it_writes_nothing_and_leaves_nothing_behind(engine, tmp_path):
    command = [sys.executable, "-m", "loadgen", "calibrate", engine, "--out", str(tmp_path / "found.yaml")]
    process = await asyncio.create_subprocess_exec(*command, preexec_fn=_heeding_interrupts, stdout=asyncio.subprocess.PIPE,
                                                   stderr=asyncio.subprocess.PIPE)  # fmt: skip
    async with asyncio.timeout(60):
        while b"will send" not in await process.stdout.readline():
            assert process.returncode is None
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 130 and b"nothing was written" in err
    assert not list(tmp_path.iterdir())
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
            _, why = await calibrate(engine, "--out", str(tmp_path / "found.yaml"))
    assert "serving others (1 requests)" in why and "--busy" in why


async def test_an_unknown_model(engine):
    _, why = await calibrate(engine, "--model", "other")
    assert "no model 'other'; it serves sim" in why


async def test_nobody_there():
    _, why = await calibrate("http://127.0.0.1:9")
    assert "no engine answers at http://127.0.0.1:9" in why and "nothing listens" in why


@pytest.mark.parametrize("flags, says", [
    (["http://127.0.0.1:9", "--out", "/no/x.yaml"], "--out /no/x.yaml: can't be written; name a file in a folder that exists"),
    (["ftp://x"], "'ftp://x' is not an http:// or https:// URL"),
    (["http://127.0.0.1:9", "--seconds", "-1"], "--seconds: -1 is not above zero"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused_before_an_engine_is_asked(capsys, flags, says):
    try:
        code = main(["calibrate", *flags])
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("loadgen calibrate: ") and says in err


async def test_a_profile_that_cannot_be_written_any_more_is_printed(tmp_path, monkeypatch):
    out, console = tmp_path / "found.yaml", Console(record=True, width=200)

    async def calibrated(*_):
        out.mkdir()  # while it measures
        return "num_blocks: 1024"

    monkeypatch.setattr(verb, "calibrate", calibrated)
    with pytest.raises(CalibrationError, match="cannot be written: Is a directory; the profile is printed above"):
        await verb.calibrate_verb(argparse.Namespace(out=out), console)
    assert "num_blocks: 1024" in console.export_text()


async def test_an_engine_that_compresses_its_figures_is_believed(serve):
    page = b'\nvllm:cache_config_info{block_size="32",num_gpu_blocks="1234"} 1.0\n'

    async def handler(request):
        found = web.Response(body=page) if request.path == "/metrics" else web.json_response({"data": [{"id": "m"}]})
        found.enable_compression()  # where it is asked for, as vLLM does
        return found

    async with Client(await serve(handler)) as client:
        limits = (await client.learn(None)).limits
    assert (limits.block_size, limits.num_blocks) == (32, 1234)
    assert limits.told["num_blocks"] == "reported by the engine"


@pytest.mark.parametrize("paths, says", [
    ({}, "is not ready"),
    ({"/v1/models": 401}, "OPENAI_API_KEY"),
    ({"/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}}, "/v1/completions answers 404"),
    ({"/v1/models": {"data": [{"id": "m"}]}, "/v1/completions": 401}, "OPENAI_API_KEY"),
])  # fmt: skip
async def test_what_is_no_engine_or_wants_a_key(serve, monkeypatch, paths, says):
    seen = set()

    async def handler(request):
        seen.add(request.headers.get("authorization"))
        answer = {"/health": 200, **paths}.get(request.path, 404)
        return web.Response(status=answer) if isinstance(answer, int) else web.json_response(answer)

    paths = paths or {"/v1/models": {"data": []}}
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    said, why = await calibrate(await serve(handler))
    assert says in why and seen == {"Bearer sk-1"}
    if "/v1/completions" in says:
        assert "does not report how many requests" in said

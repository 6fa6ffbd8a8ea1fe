"""The stack against a stand-in gateway: a script that answers as the admin side does."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from loadgen.drive.stack import Stack, StackFailed
from loadgen.options import BadOption

GATEWAY = """
import http.server, json, os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
file = "a file" if os.path.exists("hitherto.yaml") else "no file"
print(f"NAME is {os.environ.get('HITHERTO_NAME')}, {file}", flush=True)
calls = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global calls
        calls += 1
        states = ["ready", "ready" if calls > 3 else "starting"]
        body = json.dumps({"replicas": [{"id": str(n), "url": "http://x", "state": s} for n, s in enumerate(states)]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def stack_of(script: str, tmp_path: Path, **options) -> Stack:
    stack = Stack("least_time", 2, **options)
    stack._argv = [sys.executable, "-c", script, str(tmp_path / "pid"), str(stack.admin.port)]
    return stack


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"


async def gone(pid: int) -> None:
    async with asyncio.timeout(10):
        while alive(pid):
            await asyncio.sleep(0.01)


async def test_a_stack_is_ready_when_all_replicas_are_and_gone_afterwards_whatever_surrounds_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HITHERTO_NAME", "mine")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hitherto.yaml").write_text("replica_url: [http://127.0.0.1:1]")
    seen = []
    async with stack_of(GATEWAY, tmp_path, on_progress=seen.append) as stack:
        pid = int((tmp_path / "pid").read_text())
        assert alive(pid)
        assert seen[-1] == 2 and 1 in seen
        assert stack._log.read_text().strip() == "NAME is None, no file"
        folder = stack._log.parent
    assert not alive(pid) and not folder.exists()


def test_the_gateway_is_started_with_files_from_the_folder_in_which_they_were_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("mine.py", "my.yaml"):
        (tmp_path / file).touch()
    stack = Stack("./mine.py:Mine", 3, "my.yaml")
    said = " ".join(stack._argv[1:])
    assert said.startswith("-m gateway serve --host 127.0.0.1 --port ")
    assert said.endswith(f"--policy {tmp_path}/mine.py:Mine --launch 3 --profile {tmp_path}/my.yaml")
    assert "--cached-tokens-header" in said, "what was predicted is in the report, and nobody else is told by default"
    stack._folder.cleanup()


@pytest.mark.parametrize(
    "code, error, said", [(2, BadOption, "refuses what it was given"), (1, StackFailed, "ended with exit code 1")]
)
async def test_a_gateway_that_ends_at_once_is_explained(tmp_path, code, error, said):
    with pytest.raises(error, match=f"(?s){said}:.*in its words"):
        async with stack_of(f"import sys; print('in its words', file=sys.stderr); sys.exit({code})", tmp_path):
            pass


async def test_a_gateway_that_never_gets_ready_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("loadgen.drive.stack.READY_SECONDS", 1.0)
    script = GATEWAY.replace("calls > 3", "False")
    with pytest.raises(StackFailed, match="2 replicas were not ready within 1 s"):
        async with stack_of(script, tmp_path):
            pass
    assert not alive(int((tmp_path / "pid").read_text()))


async def test_a_gateway_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("loadgen.drive.stack.STOP_SECONDS", 0.1)
    async with stack_of("import signal; signal.signal(15, signal.SIG_IGN)\n" + GATEWAY, tmp_path):
        pid = int((tmp_path / "pid").read_text())
    assert not alive(pid)


async def test_no_gateway_outlives_a_generator_that_is_killed(tmp_path):
    parent = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from loadgen.drive.stack import Stack
async def main():
    stack = Stack("least_time", 2)
    stack._argv = [sys.executable, "-c", {GATEWAY!r}, {str(tmp_path / "pid")!r}, str(stack.admin.port)]
    async with stack:
        print("ready", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(20):
        assert await process.stdout.readline() == b"ready\n"
    pid = int((tmp_path / "pid").read_text())
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await gone(pid)

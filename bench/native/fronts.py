"""What is put between clients and engines, each on one core: ours, its peers and nginx."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contenders import PEERS_HOME
from bench.native import GATEWAY_CORE, on_core
from loadgen.drive.stack import free_ports
from replicas.simulated.model import sim_model_dir

READY_SECONDS = 60.0
HELLO = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'

NGINX = """worker_processes 1; daemon off; pid {tmp}/pid; error_log {tmp}/err; worker_rlimit_nofile 20000;
events {{ worker_connections 20000; }}
http {{ access_log off; client_max_body_size 64m; client_body_buffer_size 1m; client_body_temp_path {tmp}/b; keepalive_requests 1000000;
 proxy_temp_path {tmp}/p; fastcgi_temp_path {tmp}/f; uwsgi_temp_path {tmp}/u; scgi_temp_path {tmp}/s;
 keepalive_timeout 600s;
 upstream e {{ {servers} keepalive 256; keepalive_requests 1000000; }}
 server {{ listen 127.0.0.1:{port} backlog=4096; location / {{ proxy_pass http://e; proxy_http_version 1.1;
  proxy_set_header Connection ""; proxy_buffering off; }} }} }}
"""
ROUTER = "--host 127.0.0.1 --port {port} --policy cache_aware --prometheus-port {aux} --worker-urls {urls}"
COMMANDS = {
    "hitherto": f"{sys.executable} -m gateway serve --host 127.0.0.1 --port {{port}} --admin-port {{aux}} "
    "--log-level error --model {model} --replica-url {urls}",
    "sglang-router": f"{PEERS_HOME}/sglang/bin/sglang-router launch {ROUTER}",
    "smg": f"{PEERS_HOME}/smg/bin/smg launch {ROUTER}",
    "vllm-router": f"{PEERS_HOME}/vllm/bin/vllm-router {ROUTER}",
    "nginx": "nginx -c {tmp}/nginx.conf",
}


@dataclass(frozen=True, slots=True)
class Used:
    """CPU of a process and all below it. `total`: the scheduler's own count, in seconds; `user` and `system`: how ticks
    fell."""

    total: float
    user: float
    system: float

    def __sub__(self, before: Used) -> Used:
        return Used(self.total - before.total, self.user - before.user, self.system - before.system)


class Front:
    def __init__(self, name: str, port: int, aux: int, pid: int):
        self.name, self.port, self.aux, self.pid = name, port, aux, pid

    def used(self) -> Used:
        total = user = system = 0.0
        for pid in self._tree():
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    total += int((task / "schedstat").read_text().split()[0]) / 1e9
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                user, system = user + int(fields[11]), system + int(fields[12])
        tick = os.sysconf("SC_CLK_TCK")
        return Used(total, user / tick, system / tick)

    def rss(self) -> int:
        """Bytes of memory, of all its processes, that are not of files."""
        kilobytes = 0
        for pid in self._tree():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
        return kilobytes * 1024

    def _tree(self) -> list[int]:
        found, todo = [], [self.pid]
        while todo:
            found.append(pid := todo.pop())
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    todo += map(int, (task / "children").read_text().split())
        return found


def available(names: Sequence[str]) -> list[str]:
    """Those that can be started here; says which can't."""
    there = []
    for name in names:
        if shutil.which(program := COMMANDS[name].split()[0]):
            there.append(name)
        else:
            print(f"{name}: left out: no {program}")
    return there


@contextlib.contextmanager
def running(name: str, engines: Sequence[int]) -> Iterator[Front]:
    """The front before the engines at these ports, once it has answered. SystemExit if it does not come up."""
    port, aux = free_ports(2)
    with tempfile.TemporaryDirectory() as tmp:
        Path(tmp, "nginx.conf").write_text(
            NGINX.format(tmp=tmp, port=port, servers=" ".join(f"server 127.0.0.1:{p};" for p in engines))
        )
        urls = " ".join(f"http://127.0.0.1:{p}" for p in engines)
        command = COMMANDS[name].format(port=port, aux=aux, urls=urls, model=sim_model_dir(), tmp=tmp)
        with Path(tmp, "log").open("wb") as log:
            env = {key: value for key, value in os.environ.items() if not key.startswith("HITHERTO_")}
            process = subprocess.Popen(
                command.split(),
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                preexec_fn=on_core(GATEWAY_CORE),
            )
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{name} did not come up:\n{Path(tmp, 'log').read_text(errors='replace')[-1500:]}")
                time.sleep(0.2)
            yield Front(name, port, aux, process.pid)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _answers(port: int) -> bool:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", HELLO, {"content-type": "application/json"}
    )
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=2) as answer:
        return answer.status == 200
    return False

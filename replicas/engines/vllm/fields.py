"""The fields of a vLLM profile: their names, types and ranges, each by itself.

A field that is a flag of `vllm serve` has that flag's name with underscores. What fields must not say together is in
`rules`.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from replicas.spelling import closest
from replicas.tables import Table

# Attention backend -> what its block size must be a multiple of (1: anything). `--attention-backend` takes any string
# and an unknown one fails only when the model is there, so names are checked here.
ATTENTION_BACKENDS = {
    "FLASH_ATTN": 16, "TRITON_ATTN": 16, "FLASHINFER": 16, "FLEX_ATTENTION": 16, "CPU_ATTN": 16, "TURBOQUANT": 16,
    "FLASHMLA": 64, "FLASHMLA_SPARSE": 64, "FLASHINFER_MLA": 32, "FLASHINFER_MLA_SPARSE": 32, "TRITON_MLA": 16,
    "CUTLASS_MLA": 128, "FLASH_ATTN_MLA": 16, "FLASH_ATTN_MLA_SPARSE": 64, "TOKENSPEED_MLA": 32, "CPU_MLA": 16,
    "AMX_MLA": 32, "ROCM_ATTN": 1, "ROCM_AITER_FA": 1, "ROCM_AITER_UNIFIED_ATTN": 16, "ROCM_AITER_MLA": 1,
    "ROCM_AITER_TRITON_MLA": 1, "ROCM_AITER_MLA_SPARSE": 1, "XPU_MLA_SPARSE": 1, "FLASH_ATTN_DIFFKV": 16,
    "TRITON_ATTN_DIFFKV": 16, "FLASHMLA_SPARSE_DSV4": 1, "FLASHINFER_MLA_SPARSE_DSV4": 1, "HPC_ATTN": 64, "B12X": 1,
}  # fmt: skip


def unknown_value(value: object, known: Iterable[str]) -> object:
    """`value` if it is known. Raises ValueError with what was probably meant."""
    names = list(known)
    if value is None or value in names:
        return value
    near = closest(str(value).upper(), names)
    hint = f"did you mean {near!r}? " if near else ""
    raise ValueError(f"{value!r} is not known; {hint}One that only your vLLM knows goes to extra_args")


KvCacheDtype = Literal[
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla", "nvfp4",
    "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
]  # fmt: skip
Backend = Annotated[str, BeforeValidator(lambda name: unknown_value(name, ATTENTION_BACKENDS))]
Bytes = PositiveInt | Annotated[str, Field(pattern=r"^(\d+[kKmMgGtT]?|\d+\.\d+[kmgt])$")]  # 8G is binary, 1.5g decimal


class Speculative(Table):
    """`--speculative-config`"""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: PositiveInt | None = None
    prompt_lookup_max: PositiveInt | None = None
    prompt_lookup_min: PositiveInt | None = None
    draft_tensor_parallel_size: PositiveInt | None = None
    max_model_len: PositiveInt | None = None
    quantization: str | None = None


class KvTransfer(Table):
    """`--kv-transfer-config`"""

    kv_connector: str
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_buffer_device: Literal["cuda", "cpu", "xpu"] | None = None
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict = Field({})
    kv_load_failure_policy: Literal["recompute", "fail"] | None = None


class Flags(Table):
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
    lora_modules: dict[str, str] = Field({})
    max_loras: PositiveInt | None = None
    max_lora_rank: PositiveInt | None = None
    max_cpu_loras: PositiveInt | None = None


class Fields(Flags):
    """All fields: the flags, and how the engine is started."""

    engine: Literal["vllm"]
    description: str = ""
    executable: str = Field("vllm", description="a path, or a name on PATH or beside the gateway's own Python")
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="auto: GPUs if there are any, else `cpu.yaml`'s fields"
    )
    role: Literal["prefill", "decode", "both"] = Field("both", description="which part of a request it is for")
    kv_events: bool = True
    env: dict[str, str] = Field({})
    extra_args: list[str] = Field([])
    start_timeout_s: float = Field(900.0, gt=0)

    @property
    def world(self) -> int:
        """Devices of one replica. Decode context parallelism uses those of tensor parallelism again."""
        per_rank = self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size
        return per_rank * self.data_parallel_size

"""The fields of a vLLM launch profile.

Every flag of `vllm serve` can be a field: the flag's name with underscores. Most are passed on unchanged; if one is
wrong, vLLM says so in its log, where `replicas.launch.exits` finds the message. Declared here are only the flags that
the gateway reads itself, and the fields that say how the engine is started.
"""

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class PassesOn(BaseModel):
    """A pydantic model whose declared fields the gateway reads; all other keys are passed on to vLLM unread."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @property
    def passed_on(self) -> dict[str, Any]:
        """The fields that the gateway does not read."""
        return self.model_extra or {}


class KvTransfer(PassesOn):
    """The value of `--kv-transfer-config`: the connector that moves KV caches between engines or tiers."""

    kv_connector: str
    kv_role: str = "kv_both"
    kv_connector_extra_config: dict[str, Any] = {}


class Flags(PassesOn):
    """The flags of `vllm serve` that the gateway reads. None: the engine's own default."""

    # devices and ranks
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    prefill_context_parallel_size: PositiveInt = 1
    decode_context_parallel_size: PositiveInt = 1
    gpu_memory_utilization: float | None = None
    # what decides which engines can exchange a prompt's cache, and how much of it is found again
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    block_size: PositiveInt | None = None
    enable_prefix_caching: bool = True
    speculative_config: dict[str, Any] | None = None
    spec_method: str | None = None
    spec_model: str | None = None
    kv_transfer_config: KvTransfer | None = None
    kv_offloading_size: float | None = None
    kv_offloading_backend: str | None = None
    # adapters: name -> folder
    enable_lora: bool = False
    lora_modules: dict[str, str] = {}


SHORT = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size", "-pcp": "--prefill-context-parallel-size", "-sc": "--speculative-config",
}  # fmt: skip
# Flags that a profile may not pass on unread, each with what to do instead. Otherwise the gateway would assume other
# blocks, ranks and events than the engine has, and so predict wrong cache hits, and nobody would notice.
OURS = {
    "--config": "write its fields into the profile, where the gateway reads them",
    **dict.fromkeys(
        ("--host", "--port", "--model", "--served-model-name", "--kv-events-config", "--enable-prompt-tokens-details"),
        "the gateway sets it",
    ),
    **{
        "--" + name.replace("_", "-"): f"write it as the field {name}, which the gateway reads"
        for name in Flags.model_fields
    },
}


class Fields(Flags):
    """All fields of a vLLM launch profile: the flags, and the fields that say how the engine is started."""

    engine: Literal["vllm"]
    description: str = ""
    executable: str = Field("vllm", description="a path, or a name on PATH or beside the gateway's own Python")
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: GPUs if there are any, else `cpu.yaml`'s fields
    role: Literal["prefill", "decode", "both"] = Field("both", description="which part of a request it is for")
    kv_events: bool = True
    env: dict[str, str] = {}
    extra_args: list[str] = []
    start_timeout_s: float = Field(900.0, gt=0)

    @model_validator(mode="after")
    def _leaves_ours(self) -> Self:
        if wrong := [*self._ours()]:
            raise ValueError("; ".join(wrong))
        return self

    def _ours(self) -> Iterator[str]:
        """Yield a message for each flag that a profile may not pass on to vLLM, because the gateway sets or reads it.

        vLLM accepts abbreviations of a flag, and `--flag.key` for one key of its value, so these are refused too.
        """
        fields = ["--" + name.replace("_", "-") for name in self.passed_on]
        for word in (*fields, *(word for word in self.extra_args if word.startswith("-"))):
            flag = word.partition("=")[0].partition(".")[0].replace("_", "-").replace("--no-", "--", 1)
            flag = SHORT.get(flag, flag)
            meant = [one for one in OURS if one == flag or (len(flag) > 3 and one.startswith(flag))]
            if meant:
                yield f"{word}: {OURS[meant[0]]}"
        if "CUDA_VISIBLE_DEVICES" in self.env:
            yield "env CUDA_VISIBLE_DEVICES would give every replica the same devices: set it for the gateway, which shares them out"

    @property
    def publishes(self) -> bool:
        """Whether the engines publish KV events; without prefix caching there are no events."""
        return self.kv_events and self.enable_prefix_caching

    @property
    def world(self) -> int:
        """The number of GPUs of one engine.

        Decode context parallelism adds none, as it uses the GPUs of tensor parallelism.
        """
        per_rank = self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size
        return per_rank * self.data_parallel_size

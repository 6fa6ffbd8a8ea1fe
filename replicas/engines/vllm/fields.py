"""The fields of a vLLM launch profile.

Every flag of `vllm serve` can be a field: the flag's name with underscores. Most are passed on unchanged; if one is
wrong, vLLM says so in its log, where `replicas.launch.exits` finds the message. Declared here are only the flags that
the gateway reads itself, and the fields that say how the engine is started.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, model_validator

from replicas.yaml_text import NO_VALUE


def _given(value: Any) -> Any:
    if value is None:
        raise ValueError(NO_VALUE)
    return value


class PassesOn(BaseModel):
    """A mapping with some keys that the gateway reads, and any other keys, which are passed on to vLLM."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_given)]]

    @property
    def passed_on(self) -> dict[str, Any]:
        """The fields that the gateway does not read."""
        return self.__pydantic_extra__


class KvTransfer(PassesOn):
    """The value of `--kv-transfer-config`."""

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
# A profile may not give these flags: they would make the engine unreachable, or change what the gateway sets.
OURS = {
    "--host": "the gateway chooses the address", "--port": "the gateway chooses a free port",
    "--uds": "the gateway talks TCP to its engines", "--root-path": "the gateway expects the API at the root",
    "--model": "it comes from the gateway's --model", "--served-model-name": "it comes from the gateway's --served-model-name",
    "--kv-events-config": "the gateway sets the endpoints; `kv_events: false` turns events off",
    "--enable-prompt-tokens-details": "the gateway sets it: it compares its predictions with them",
    "--api-key": "the gateway's own probes carry no key, and the port is on the loopback address",
    "--ssl-keyfile": "the gateway speaks plain HTTP to its engines", "--ssl-certfile": "the gateway speaks plain HTTP to its engines",
    "--headless": "an engine without an API cannot be routed to", "--grpc": "the gateway speaks HTTP",
    "--config": "write its fields into the profile, where the gateway reads them",
    **{"--" + name.replace("_", "-"): f"write it as the field {name}, which the gateway reads" for name in Flags.model_fields},
}  # fmt: skip


class Fields(Flags):
    """All fields of a vLLM launch profile: the flags, and the fields that say how the engine is started."""

    engine: Literal["vllm"]
    description: str = ""
    executable: str = Field("vllm", description="a path, or a name on PATH or beside the gateway's own Python")
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="auto: GPUs if there are any, else `cpu.yaml`'s fields"
    )
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
        """Yield a message for each flag that a profile may not give.

        vLLM accepts abbreviations of a flag, and `--flag.key` for one key of its value, so these are refused too. A
        passed-on field is also refused if it abbreviates a field of this class that is no flag of vLLM.
        """
        fields = {"--" + name.replace("_", "-"): f"write it as the field {name}" for name in Fields.model_fields}
        given = [(name, "--" + name.replace("_", "-"), fields | OURS) for name in self.passed_on]
        given += [(f"extra_args: {word}", word, OURS) for word in self.extra_args if word[:1] == "-"]
        for place, word, known in given:
            flag = word.partition("=")[0].partition(".")[0].replace("_", "-").replace("--no-", "--", 1)
            flag = SHORT.get(flag, flag)
            longer = (one for one in known if len(flag) > 3 and one.startswith(flag))
            ours = flag if flag in OURS else next(longer, None)
            if ours is not None:
                yield f"{place}: {known[ours]}"
        if "CUDA_VISIBLE_DEVICES" in self.env:
            yield "env CUDA_VISIBLE_DEVICES would give every replica the same devices: set it for the gateway, which shares them out"

    @property
    def publishes(self) -> bool:
        """Whether the engines publish KV events; without prefix caching there are no events."""
        return self.kv_events and self.enable_prefix_caching

    @property
    def world(self) -> int:
        """The number of devices of one engine; decode context parallelism uses the devices of tensor parallelism."""
        per_rank = self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size
        return per_rank * self.data_parallel_size

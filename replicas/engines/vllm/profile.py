"""The launch profile of `vllm serve`: one field for each flag, named like the flag with underscores.

Fields become flags by a rule, not by a table: `max_model_len: 8192` becomes `--max-model-len 8192`, a false switch
becomes `--no-...`, a mapping becomes JSON. The gateway itself sets the engine's addresses and the model's name.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from replicas.engines.vllm.fields import Fields, Flags, KvTransfer
from replicas.launch import devices
from replicas.launch.command import Command, LaunchProfile, Model, Ports, ProfileError
from replicas.pairing import Traits

QUIET = "/health,/metrics,/v1/models,/version,/kv_event_sources"  # probed every second, so kept out of the log
DESCRIBED = {"self_describing_kv_events": True}
CPU = Path(__file__).parents[2] / "profiles" / "cpu.yaml"


# The transports of NIXL's UCX: RDMA if available, else TCP; zero-copy from 16 KiB on, and small messages over one rail.
# Without a list it also tries transports for which vLLM's memory is not registered.
UCX_GPU = {"UCX_TLS": "rc,rdmacm,cuda_copy,cuda_ipc,tcp", "UCX_RNDV_THRESH": "16384", "UCX_MAX_EAGER_RAILS": "1"}
UCX_CPU = {"UCX_TLS": "tcp,self,sm,cma"}
# The KV connectors that the gateway supports: those with which the decoder fetches the cache, rather than the prefiller
# pushing it. By vLLM's name, the key in `replicas.engines.TRANSFERS`. Read in 0.32.0
# (`distributed/kv_transfer/kv_connector/v1`).
CONNECTORS = {"NixlConnector": "nixl", "NixlPullConnector": "nixl", "MooncakeConnector": "mooncake"}
SEVERAL = "MultiConnector"
# Speculators that read the model's hidden states and have a cache of their own.
WITH_HIDDEN_STATES = ("eagle", "eagle3", "mtp", "dflash", "dspark")
# LMCache keeps a cache that was pushed to a decoder until the decoder asks for it, and reports its arrival to one fixed
# address: so no request can be given up, or moved to another decoder (docs/disaggregation.md, "Limits").
BESIDE_LMCACHE = (
    "use NixlConnector to move caches; LMCache can go on offloading behind it, as the second of the `connectors` of a "
    f"{SEVERAL} (docs/disaggregation.md)"
)


class VllmProfile(Fields, LaunchProfile):
    """A launch profile of vLLM: the fields, and the command line and environment that they give an engine."""

    @property
    def ranks(self) -> int:
        return self.data_parallel_size

    @property
    def connectors(self) -> list[str]:
        """The names of the connectors that the engines are started with.

        A MultiConnector is replaced by its parts. If `kv_offloading_size` is set, vLLM uses the offloading connector in
        place of any other.
        """
        config = self.kv_transfer_config
        if self.kv_offloading_size is not None:
            return ["LMCacheMPConnector" if self.kv_offloading_backend == "lmcache" else "OffloadingConnector"]
        if config is None:
            return []
        if config.kv_connector != SEVERAL:
            return [config.kv_connector]
        inner = config.kv_connector_extra_config.get("connectors")
        parts = inner if isinstance(inner, list) else []
        return [str(one.get("kv_connector")) for one in parts if isinstance(one, dict)]

    @property
    def transfer(self) -> str:
        return next((CONNECTORS[name] for name in self.connectors if name in CONNECTORS), "")

    @property
    def no_transfer(self) -> str:
        if self.kv_transfer_config is None:
            remedy = "add `kv_transfer_config: {kv_connector: NixlConnector}` to the profile"
            return f"its engines pass no cache on: {remedy}"
        if self.transfer:
            return ""
        has = ", ".join(self.connectors) or f"{SEVERAL} without connectors"
        said = f"the gateway moves caches by none but {', '.join(CONNECTORS)}, and its kv_connector is {has}"
        return f"{said}: {BESIDE_LMCACHE}" if "LMCache" in has else said

    def bootstrap(self, ports: Ports) -> int:
        return ports.side if self.transfer == "mooncake" else 0

    @property
    def traits(self) -> Traits:
        speculator = {name: one for name, one in sorted(self._speculator.items()) if name != "num_speculative_tokens"}
        return Traits(
            dtype=None if self.dtype == "auto" else self.dtype,
            kv_cache_dtype=None if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
            attention_backend=self.attention_backend,
            speculative_config=str(speculator) if self.drops_block else None,
            block_size=self.block_size,
        )

    @property
    def context_parallel(self) -> int:
        return self.decode_context_parallel_size

    @property
    def drops_block(self) -> bool | None:
        """Whether the engines recompute the last block of each cache hit, as some speculators require.

        Speculators that read the model's hidden states require it. The profile's method of speculative decoding is
        compared by its end, so that deepseek_mtp counts as mtp. The result is None if the profile names no method: the
        model's files, or flags that the gateway does not read, may still give the engine a speculator.
        """
        method = self._speculator.get("method")
        return str(method).endswith(WITH_HIDDEN_STATES) if method else None

    @property
    def _speculator(self) -> dict[str, Any]:
        """The settings of speculative decoding, by vLLM's names: from `speculative_config` and from separate flags."""
        flags = {"method": self.spec_method, "model": self.spec_model}
        settings = {name.replace("-", "_"): value for name, value in (self.speculative_config or {}).items()}
        return settings | {name: value for name, value in flags.items() if value is not None}

    def place(self, count: int, used: Sequence[str] = ()) -> tuple[Self, list[dict[str, str]]]:
        """Assign devices of this machine to `count` engines.

        Returns the profile, adapted to this machine (for example to one without GPUs), and the environment variables of
        each engine. `used`: devices that are taken already. Raises ProfileError.
        """
        found = [] if self.device == "cpu" else devices.find()
        if self.device == "cuda" or found:
            share = int(1 / (self.gpu_memory_utilization or 1))
            given = devices.assign(found, self.world, count, share, used)
            return self, [devices.environment(ids) for ids in given]
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
        return self.on_cpu(), [threads] * count

    def on_cpu(self) -> Self:
        """Return this profile for a machine without GPUs; fields that it does not set are taken from `cpu.yaml`."""
        if self.device == "cpu":
            return self
        needs = yaml.safe_load(CPU.read_text())
        mine = self.model_dump(exclude_unset=True, exclude={"gpu_memory_utilization"})
        return type(self).model_validate({**needs, **mine, "device": "cpu", "env": {**needs["env"], **self.env}})

    def command(self, host: str, ports: Ports, model: Model) -> Command:
        if model.directory is None:
            raise ProfileError("vLLM needs a model: give --model NAME_OR_FOLDER")
        argv = [find_executable(self.executable), "serve", *weights(model.directory), "--host", host]
        argv += ["--port", str(ports.http)]
        if model.served_name:
            argv += ["--served-model-name", model.served_name]
        argv += ["--enable-prompt-tokens-details", "--disable-access-log-for-endpoints", QUIET, *self.flags()]
        if self.publishes:
            # `*` makes vLLM bind the port rather than connect to it; data-parallel rank r adds r to both ports.
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{ports.events}"}
            argv += ["--kv-events-config", json.dumps(events | {"replay_endpoint": f"tcp://*:{ports.replay}"})]
        return Command(argv + self.extra_args, self._side_channel(host, ports) | self.env)

    def _side_channel(self, host: str, ports: Ports) -> dict[str, str]:
        """Return the environment variables for the port at which other engines ask for KV caches; {} without transfers.

        With NIXL, data-parallel rank r listens on the port `ports.side` + r. With Mooncake, one server at `ports.side`
        serves all ranks. PYTHONHASHSEED is set too, so that all engines hash blocks alike.
        """
        if not self.transfer:
            return {}
        side = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(ports.side)}
        if self.transfer == "nixl":
            side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side)}
            side |= UCX_CPU if self.device == "cpu" else UCX_GPU
        return side | {"PYTHONHASHSEED": "0"}

    def flags(self) -> list[str]:
        """Return the command-line flags for the profile's fields; fields that have vLLM's default give no flag."""
        read = {name: getattr(self, name) for name in Flags.model_fields} | {"kv_transfer_config": self._transfer()}
        defaults = {name: field.default for name, field in Flags.model_fields.items()}
        del defaults["enable_prefix_caching"]  # it is on the command line in any case
        argv: list[str] = []
        for name, value in (read | self.passed_on).items():
            if name not in defaults or value != defaults[name]:
                argv += _flag("--" + name.replace("_", "-"), value)
        return ["--enable-lora", *argv] if self.lora_modules and not self.enable_lora else argv

    def _transfer(self) -> KvTransfer | dict[str, Any] | None:
        """Return the value of `--kv-transfer-config`.

        If the engines publish KV events, vLLM's own offloading connector gets the setting `self_describing_kv_events`:
        without it, events about copies in host memory do not report all of a chunk's tokens. Versions that do not know
        the setting ignore it. With `--kv-offloading-size`, vLLM adds the connector's name to this value itself.
        """
        given = self.kv_transfer_config
        if not self.publishes:
            return given
        if given is None:
            native = self.kv_offloading_size and self.kv_offloading_backend in (None, "native")
            return {"kv_connector_extra_config": DESCRIBED} if native else None
        if given.kv_connector != "OffloadingConnector":
            return given
        return given.model_copy(update={"kv_connector_extra_config": DESCRIBED | given.kv_connector_extra_config})


def _flag(flag: str, value: Any) -> list[str]:
    if isinstance(value, KvTransfer):  # vLLM requires the role
        value = value.model_dump(exclude_defaults=True) | {"kv_role": value.kv_role}
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if flag == "--lora-modules":
        return [flag, *(f"{name}={path}" for name, path in value.items())]
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, str(value)]


def find_executable(name: str) -> str:
    """Return a command's path on PATH, else next to this process's Python; else return `name` unchanged."""
    name = os.path.expanduser(name)
    beside = Path(sys.executable).parent / name  # an absolute name stays as it is
    return shutil.which(name) or (str(beside) if beside.is_file() else name)


def weights(directory: Path) -> list[str]:
    """Return vLLM's arguments for the model: its folder, or the name and revision of a Hugging Face model.

    A folder (snapshot) in the Hugging Face cache may have only the tokenizer. With the name and revision in its place,
    vLLM fetches the rest.
    """
    kept, repo = directory.parent.name, directory.parent.parent.name
    if kept == "snapshots" and repo.startswith("models--"):
        return [repo.removeprefix("models--").replace("--", "/"), "--revision", directory.name]
    return [str(directory)]

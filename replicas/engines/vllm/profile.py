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

from replicas.engines.vllm.connectors import drops_block, environment, no_transfer, traits, transfer_of
from replicas.engines.vllm.fields import Fields, Flags, KvTransfer
from replicas.launch import devices
from replicas.launch.command import Command, LaunchProfile, Model, Ports, ProfileError
from replicas.pairing import Traits

QUIET = "/health,/metrics,/v1/models,/version,/kv_event_sources"  # probed every second, so kept out of the log
DESCRIBED = {"self_describing_kv_events": True}
CPU = Path(__file__).parents[2] / "profiles" / "cpu.yaml"


class VllmProfile(Fields, LaunchProfile):
    """A launch profile of vLLM: the fields, and the command line and environment that they give an engine."""

    @property
    def ranks(self) -> int:
        return self.data_parallel_size

    @property
    def no_transfer(self) -> str:
        return no_transfer(self)

    @property
    def transfer(self) -> str:
        return transfer_of(self)

    def bootstrap(self, ports: Ports) -> int:
        return ports.side if self.transfer == "mooncake" else 0

    @property
    def traits(self) -> Traits:
        return traits(self)

    @property
    def context_parallel(self) -> int:
        return self.decode_context_parallel_size

    @property
    def drops_block(self) -> bool | None:
        return drops_block(self)

    def place(self, count: int, used: Sequence[str] = ()) -> tuple[Self, list[dict[str, str]]]:
        """Return the profile as this machine can run it, and the environment variables of each of `count` engines.

        `used`: devices that are taken already. Raises ProfileError.
        """
        found = [] if self.device == "cpu" else devices.find()
        if self.device == "cuda" or found:
            share = int(1 / (self.gpu_memory_utilization or 1))
            given = devices.assign(found, self.world, count, share, used)
            return self, [devices.environment(ids) for ids in given]
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
        return self.on_cpu(), [threads] * count

    def on_cpu(self) -> Self:
        """Return this profile for a machine without GPUs: fields that it does not set are those of `cpu.yaml`."""
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
        env = dict(self.env)
        if self.publishes:
            # `*` makes vLLM bind the port rather than connect to it; data-parallel rank r adds r to both ports.
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{ports.events}"}
            argv += ["--kv-events-config", json.dumps(events | {"replay_endpoint": f"tcp://*:{ports.replay}"})]
        if self.transfer:
            env = environment(self.transfer, host, ports, self.device == "cpu") | env
        return Command(argv + self.extra_args, env)

    def flags(self) -> list[str]:
        """Return the flags on the command line that the profile's fields become."""
        read = {name: getattr(self, name) for name in Flags.model_fields} | {"kv_transfer_config": self._transfer()}
        defaults = {
            name: field.default for name, field in Flags.model_fields.items() if name != "enable_prefix_caching"
        }
        argv: list[str] = []
        for name, value in (read | self.passed_on).items():
            if name not in defaults or value != defaults[name]:
                argv += _flag("--" + name.replace("_", "-"), value)
        return ["--enable-lora", *argv] if self.lora_modules and not self.enable_lora else argv

    def _transfer(self) -> KvTransfer | dict[str, Any] | None:
        """Return the value of `--kv-transfer-config`.

        If the engines publish KV events, the setting DESCRIBED is added for vLLM's own offloading connector: without
        it, events about copies in host memory do not report all of a chunk's tokens. Versions that do not know the
        setting ignore it. `--kv-offloading-size` makes vLLM add the connector's name to this value.
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
    """Return a command's path as the shell finds it, else next to this process's Python, else the name unchanged."""
    name = os.path.expanduser(name)
    beside = Path(sys.executable).parent / name  # an absolute name stays as it is
    return shutil.which(name) or (str(beside) if beside.is_file() else name)


def weights(directory: Path) -> list[str]:
    """Return vLLM's arguments for the model.

    They are the folder. For a snapshot in the Hugging Face cache, which may have only the tokenizer, they are the
    model's name and revision, so that vLLM fetches the rest.
    """
    kept, repo = directory.parent.name, directory.parent.parent.name
    if kept == "snapshots" and repo.startswith("models--"):
        return [repo.removeprefix("models--").replace("--", "/"), "--revision", directory.name]
    return [str(directory)]

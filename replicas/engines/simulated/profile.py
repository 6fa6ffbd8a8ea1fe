"""The launch profile of `python -m replicas.simulated`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from replicas.event_source import EventSource
from replicas.launch.command import Command, Model, Ports
from replicas.pairing import Traits
from replicas.tables import Table


class SimProfile(Table):
    """The fields of a profile of the simulated engine."""

    engine: Literal["sim"]
    description: str = ""
    timing: str = Field("gpu-8b", description="timing profile of the simulated engine, name or file")
    speedup: float = Field(1.0, gt=0)
    num_blocks: int | None = Field(None, gt=0)
    block_size: int | None = Field(None, gt=0)
    kv_events: bool = True
    cached_tokens: bool = True
    role: Literal["prefill", "decode", "both"] = "both"
    kv_connector: bool | Literal["mooncake"] = Field(
        False, description="pass prompts' caches on to other simulated engines, as NIXL (true) or Mooncake do"
    )
    lora: list[str] = Field([])
    seed: int | None = None
    extra_args: list[str] = Field([])
    env: dict[str, str] = Field({})
    start_timeout_s: float = Field(120.0, gt=0)

    @property
    def own_model(self) -> str:
        return "sim"

    @property
    def ranks(self) -> int:
        return 1

    @property
    def no_transfer(self) -> str:
        connects = self.kv_connector or "--kv-connector" in self.extra_args
        return (
            ""
            if connects
            else "its engines pass no cache on: add `kv_connector: true` to the profile, or take `pd-sim`"
        )

    @property
    def transfer(self) -> str:
        return self.kv_connector if isinstance(self.kv_connector, str) else ""

    def bootstrap(self, ports: Ports) -> int:
        return ports.http if self.transfer else 0  # it is found where it answers requests

    @property
    def traits(self) -> Traits:
        return Traits()

    @property
    def context_parallel(self) -> int:
        return 1

    @property
    def drops_block(self) -> bool | None:
        return None

    def unlike(self, decoder: Self) -> list[str]:
        if self.transfer == decoder.transfer:
            return []  # the caches that move are given in tokens
        return [
            f"kv_connector is {self.kv_connector} in one and {decoder.kv_connector} in the other: give both the same"
        ]

    def place(self, count: int, used: Sequence[str] = ()) -> tuple[Self, list[dict[str, str]]]:
        """Return the profile, and an empty environment for each engine, as a simulated engine needs no devices."""
        return self, [{}] * count

    def command(self, host: str, ports: Ports, model: Model) -> Command:
        argv = [sys.executable, "-m", "replicas.simulated", "--host", host, "--port", str(ports.http)]
        argv += ["--profile", self.timing]
        if model.directory:
            argv += ["--model", str(model.directory)]
        if model.served_name:
            argv += ["--served-model-name", model.served_name]
        if self.speedup != 1:
            argv += ["--speedup", str(self.speedup)]
        if self.num_blocks:
            argv += ["--num-blocks", str(self.num_blocks)]
        if self.block_size:
            argv += ["--block-size", str(self.block_size)]
        if self.seed is not None:
            argv += ["--seed", str(self.seed)]
        if self.kv_events:
            argv += ["--events-port", str(ports.events), "--replay-port", str(ports.replay)]
        else:
            argv += ["--no-events"]
        if not self.cached_tokens:
            argv += ["--no-cached-tokens"]
        if self.kv_connector:
            argv += ["--kv-connector", *filter(None, [self.transfer])]
        for name in self.lora:
            argv += ["--lora", name]
        return Command(argv + self.extra_args, _with_import_path(self.env))

    def events(self, host: str, ports: Ports) -> EventSource | None:
        """Return where the engine publishes KV events, or None if it publishes none."""
        if not self.kv_events:
            return None
        return EventSource(f"tcp://{host}:{ports.events}", f"tcp://{host}:{ports.replay}", "")


def _with_import_path(env: dict[str, str]) -> dict[str, str]:
    """Return the environment variables, with a PYTHONPATH that finds this package from any working directory."""
    here = str(Path(__file__).parents[3])
    given = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {"PYTHONUNBUFFERED": "1", **env, "PYTHONPATH": f"{here}{os.pathsep}{given}" if given else here}

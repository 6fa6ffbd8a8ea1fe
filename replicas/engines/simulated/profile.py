"""The launch profile of `python -m replicas.simulated`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field

from replicas.launch.command import Command, LaunchProfile, Model, Ports
from replicas.tables import Table


class SimProfile(Table, LaunchProfile):
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
    kv_connector: bool | Literal["mooncake"] = Field(False, description="pass caches on as NIXL (true) or Mooncake do")
    lora: list[str] = Field([])
    seed: int | None = None
    extra_args: list[str] = Field([])
    env: dict[str, str] = Field({})
    start_timeout_s: float = Field(120.0, gt=0)

    own_model: ClassVar[str | None] = "sim"

    @property
    def publishes(self) -> bool:
        return self.kv_events

    @property
    def no_transfer(self) -> str:
        connects = self.kv_connector or "--kv-connector" in self.extra_args
        remedy = "add `kv_connector: true` to the profile, or take `pd-sim`"
        return "" if connects else f"its engines pass no cache on: {remedy}"

    @property
    def transfer(self) -> str:
        return self.kv_connector if isinstance(self.kv_connector, str) else ""

    def bootstrap(self, ports: Ports) -> int:
        return ports.http if self.transfer else 0  # it is found where it answers requests

    def place(self, count: int, used: Sequence[str] = ()) -> tuple[Self, list[dict[str, str]]]:
        """Return the profile, and an empty environment for each engine, as a simulated engine needs no devices."""
        return self, [{}] * count

    def command(self, host: str, ports: Ports, model: Model) -> Command:
        options = {
            "--host": host,
            "--port": ports.http,
            "--profile": self.timing,
            "--model": model.directory,
            "--served-model-name": model.served_name,
            "--speedup": self.speedup if self.speedup != 1 else None,
            "--num-blocks": self.num_blocks,
            "--block-size": self.block_size,
            "--seed": self.seed,
            "--events-port": ports.events if self.kv_events else None,
            "--replay-port": ports.replay if self.kv_events else None,
        }
        argv = [sys.executable, "-m", "replicas.simulated"]
        for flag, value in options.items():
            argv += [flag, str(value)] if value is not None else []
        argv += ["--no-events"] * (not self.kv_events) + ["--no-cached-tokens"] * (not self.cached_tokens)
        if self.kv_connector:
            argv += ["--kv-connector", *filter(None, [self.transfer])]
        for name in self.lora:
            argv += ["--lora", name]
        return Command(argv + self.extra_args, _with_import_path(self.env))


def _with_import_path(env: dict[str, str]) -> dict[str, str]:
    """Return the environment variables, with a PYTHONPATH that finds this package from any working directory."""
    here = str(Path(__file__).parents[3])
    given = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {"PYTHONUNBUFFERED": "1", **env, "PYTHONPATH": f"{here}{os.pathsep}{given}" if given else here}

"""Launch profiles: typed YAML that says how an engine is started, and the command line it makes.

One pydantic class per engine, told apart by the field `engine`; `place` and `command` are all the fleet needs to
know about an engine. Unknown fields are refused with the name that was probably meant.
"""

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from replicas.command import Command, Model, Ports, ProfileError
from replicas.replica import EventSource
from replicas.vllm import VllmProfile

SHIPPED = Path(__file__).parent / "profiles"


class SimProfile(BaseModel):
    """`python -m replicas.simulated`."""

    model_config = ConfigDict(extra="forbid")

    engine: Literal["sim"]
    description: str = ""
    timing: str = Field("gpu-8b", description="timing profile of the simulated engine, name or file")
    speedup: float = Field(1.0, gt=0)
    num_blocks: int | None = Field(None, gt=0)
    block_size: int | None = Field(None, gt=0)
    kv_events: bool = True
    cached_tokens: bool = True
    lora: list[str] = []
    seed: int | None = None
    extra_args: list[str] = []
    env: dict[str, str] = {}
    start_timeout_s: float = Field(30.0, gt=0)

    @property
    def ranks(self) -> int:
        return 1

    def place(self, count: int, used: Sequence[str] = ()) -> tuple[Self, list[dict[str, str]]]:
        """The profile as this machine can run it, and each replica's own environment."""
        return self, [{}] * count

    def command(self, host: str, ports: Ports, model: Model) -> Command:
        argv = [sys.executable, "-m", "replicas.simulated", "--host", host, "--port", str(ports.http)]
        argv += ["--profile", self.timing]
        if model.directory:
            argv += ["--model", str(model.directory)]
        if model.served_name:
            argv += ["--served-model-name", model.served_name]
        if self.speedup != 1:
            argv += ["--speedup", f"{self.speedup:g}"]
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
        for name in self.lora:
            argv += ["--lora", name]
        return Command(argv + self.extra_args, _with_import_path(self.env))

    def events(self, host: str, ports: Ports) -> EventSource | None:
        """Where the engine publishes, as far as the command line fixes it."""
        if not self.kv_events:
            return None
        return EventSource(f"tcp://{host}:{ports.events}", f"tcp://{host}:{ports.replay}", "")


Profile = SimProfile | VllmProfile

_CLASSES: dict[str, type[SimProfile | VllmProfile]] = {"sim": SimProfile, "vllm": VllmProfile}


def _with_import_path(env: dict[str, str]) -> dict[str, str]:
    """`python -m replicas...` must find this package from any working directory."""
    here = str(Path(__file__).parent.parent)
    given = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {"PYTHONUNBUFFERED": "1", **env, "PYTHONPATH": f"{here}{os.pathsep}{given}" if given else here}


def names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load(name_or_file: str) -> Profile:
    """A shipped profile by name, or a YAML file by path. Raises ProfileError."""
    path = SHIPPED / f"{name_or_file}.yaml"
    if "/" in name_or_file or name_or_file.endswith((".yaml", ".yml")):
        path = Path(name_or_file)
    try:
        text = path.read_text()
    except OSError as error:
        known = ", ".join(names())
        raise ProfileError(
            f"profile {name_or_file!r}: {error.strerror}; one of {known}, or the path of a YAML file"
        ) from None
    return parse(text, str(path))


def parse(text: str, where: str = "profile") -> Profile:
    """Raises ProfileError naming each wrong field."""
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ProfileError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ProfileError(f"{where}: a profile is a mapping of fields, beginning with `engine: vllm`")
    if "engine" not in raw and "step" in raw:  # a timing profile, as `hitherto calibrate` writes it
        raw = {"engine": "sim", "timing": where}
    kind = raw.get("engine")
    if kind not in _CLASSES:
        raise ProfileError(f"{where}: engine is {kind!r}, must be one of: {', '.join(_CLASSES)}")
    try:
        return _CLASSES[kind].model_validate(raw)
    except ValidationError as error:
        wrong = "; ".join(_complaint(item, _CLASSES[kind]) for item in error.errors())
        raise ProfileError(f"{where}: {wrong}") from None


def _complaint(item: dict, kind: type[BaseModel]) -> str:
    place = [str(part) for part in item["loc"]]
    field = ".".join(place)
    if item["type"] == "value_error":  # our own words
        return f"{field}: {item['ctx']['error']}" if field else str(item["ctx"]["error"])
    if item["type"] != "extra_forbidden":
        return f"{field}: {item['msg']}, got {item['input']!r}"
    close = difflib.get_close_matches(place[-1], _fields(kind, place[:-1]), 1)
    return f"unknown field {field!r}" + (f", did you mean {'.'.join([*place[:-1], close[0]])!r}?" if close else "")


def _fields(kind: type[BaseModel], place: list[str]) -> list[str]:
    """The fields known at a place within a profile."""
    for part in place:
        inner = [one for one in get_args(kind.model_fields[part].annotation) if isinstance(one, type)]
        kind = next(one for one in inner if issubclass(one, BaseModel))
    return list(kind.model_fields)

"""Launch profiles: YAML files that describe how an engine is started.

Each kind of engine has a pydantic class of its own; the field `engine` selects the class. An error about an unknown
field gives the name that was probably meant.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from replicas import yaml_text
from replicas.engines import DEFAULT, DIALECTS
from replicas.engines.simulated import SIMULATED
from replicas.launch.command import LaunchProfile, ProfileError
from replicas.pipes import refuse_pipe
from replicas.tables import explain

SHIPPED = Path(__file__).parents[1] / "profiles"


def names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load(name_or_file: str) -> LaunchProfile:
    """Return the launch profile that this package has under a name, or the one in a YAML file. Raises ProfileError."""
    path = SHIPPED / f"{name_or_file}.yaml" if name_or_file in names() else Path(name_or_file)
    try:
        refuse_pipe(path)
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ProfileError(f"{path}: it is not UTF-8 text") from None
    except OSError as error:
        known = f"one of {', '.join(names())}, or the path of a YAML file"
        raise ProfileError(f"profile {name_or_file!r}: {error.strerror}; {known}") from None
    return parse(text, str(path))


def parse(text: str, where: str = "profile") -> LaunchProfile:
    """Return the launch profile in a YAML text. Raises ProfileError, which names each wrong field.

    `where`: the name of the text in messages.
    """
    try:
        raw = yaml_text.load(text)
    except yaml_text.NotYaml as error:
        raise ProfileError(f"{where}: {error}") from None
    if not isinstance(raw, dict):
        raise ProfileError(f"{where}: a profile is a mapping of fields, beginning with `engine: {DEFAULT.id}`")
    if "engine" not in raw and "step" in raw:  # a timing profile, as `loadgen calibrate` writes it
        raw = {"engine": SIMULATED.id, "timing": where}
    engine, known = raw.get("engine"), {one.id: one.launch_profile() for one in DIALECTS}
    kind = known.get(engine) if isinstance(engine, str) else None
    if kind is None:
        startable = ", ".join(id for id, one in known.items() if one is not None)
        what = "it is missing" if engine is None else f"it is {engine!r}"
        raise ProfileError(f"{where}: engine: {what}; must be one of: {startable}, as in `engine: {DEFAULT.id}`")
    model: Any = kind  # its class is a pydantic model too, which its type does not say
    try:
        made: LaunchProfile = model.model_validate(raw)
    except ValidationError as error:
        raise ProfileError(f"{where}: {explain(error)}") from None
    return made

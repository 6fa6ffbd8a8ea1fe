"""The effective settings and the source of each: they are read from flags, environment and file, and checked.

A value comes from the first of these that names it: flag, environment (`HITHERTO_*`), YAML file, default. Its source is
kept as well, because "which of my four settings won?" is the question every operator asks. All settings are checked
before anything starts, and one message says what is wrong, where, and what would be right.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from replicas import yaml_text
from replicas.spelling import closest, known_or_meant

from .. import files
from .checks import check_all, unreadable
from .credentials import SECRETS, shown
from .errors import ConfigError, flag
from .schema import Settings
from .wording import explain

ENV_PREFIX = "HITHERTO_"
DEFAULT_FILE = "hitherto.yaml"
ALIASES = {"replica_url": ("--worker-urls", "--backend-url")}


@dataclass(frozen=True)
class Config:
    """The effective settings of a gateway.

    `sources`: by setting, where it was set, in words. `unusable`: by setting, why the file that it names cannot be
    used.
    """

    settings: Settings
    sources: dict[str, str]
    unusable: dict[str, str] = field(default_factory=dict)

    @property
    def left_out(self) -> dict[str, str]:
        """The settings that were set to None because their files cannot be read, each with the reason."""
        return {setting: why for setting, why in self.unusable.items() if getattr(self.settings, setting) is None}

    def to_yaml(self) -> str:
        """Return the text of a file for `--config` with these settings and the source of each; secrets are hidden."""
        plain = self.plain()
        lines = [f"{name}: {_yaml_value(value)}" for name, value in plain.items()]
        width = min(max(map(len, lines)), 48)
        hidden = " (password hidden)" if plain["redis_url"] != self.settings.redis_url else ""
        sources = self.sources | {"redis_url": self.sources["redis_url"] + hidden}
        return "\n".join(f"{line:<{width}}  # {source}" for line, source in zip(lines, sources.values(), strict=True))

    def plain(self) -> dict[str, Any]:
        """Return the values as a person would write them: sizes with units, paths as text, secrets hidden."""
        values = self.settings.to_dict()
        for name in SECRETS:
            values[name] = shown(values[name])
        if values["redis_url"]:
            from cachemap.cluster import without_password

            values["redis_url"] = without_password(values["redis_url"])
        return values


def _yaml_value(value: Any) -> str:
    """Return a value as one line of YAML.

    PyYAML writes `...` after a value that is not a list or mapping; this is cut off.
    """
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").rstrip()


def load(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: str | Path | None = None,
    without_files: bool = False,
) -> Config:
    """Merge default < file < environment < flags, check the settings, and return them with their sources.

    `flags`: the values given on the command line, by setting. `file`: the file to read; None: the one that
    HITHERTO_CONFIG names, or ./hitherto.yaml if it exists. `without_files`: accept settings whose files cannot be used,
    and list them in `Config.unusable`. A setting that a command can do without (`LEFT_OUT`) then becomes None if its
    file cannot be read. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources = dict.fromkeys(Settings.model_fields, "default")
    given = file or environ.get(ENV_PREFIX + "CONFIG")
    if given or Path(DEFAULT_FILE).exists():
        for name, (value, line) in read_file(Path(given or DEFAULT_FILE)).items():
            values[name], sources[name] = value, f"file {given or DEFAULT_FILE}:{line}"
    for variable, near in unknown_variables(environ).items():
        if near:
            raise ConfigError(f"environment {variable}: unknown setting. Did you mean {near}?")
    for name, value in _variables(environ).items():
        if name in Settings.model_fields:
            values[name], sources[name] = value, f"environment {ENV_PREFIX}{name.upper()}"
    for name, value in (flags or {}).items():
        values[name], sources[name] = value, f"flag {flag(name)}"
    for name in SECRETS:
        _check_not_on_command_line(name, values.get(name), sources)
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, sources)) from None
    unusable = check_all(settings, sources)
    if without_files:
        settings = settings.model_copy(update=dict.fromkeys(unreadable(settings, unusable)))
    elif unusable:
        raise ConfigError("\n".join(unusable.values()))
    return Config(settings, sources, unusable)


def read_file(path: Path) -> dict[str, tuple[Any, int]]:
    """Return the value and the line number of each setting in a YAML file, by the setting's name.

    Raises ConfigError for a file that cannot be read, and for unknown or repeated names.
    """
    try:
        text = files.read(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"file {path}: cannot read the configuration: {reason}. Name a readable YAML file with --config"
        ) from None
    found: dict[str, tuple[Any, int]] = {}
    try:
        with yaml_text.reading(text) as loader:
            root = loader.get_single_node()
            if root is not None and not isinstance(root, yaml.MappingNode):
                where = f"file {path}:{root.start_mark.line + 1}"
                raise ConfigError(f"{where}: expected lines like 'port: 8080', found a {root.id}")
            for key_node, value_node in root.value if root is not None else ():
                line = key_node.start_mark.line + 1
                name = str(loader.construct_object(key_node)).replace("-", "_")
                if name not in Settings.model_fields:
                    meant = known_or_meant(name, Settings.model_fields)
                    raise ConfigError(f"file {path}:{line}: unknown setting {name!r}{meant}")
                if name in found:
                    first = f"'{name}' is set twice, first on line {found[name][1]}"
                    raise ConfigError(f"file {path}:{line}: {first}. Keep one of them")
                found[name] = (loader.construct_object(value_node, deep=True), line)
    except yaml_text.NotYaml as error:
        raise ConfigError(
            f"file {path}:{error.line}: not YAML: {error.reason}. Check quotes and indentation there"
        ) from None
    return found


# The variables that Kubernetes sets in every pod for a Service called hitherto or hitherto-something, except for links
# like tcp://10.0.0.1:8080.
_OF_A_SERVICE = re.compile(r"(\w+_)?(service_(host|port(_\w+)?)|port(_\d+_(tcp|udp)(_(proto|port|addr))?))$")


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables HITHERTO_* that name no setting.

    Each comes with the variable of which it is probably a misspelling, or "". Empty variables, and those that
    Kubernetes sets for a Service, are left out.
    """
    known = (*Settings.model_fields, "config")
    unknown = [name for name in _variables(environ) if name not in known and not _OF_A_SERVICE.match(name)]
    meant = {name: _misspelt(name) for name in unknown}
    return {ENV_PREFIX + name.upper(): near and ENV_PREFIX + near.upper() for name, near in meant.items()}


def _misspelt(name: str) -> str:
    """Return the setting that this name misspells, or "".

    The two names must be very similar, because variables such as HITHERTO_REPLICAS and HITHERTO_ADMIN_URL may belong to
    other programs. The same letters in another order count as a misspelling, however short the name is.
    """
    swapped = [one for one in Settings.model_fields if sorted(one) == sorted(name)]
    return swapped[0] if swapped else closest(name, Settings.model_fields, 0.8)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the HITHERTO_* environment variables by the setting's name.

    Links to Services (`tcp://...`), which Kubernetes sets, are left out. An empty variable counts as unset: `X: ${X:-}`
    in a compose file makes one.
    """
    return {
        variable.removeprefix(ENV_PREFIX).lower(): value
        for variable, value in environ.items()
        if value and variable.startswith(ENV_PREFIX) and not re.match(r"(tcp|udp)://", value)
    }


def _check_not_on_command_line(name: str, given: str | None, sources: Mapping[str, str]) -> None:
    """Raise ConfigError if a secret is given on the command line, where other users of the machine can read it.

    A file's name without its leading @ is not refused here, but by the check of the setting itself.
    """
    if given and sources[name].startswith("flag ") and not given.startswith("@") and not os.path.isfile(given):
        raise ConfigError(
            f"flag {flag(name)}: everybody on this machine can read a command line. "
            f"Write it to a file and give {flag(name)} @FILE, or set {ENV_PREFIX}{name.upper()}"
        )

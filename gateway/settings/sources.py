"""The settings in force: read from flags, environment and file, checked, and where each came from.

A value comes from the first of these that names it: flag, environment (`HITHERTO_*`), YAML file,
default. Where it came from is kept beside it, because "which of my four settings won?" is the
question every operator asks. All of it is judged before anything starts; whatever is wrong is
said in one message: what, where, and what would be right.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from replicas import yaml_text
from replicas.kept import KeptReplicas
from replicas.replica import bearer, parse_url
from replicas.sizes import show_bytes
from replicas.spelling import known_or_meant

from .. import files
from ..validation import wanted
from . import access, checks, credentials
from .credentials import MAKE_TOKEN
from .errors import explain, misspelt, place_of
from .overload_fields import check_routes, class_names
from .policy_fields import acts
from .schema import SECRETS, SIZES, Settings, flag

log = logging.getLogger("hitherto")

ENV_PREFIX = "HITHERTO_"
DEFAULT_FILE = "hitherto.yaml"
# Settings that `load` leaves out where their files cannot be used, since whoever works without a gateway reads them.
LEFT_OUT = frozenset(("admin_token", "engine_api_key", "replica_ca", "chat_template", "replica_file", "discover"))
ALIASES = {"replica_url": ("--worker-urls", "--backend-url")}


class ConfigError(Exception):
    """A setting is wrong. The text says what, where and what would be right; exit code 2."""

    def __init__(self, text: str, setting: str = ""):
        """`setting`: the one that each line is about, where the text does not say where that was set."""
        super().__init__(_each_line(setting, text) if setting else text)
        self.text, self.setting = text, setting

    def placed(self, sources: Mapping[str, str]) -> str:
        """The text, each line with where the setting was set."""
        return _each_line(place_of(self.setting, sources), self.text) if self.setting else self.text


def _each_line(place: str, text: str) -> str:
    return "\n".join(f"{place}: {line}" for line in text.splitlines())


@dataclass(frozen=True)
class Config:
    """The effective settings, for each field the source that won, in words, and for each that names a file why that
    cannot be used."""

    settings: Settings
    sources: dict[str, str]
    unusable: dict[str, str] = field(default_factory=dict)

    @property
    def left_out(self) -> dict[str, str]:
        """Of `unusable` those that `settings` is without."""
        return {setting: why for setting, why in self.unusable.items() if getattr(self.settings, setting) is None}

    def to_yaml(self) -> str:
        """A file that `--config` reads back to the same settings, each line with its source. Secrets are left out."""
        plain = self.plain()
        lines = [f"{name}: {_yaml_value(value)}" for name, value in plain.items()]
        width = min(max(map(len, lines)), 48)
        hidden = " (password hidden)" if plain["redis_url"] != self.settings.redis_url else ""
        sources = self.sources | {"redis_url": self.sources["redis_url"] + hidden}
        return "\n".join(f"{line:<{width}}  # {source}" for line, source in zip(lines, sources.values(), strict=True))

    def plain(self) -> dict[str, Any]:
        """Values as a person would write them: sizes with units, paths as text."""
        values = self.settings.model_dump(mode="json")
        values["pools"] = {name: pool.model_dump(exclude_none=True) for name, pool in self.settings.pools.items()}
        for name in SECRETS:
            values[name] = credentials.shown(values[name])
        if values["redis_url"]:
            from cachemap.cluster import without_password

            values["redis_url"] = without_password(values["redis_url"])
        for name in SIZES:
            values[name] = None if values[name] is None else show_bytes(values[name])
        return values


def _yaml_value(value: Any) -> str:
    """One value on one line (PyYAML ends a bare scalar's document with '...')."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False)
        .removesuffix("...\n")
        .rstrip()
    )


def load(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: str | Path | None = None,
    without_files: bool = False,
) -> Config:
    """Merge default < file < environment < flags, check, and say where each value came from.

    `flags`: field name -> value, only those given. `file`: the one to read; else HITHERTO_CONFIG;
    else ./hitherto.yaml if there is one. `without_files`: a file that a setting names and that cannot be
    used is no error; `Config.unusable` has it, and what reads it is left out. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources = dict.fromkeys(Settings.model_fields, "default")
    given = file or environ.get(ENV_PREFIX + "CONFIG")
    if given or Path(DEFAULT_FILE).exists():
        for name, (value, line) in read_file(Path(given or DEFAULT_FILE)).items():
            values[name], sources[name] = value, f"file {given or DEFAULT_FILE}:{line}"
    for name, value in _from_environment(environ).items():
        values[name], sources[name] = value, f"environment {ENV_PREFIX}{name.upper()}"
    for name, value in (flags or {}).items():
        values[name], sources[name] = value, f"flag {flag(name)}"
    for name in SECRETS:
        _check_not_on_command_line(name, values.get(name), sources)
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, sources)) from None
    unusable = _check_together(settings, sources)
    if without_files:
        settings = settings.model_copy(update=dict.fromkeys(_unreadable(settings, unusable)))
    elif unusable:
        raise ConfigError("\n".join(unusable.values()))
    return Config(settings, sources, unusable)


def _unreadable(settings: Settings, unusable: Mapping[str, str]) -> frozenset[str]:
    """The settings of LEFT_OUT whose files cannot be read. A file of replicas that cannot be written can be."""
    found = LEFT_OUT & unusable.keys()
    with suppress(access.UnusableFile):
        checks.added_replicas(settings.replica_file)
        found -= {"replica_file"}
    return found


def read_file(path: Path) -> dict[str, tuple[Any, int]]:
    """Field name -> (value, line) of a YAML file; unknown and repeated names are refused."""
    try:
        text = files.read(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"file {path}: cannot read the configuration: {reason}. Name a readable YAML file with --config"
        ) from None
    try:
        with yaml_text.reading(text) as loader:
            root = loader.get_single_node()
            if root is None:
                return {}
            if not isinstance(root, yaml.MappingNode):
                raise ConfigError(
                    f"file {path}:{root.start_mark.line + 1}: expected lines like 'port: 8080', found a {root.id}"
                )
            return _fields_of(path, root, loader)
    except yaml_text.NotYaml as error:
        raise ConfigError(
            f"file {path}:{error.line}: not YAML: {error.reason}. Check quotes and indentation there"
        ) from None


def _fields_of(path: Path, root: yaml.MappingNode, loader: yaml_text.Loader) -> dict[str, tuple[Any, int]]:
    found: dict[str, tuple[Any, int]] = {}
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        name = str(loader.construct_object(key_node)).replace("-", "_")
        if name not in Settings.model_fields:
            raise ConfigError(
                f"file {path}:{line}: unknown setting {name!r}{known_or_meant(name, Settings.model_fields)}"
            )
        if name in found:
            raise ConfigError(
                f"file {path}:{line}: {name!r} is set twice, first on line {found[name][1]}. Keep one of them"
            )
        value = loader.construct_object(value_node, deep=True)
        if isinstance(value, bool) and Settings.model_fields[name].annotation is not bool:
            raise ConfigError(
                f"file {path}:{line}: {name}: {value_node.value!r} is yes or no to YAML, where {wanted(Settings, [name], name in SIZES)} belongs"
            )
        found[name] = (value, line)
    return found


# What Kubernetes puts into every pod beside a Service called hitherto or hitherto-something, apart from links like
# tcp://10.0.0.1:8080.
_OF_A_SERVICE = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?))$")


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The HITHERTO_* that name no setting, each with the variable that it misspells, or "". Those that Kubernetes sets
    for a Service are not among them, nor empty ones."""
    found: dict[str, str] = {}
    for variable, value in environ.items():
        name = variable.removeprefix(ENV_PREFIX)
        if not (value and variable.startswith(ENV_PREFIX)):
            continue
        if re.match(r"(tcp|udp)://", value) or _OF_A_SERVICE.match(name):
            continue
        if name.lower() not in (*Settings.model_fields, "config"):
            meant = misspelt(name.lower(), Settings.model_fields)
            found[variable] = meant and ENV_PREFIX + meant.upper()
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that name a setting; a misspelt one is an error, other names are not ours. An empty one is unset:
    `X: ${X:-}` in a compose file makes one."""
    for variable, near in unknown_variables(environ).items():
        if near:
            raise ConfigError(f"environment {variable}: unknown setting. Did you mean {near}?")
    found: dict[str, str] = {}
    for variable, value in environ.items():
        if not (value and variable.startswith(ENV_PREFIX)) or re.match(r"(tcp|udp)://", value):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in Settings.model_fields:
            found[name] = value
    return found


def read_token(settings: Settings, place: str = "admin_token") -> str | None:
    """The token that the admin side asks for; None if it asks for none. Raises ConfigError for a file without one, with
    the `place` where it was checks."""
    try:
        return credentials.read(
            settings.admin_token, credentials.TOKEN, "16 characters or more in one line, without spaces"
        )
    except ValueError as error:
        raise ConfigError(f"{place}: {error}. {MAKE_TOKEN}") from None


def read_engine_key(settings: Settings, place: str = "engine_api_key") -> str | None:
    """The key that engines ask for; None if they ask for none. Raises ConfigError for a file without one, with the
    `place` where it was checks."""
    try:
        return credentials.read(settings.engine_api_key, credentials.ENGINE_KEY, "the key in one line, without spaces")
    except ValueError as error:
        raise ConfigError(
            f"{place}: {error}. Write there what the engines were started with, or leave the setting out"
        ) from None


class Secrets(NamedTuple):
    """The secrets of the settings themselves, wherever they are."""

    admin_token: str | None
    engine_key: str | None


def read_secrets(settings: Settings) -> Secrets:
    """Raises ConfigError."""
    return Secrets(read_token(settings), read_engine_key(settings))


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return host.rstrip(".").lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # another name may mean any address


def kept_replicas(settings: Settings) -> KeptReplicas | None:
    """The file of replicas that operators added, if there is to be one. Raises ConfigError if it cannot be read. What
    it overrules of the settings is logged."""
    if settings.replica_file is None:
        return None
    kept = KeptReplicas(settings.replica_file)
    added = _added(settings)
    for url in settings.replica_url:
        if (later := added.get(parse_url(url).id, url)) != url:
            log.warning(
                "%s of replica_file is used, not %s of replica_url: DELETE and POST /replicas changed it later. "
                "To undo that, remove its line in %s", later, url, kept.path,
            )  # fmt: skip
    return kept


def known_urls(settings: Settings) -> tuple[str, ...]:
    """Engines that run already: those given, and those that operators added before the last restart. Of one that is
    both, what operators said counts: it came later."""
    return tuple(({parse_url(url).id: url for url in settings.replica_url} | _added(settings)).values())


def _added(settings: Settings) -> dict[str, str]:
    """What operators added before the last restart, by id."""
    try:
        return checks.added_replicas(settings.replica_file)
    except access.UnusableFile as error:
        raise ConfigError(str(error), error.setting) from None


ADMIN_SIDE = "x-hitherto-admin"  # a header that every answer of a gateway's admin side has, and no other server's


def admin_url(settings: Settings) -> str:
    """Where the gateway with these settings has its admin side, for a client on the same machine."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.admin_host, settings.admin_host)
    return f"http://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{settings.admin_port}"


def admin_headers(settings: Settings) -> dict[str, str]:
    """What a request to that admin side needs."""
    return bearer(read_token(settings))


def _check_together(settings: Settings, sources: Mapping[str, str]) -> dict[str, str]:
    """What no field can judge alone. Returns by setting why the file that it names cannot be used."""
    unusable: dict[str, str] = {}
    _check_admin(settings, sources, unusable)
    _check_access(settings, sources, unusable)
    if settings.workers > 1 and sys.platform != "linux":
        raise ConfigError(
            f"{place_of('workers', sources)}: several share a port as only Linux spreads connections over processes (SO_REUSEPORT). Leave it at 1"
        )
    for name in [name for name in settings.shadow if acts(name, settings.policy)]:
        raise ConfigError(
            f"{place_of('shadow', sources)}: {name} is the policy that acts, and has nothing to be compared with. "
            "Name others with --shadow, or another --policy"
        )
    try:
        check_routes(settings.request_router, settings.scheduler)
    except ValueError as error:
        raise ConfigError(f"{place_of('request_router', sources)}: {error}") from None
    return unusable


@contextmanager
def _noted(unusable: dict[str, str], setting: str, sources: Mapping[str, str]) -> Iterator[None]:
    """Whatever is wrong is wrong with the file of this setting."""
    try:
        yield
    except ConfigError as error:
        unusable[setting] = error.placed(sources)


def _check_admin(settings: Settings, sources: Mapping[str, str], unusable: dict[str, str]) -> None:
    if settings.port == settings.admin_port != 0:
        winner = "admin_port" if sources["admin_port"] != "default" else "port"
        raise ConfigError(
            f"{place_of(winner, sources)}: clients and the admin side cannot share port {settings.port}. "
            f"Give --admin-port another one, like {settings.port + 1}"
        )
    with _noted(unusable, "admin_token", sources):
        read_token(settings, place_of("admin_token", sources))
    if settings.admin_token is None and not _is_loopback(settings.admin_host):
        raise ConfigError(
            f"{place_of('admin_host', sources)}: {settings.admin_host or 'every address'} can be reached from other "
            "machines, and whoever reaches the admin side can add a replica and so receive prompts. Give --admin-token "
            f"@FILE or HITHERTO_ADMIN_TOKEN, or leave --admin-host at 127.0.0.1. {MAKE_TOKEN}"
        )


def _check_not_on_command_line(name: str, given: str | None, sources: Mapping[str, str]) -> None:
    """A file's name without the @ is for the setting's own check to say."""
    if given and sources[name].startswith("flag ") and not given.startswith("@") and not os.path.isfile(given):
        raise ConfigError(
            f"flag {flag(name)}: everybody on this machine can read a command line. "
            f"Write it to a file and give {flag(name)} @FILE, or set {ENV_PREFIX}{name.upper()}"
        )


def _check_access(settings: Settings, sources: Mapping[str, str], unusable: dict[str, str]) -> None:
    with _noted(unusable, "engine_api_key", sources):
        read_engine_key(settings, place_of("engine_api_key", sources))
    for check in (
        partial(access.check_keys, settings.api_keys, class_names(settings.scheduler), settings.forward_api_keys),
        partial(access.check_tls, settings.tls_cert, settings.tls_key, settings.tls_client_ca),
        partial(checks.check_profiles, settings.profile if settings.launch else None, settings.pools),
        partial(checks.check_usage_log, settings.usage_log),
        partial(checks.check_replica_file, settings.replica_file),
        partial(checks.check_replica_ca, settings.replica_ca),
        partial(checks.check_chat_template, settings.chat_template),
        partial(checks.check_cluster, settings.discover),
    ):
        try:
            check()
        except access.Unusable as error:
            part = f"{error.part}: " if error.part else ""
            why = f"{place_of(error.setting, sources)}: {part}{error}"
            if not isinstance(error, access.UnusableFile):
                raise ConfigError(why) from None
            unusable[error.setting] = why

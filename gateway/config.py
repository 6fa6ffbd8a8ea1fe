"""One typed schema for everything an operator may set.

A value comes from the first of these that names it: flag, environment (`HITHERTO_*`), YAML file,
default. Where it came from is kept beside it, because "which of my four settings won?" is the
question every operator asks. All of it is judged before anything starts; whatever is wrong is
said in one message: what, where, and what would be right.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from replicas import yaml_text
from replicas.kept import KeptReplicas
from replicas.pods import Discover
from replicas.replica import parse_url

from . import access, complaints, credentials, named
from .credentials import MAKE_TOKEN
from .overload_fields import Admission, Routes, Scheduler, Slo, check_routes, class_names, read_mapping
from .policy_fields import PolicyName, Shadows, acts, split_names
from .pools import Pool
from .proxy.paths import check_allowed
from .sizes import Bytes, show_bytes

log = logging.getLogger("hitherto")

ENV_PREFIX = "HITHERTO_"
DEFAULT_FILE = "hitherto.yaml"
SIZES = "cache_budget continue_budget max_body_bytes request_budget".split()  # bytes, which read best with a unit
SECRETS = ("admin_token", "engine_api_key")
ALIASES = {"replica_url": ("--worker-urls", "--backend-url")}


class ConfigError(Exception):
    """A setting is wrong. The text says what, where and what would be right; exit code 2."""


def _split_urls(value: Any) -> Any:
    """Each string (of the environment, of a flag, in YAML) may hold several URLs, separated by spaces or commas."""
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return [url for one in value for url in _split_urls(one)]
    return re.split(r",?\s+|,(?=https?://)", value.strip()) if isinstance(value, str) else value


def _check_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    names = [parse_url(text).id for text in urls]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice; name each replica once")
    return urls


def _check_paths(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(check_allowed, paths))


def _check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not re.fullmatch(r"[\w.-]{1,253}", name, re.ASCII):
            raise ValueError(f"{name[:300]!r} is not a host name; give it without scheme and port")
    return names


def _check_redis(url: str) -> str:
    from cachemap.cluster import parse  # a fifth of a second, for those who use it

    parse(url)
    return url


Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Urls = Annotated[tuple[str, ...], BeforeValidator(_split_urls), AfterValidator(_check_urls)]
HostNames = Annotated[tuple[str, ...], BeforeValidator(split_names), AfterValidator(_check_names)]
Token = Annotated[str, AfterValidator(credentials.check_token)]
EngineKey = Annotated[str, AfterValidator(credentials.check_engine_key)]
Paths = Annotated[tuple[str, ...], BeforeValidator(split_names), AfterValidator(_check_paths)]
RedisUrl = Annotated[str, AfterValidator(_check_redis)]


def _named(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value):
        raise ValueError(f"{value!r} is no name: write 1 to 64 letters, digits, dots, dashes or underscores")
    return value


Name = Annotated[str, AfterValidator(_named)]
Pools = Annotated[dict[Name, Pool], BeforeValidator(read_mapping)]
Cluster = Annotated[Discover, BeforeValidator(read_mapping)]


class Settings(BaseModel):
    """What the gateway runs with. Times in seconds, sizes in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("0.0.0.0", description="address clients connect to")
    port: Port = Field(8080, description="port clients connect to (0: any free one)")
    admin_host: str = Field(
        "127.0.0.1", description="address of the admin side; any but a loopback address needs --admin-token"
    )
    admin_port: Port = Field(8081, description="port of the admin side: health, metrics, replicas, status page")
    admin_token: Token | None = Field(
        None,
        repr=False,
        description="@FILE that holds the token which the admin side asks for; the environment and the configuration file may also have the token itself",
    )
    admin_allow_host: HostNames = Field(
        (),
        description="further host names that the admin side answers to, like gateway.example; its addresses and this machine's own name need no permission",
    )

    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="number of gateway processes behind the port, one per core; they share the Redis of --redis-url, or start one",
    )

    tls_cert: Path | None = Field(
        None, description="PEM file with the gateway's certificate, read again when it is renewed: clients speak https"
    )
    tls_key: Path | None = Field(None, description="PEM file with its private key (default: in the same file)")
    tls_client_ca: Path | None = Field(
        None, description="PEM file with the authorities that sign clients' certificates: clients need one then"
    )

    api_keys: Path | None = Field(
        None,
        description="file of clients' API keys, as hashes, read again when it changes: requests need one then; `hitherto key new` makes them",
    )
    forward_api_keys: bool = Field(
        False, description="with --api-keys: pass clients' keys on to the engines all the same"
    )
    engine_api_key: EngineKey | None = Field(
        None,
        repr=False,
        description="@FILE that holds the API key which the engines ask for; the environment and the configuration file may also have the key itself",
    )

    usage_log: Path | None = Field(
        None,
        description="file that gets one line of JSON for each request: tokens, status, seconds, and whose key it came with",
    )

    model: str | None = Field(
        None, description="model name or folder, for its tokenizer and chat template (default: what the replicas serve)"
    )
    served_model_name: str | None = Field(
        None, description="name clients use for the model (default: what the replicas say)"
    )
    chat_template: Path | None = Field(None, description="chat template file, if the engines were started with one")
    block_size: int | None = Field(
        None, ge=1, le=4096, description="tokens per KV cache block (default: learned from the replicas)"
    )

    replica_url: Urls = Field(
        (),
        description="engines that run already: http[s]://HOST:PORT[#events=tcp://HOST:PORT,replay=tcp://HOST:PORT,topic=T,model=M,role=prefill|decode|both,spill=yes,transfer=W,bootstrap=PORT,peer=HOST:PORT]",
    )
    replica_file: Path | None = Field(
        None, description="file that keeps the replicas added by POST /replicas, so that they are there after a restart"
    )
    discover: Cluster | None = Field(
        None,
        description="engines that are pods of a Kubernetes cluster, {selector, namespace, url: 'http://{ip}:8000#events=tcp://{ip}:5557', "
        "labels: {role: LABEL, model: LABEL, spill: LABEL, transfer: LABEL}, api}: added and removed as pods come and go",
    )
    replica_ca: Path | None = Field(
        None,
        description="PEM file with the authorities that certificates of https:// replicas are checked against (default: the system's)",
    )
    launch: int = Field(0, ge=0, le=256, description="number of engines to start and look after")
    profile: str = Field("sim", description="how to start them: a profile's name or file")
    pools: Pools = Field(
        {},
        description="kinds of engines to start, NAME: {profile: NAME|FILE, launch: N}; a pool may have a role, model and served_model_name of "
        "its own, or be slow (spill: true)",
    )

    policy: PolicyName = Field("least_time", description="how a replica is chosen")
    shadow: Shadows = Field(
        (),
        description="policies, and rules for two legs as legs:RULE, to ask about each request as well, without acting: what they would have "
        "saved or cost is in the metrics",
    )
    cache_budget: Bytes = Field(
        512 * 2**20, ge=2**20, description="memory for the map of who holds which block, like 512MiB"
    )
    tokenize_once: Literal["auto", "never"] = Field(
        "auto", description="send engines the token ids of long prompts, where they are shown to take them, or never"
    )
    retries: int = Field(2, ge=0, le=10, description="further replicas to try before the first byte of an answer")

    continue_streams: Literal["exact", "text", "never"] = Field(
        "never",
        description="have another replica go on with a stream that breaks off: where it is exact, by its text as well, or never",
    )
    continue_budget: Bytes = Field(64 * 2**20, description="memory for what is kept of running streams to do so")

    slo: Slo | None = Field(
        None,
        description="limits that requests are to be answered within, like ttft=2s,tpot=50ms: one that no replica can keep is queued or gets 429",
    )
    scheduler: Scheduler | None = Field(
        None,
        description="classes of service, {qos_classes: [{name, reserved_fraction, priority, slo, when_full, max_tokens_floor}, ...]}",
    )
    request_router: Routes | None = Field(
        None,
        description="which class a request is of, {routes: [{match: {header, key, model, path}, class}, ...]}: the first that matches",
    )
    admission: Admission | None = Field(
        None,
        description="what happens while all replicas are full, {when_full: wait|degrade|spill|reject|observe or a list of them, max_tokens_floor, "
        "engine_wait, max_wait, max_requests, max_bytes, tenant_header, control_window}",
    )

    slo_figures: bool = Field(
        False,
        description="measure TTFT, ITL, TPOT and E2E by class and model, as is done where there are classes or limits",
    )

    redis_url: RedisUrl | None = Field(
        None,
        repr=False,
        description="Redis that several gateways share: redis://HOST:PORT, rediss://, redis+sentinel://, redis+cluster:// or "
        "unix:///PATH (default: this gateway is alone)",
    )
    deployment: Name = Field(
        "default", description="name of those that belong together, where a Redis is used by several"
    )
    event_intake: Literal["leased", "each"] = Field(
        "leased", description="with Redis: one gateway follows a replica's events for all, or each for itself"
    )

    max_body_bytes: Bytes | None = Field(
        None,
        description="largest request body, like 64MiB; larger ones get 413 (default: as the longest context of the replicas needs)",
    )
    request_budget: Bytes = Field(
        512 * 2**20,
        description="memory for requests that are received, prepared or have no answer yet, like 512MiB; beyond it clients get 503",
    )
    upload_timeout_s: Seconds = Field(300.0, description="time a client has to send its request's body")
    header_timeout_s: Seconds = Field(10.0, description="time a client has to send its request's head")
    request_timeout_s: Seconds = Field(600.0, description="time an engine has to send the first byte of its answer")
    idle_timeout_s: Seconds = Field(
        120.0, description="silence after which a client's connection is closed, or a stream given up"
    )
    drain_timeout_s: Seconds = Field(30.0, description="time running requests get to finish when the gateway stops")

    allow_path: Paths = Field(
        (),
        description="further paths of the engines that clients may reach, like /v1/audio/speech or /v1/images/*; the inference API is always allowed",
    )
    response_headers: bool = Field(True, description="tell clients in x-hitherto-replica which replica answered")
    cached_tokens_header: bool = Field(
        False,
        description="tell clients in x-hitherto-cached-tokens how much of their prompt was cached, and so whether somebody asked it before",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")
    access_log: bool = Field(False, description="log one line per request")
    live_prompts: bool = Field(False, description="show how sampled prompts begin on the status page and at /recent")

    @property
    def launches(self) -> bool:
        return bool(self.launch or self.pools)


@dataclass(frozen=True)
class Config:
    """The effective settings, and for each field the source that won, in words."""

    settings: Settings
    sources: dict[str, str]

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


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def load(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: str | Path | None = None,
) -> Config:
    """Merge default < file < environment < flags, check, and say where each value came from.

    `flags`: field name -> value, only those given. `file`: the one to read; else HITHERTO_CONFIG;
    else ./hitherto.yaml if there is one. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources = dict.fromkeys(Settings.model_fields, "default")
    named = file or environ.get(ENV_PREFIX + "CONFIG")
    if named or Path(DEFAULT_FILE).exists():
        for name, (value, line) in read_file(Path(named or DEFAULT_FILE)).items():
            values[name], sources[name] = value, f"file {named or DEFAULT_FILE}:{line}"
    for name, value in _from_environment(environ).items():
        values[name], sources[name] = value, f"environment {ENV_PREFIX}{name.upper()}"
    for name, value in (flags or {}).items():
        values[name], sources[name] = value, f"flag {flag(name)}"
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item, sources) for item in _told_once(error.errors()))) from None
    _check_together(settings, sources)
    return Config(settings, sources)


def read_file(path: Path) -> dict[str, tuple[Any, int]]:
    """Field name -> (value, line) of a YAML file; unknown and repeated names are refused."""
    try:
        text = path.read_text(encoding="utf-8")
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
            raise ConfigError(f"file {path}:{line}: unknown setting {name!r}. {suggest(name, Settings.model_fields)}")
        if name in found:
            raise ConfigError(
                f"file {path}:{line}: {name!r} is set twice, first on line {found[name][1]}. Keep one of them"
            )
        value = loader.construct_object(value_node, deep=True)
        if isinstance(value, bool) and Settings.model_fields[name].annotation is not bool:
            raise ConfigError(
                f"file {path}:{line}: {name}: {value_node.value!r} is yes or no to YAML, "
                f"where {complaints.wanted(Settings, [name], name in SIZES)} belongs"
            )
        found[name] = (value, line)
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that name a setting; a near miss is an error, other names are not ours.

    Kubernetes puts HITHERTO_PORT=tcp://10.0.0.1:8080 and its kin into every pod beside a Service
    called hitherto: such links are no settings.
    """
    found: dict[str, str] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or re.match(r"(tcp|udp)://", value):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in Settings.model_fields:
            found[name] = value
        elif near := difflib.get_close_matches(name, Settings.model_fields, 1, 0.8):
            raise ConfigError(f"environment {variable}: unknown setting. Did you mean {ENV_PREFIX}{near[0].upper()}?")
    return found


def suggest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """'Did you mean X?', or the list of what there is."""
    near = _meant(name, known)
    return f"Did you mean {near!r}?" if near else "Known: " + ", ".join(known)


def _meant(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """The known name that was probably meant, or ""."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, 0.6)), "")


def read_token(settings: Settings, place: str = "admin_token") -> str | None:
    """The token that the admin side asks for; None if it asks for none. Raises ConfigError for a file without one, with
    the `place` where it was named."""
    try:
        return credentials.read(
            settings.admin_token, credentials.TOKEN, "16 characters or more in one line, without spaces"
        )
    except ValueError as error:
        raise ConfigError(f"{place}: {error}. {MAKE_TOKEN}") from None


def read_engine_key(settings: Settings, place: str = "engine_api_key") -> str | None:
    """The key that engines ask for; None if they ask for none. Raises ConfigError for a file without one, with the
    `place` where it was named."""
    try:
        return credentials.read(settings.engine_api_key, credentials.ENGINE_KEY, "the key in one line, without spaces")
    except ValueError as error:
        raise ConfigError(
            f"{place}: {error}. Write there what the engines were started with, or leave the setting out"
        ) from None


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return host.rstrip(".").lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # another name may mean any address


def kept_replicas(settings: Settings) -> KeptReplicas | None:
    """The file of replicas that operators added, if there is to be one. Raises ConfigError if it cannot be read
    or written. What it overrules of the settings is logged."""
    if settings.replica_file is None:
        return None
    kept = KeptReplicas(settings.replica_file)
    try:
        kept.check()
    except OSError as error:
        raise ConfigError(
            f"replica_file: {kept.path} cannot be written: {error.strerror or error}. Its folder must exist, and the gateway may write there"
        ) from None
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
    if settings.replica_file is None:
        return {}
    try:
        return {parse_url(url).id: url for url in KeptReplicas(settings.replica_file).urls()}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"replica_file: {error}. Correct or remove that file, which has one replica's URL a line"
        ) from None


def admin_url(settings: Settings) -> str:
    """Where the gateway with these settings has its admin side, for a client on the same machine."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.admin_host, settings.admin_host)
    return f"http://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{settings.admin_port}"


def admin_headers(settings: Settings) -> dict[str, str]:
    """What a request to that admin side needs."""
    token = read_token(settings)
    return {"Authorization": f"Bearer {token}"} if token else {}


def _place(name: str, sources: Mapping[str, str]) -> str:
    """Where a setting was set, and its name where that does not say it: `flag --port`, `file hitherto.yaml:3: port`."""
    source = sources.get(name, f"flag {flag(name)}")
    return source if source.startswith(("flag ", "environment ")) else f"{source}: {name}"


def _told_once(items: Sequence[Any]) -> list[Any]:
    """pydantic's errors without the settings that are missing only for being misspelt, which is an error of its own."""
    unknown = [item["loc"] for item in items if item["type"] == "extra_forbidden"]
    misspelt = {(*loc[:-1], _meant(str(loc[-1]), _known(loc))) for loc in unknown}
    return [item for item in items if item["type"] != "missing" or item["loc"] not in misspelt]


def _known(loc: Sequence[Any]) -> Mapping[str, Any]:
    """The settings that there are where pydantic found one that there is not."""
    of = {"pools": Pool, "discover": Discover}.get(loc[0]) if len(loc) > 1 else None
    return (of or Settings).model_fields


def _explain(item: Any, sources: Mapping[str, str]) -> str:
    """One pydantic error as: place: what is wrong; what would be right."""
    name, *within = item["loc"]
    inner = [one for one in within if isinstance(one, str)] if "[key]" not in within else []  # a wrong key names itself
    place, part = _place(name, sources), ".".join(inner)
    takes = f"It takes {Settings.model_fields[name].description}" if name in Settings.model_fields else ""
    if item["type"] == "extra_forbidden":
        known = _known(item["loc"])
        return f"{place}: {part and part + ' is an '}unknown setting. {suggest(item['loc'][-1], known)}"
    if item["type"] == "missing":
        return f"{place}: {part or name} is missing. {takes}"
    place += f": {part}" if part else ""
    if item["type"] == "value_error":
        return f"{place}: {item['ctx']['error']}"
    if item["type"] == "literal_error":
        return f"{place}: {complaints.none_of(item)}"
    given = "what it is set to" if name in SECRETS else repr(item["input"])
    if name in SIZES and isinstance(item["input"], int):
        given = show_bytes(item["input"])
    wanted = complaints.wanted(Settings, item["loc"], name in SIZES, item["type"] == "finite_number")
    if item["input"] is None:
        return f"{place}: it has no value, where {wanted} belongs. {takes}"
    if wanted == complaints.TEXT and not isinstance(item["input"], (list, dict)):
        return f"{place}: {given} is not {wanted}; put it in quotes"
    wordy = wanted in (complaints.TEXT, complaints.TABLE, complaints.TEXTS)
    return f"{place}: {given} is not {wanted}{f'. {takes}' if wordy else ''}"


def _check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    """What no field can judge alone."""
    _check_admin(settings, sources)
    _check_access(settings, sources)
    if settings.workers > 1 and sys.platform != "linux":
        raise ConfigError(
            f"{_place('workers', sources)}: several share a port as only Linux spreads connections over processes (SO_REUSEPORT). Leave it at 1"
        )
    for name in [name for name in settings.shadow if acts(name, settings.policy)]:
        raise ConfigError(
            f"{_place('shadow', sources)}: {name} is the policy that acts, and has nothing to be compared with. Name others with --shadow, or another --policy"
        )
    try:
        check_routes(settings.request_router, settings.scheduler)
    except ValueError as error:
        raise ConfigError(f"{_place('request_router', sources)}: {error}") from None


def _check_admin(settings: Settings, sources: Mapping[str, str]) -> None:
    if settings.port == settings.admin_port != 0:
        winner = "admin_port" if sources["admin_port"] != "default" else "port"
        raise ConfigError(
            f"{_place(winner, sources)}: clients and the admin side cannot share port {settings.port}. "
            f"Give --admin-port another one, like {settings.port + 1}"
        )
    _check_not_on_command_line("admin_token", settings.admin_token, sources)
    if read_token(settings, _place("admin_token", sources)) is None and not _is_loopback(settings.admin_host):
        raise ConfigError(
            f"{_place('admin_host', sources)}: {settings.admin_host or 'every address'} can be reached from other "
            "machines, and whoever reaches the admin side can add a replica and so receive prompts. Give --admin-token "
            f"@FILE or HITHERTO_ADMIN_TOKEN, or leave --admin-host at 127.0.0.1. {MAKE_TOKEN}"
        )


def _check_not_on_command_line(name: str, given: str | None, sources: Mapping[str, str]) -> None:
    if given is not None and sources[name].startswith("flag ") and not given.startswith("@"):
        raise ConfigError(
            f"flag {flag(name)}: everybody on this machine can read a command line. "
            f"Write it to a file and give {flag(name)} @FILE, or set {ENV_PREFIX}{name.upper()}"
        )


def _check_access(settings: Settings, sources: Mapping[str, str]) -> None:
    _check_not_on_command_line("engine_api_key", settings.engine_api_key, sources)
    read_engine_key(settings, _place("engine_api_key", sources))
    try:
        access.check_keys(settings.api_keys, class_names(settings.scheduler), settings.forward_api_keys)
        access.check_tls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        named.check_profiles(settings.profile if settings.launch else None, settings.pools)
        named.check_files(settings.usage_log, settings.replica_ca, settings.chat_template)
        named.check_cluster(settings.discover)
    except access.Unusable as error:
        part = f"{error.part}: " if error.part else ""
        raise ConfigError(f"{_place(error.setting, sources)}: {part}{error}") from None

"""The typed schema of all settings: names, types, defaults and help."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from replicas.pods import Discover

from .credentials import EngineKey, Token
from .fields import (
    AnyPolicy,
    Bytes,
    CacheBytes,
    HostNames,
    Name,
    Origins,
    Paths,
    Port,
    RedisUrl,
    Seconds,
    Shadows,
    Urls,
)
from .overload import Admission, Router, Scheduler, Slo, read_mapping
from .pools import Pool

SIZES = "cache_budget continue_budget max_body_bytes request_budget".split()  # in bytes, shown with a unit
Yaml = BeforeValidator(read_mapping)


class Settings(BaseModel):
    """The settings that the gateway runs with. Times in seconds, sizes in bytes.

    The text below each is its description in `--help`, in docs/configuration.md and in messages about wrong values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    host: str = "0.0.0.0"
    """address clients connect to"""
    port: Port = 8080
    """port clients connect to (0: any free one)"""
    admin_host: str = "127.0.0.1"
    """address of the admin side; any but a loopback address needs --admin-token"""
    admin_port: Port = 8081
    """port of the admin side: health, metrics, replicas, status page"""
    admin_token: Token | None = Field(None, repr=False)
    """@FILE that holds the token which the admin side asks for; the environment and the configuration file may also
    have the token itself"""
    admin_allow_host: HostNames = ()
    """further host names that the admin side answers to, like gateway.example; its addresses and this machine's own
    name need no permission"""

    workers: int = Field(1, ge=1, le=64)
    """number of gateway processes behind the port, one per core; they share the Redis of --redis-url, or start one"""

    tls_cert: Path | None = None
    """PEM file with the gateway's certificate, read again when it is renewed: clients speak https"""
    tls_key: Path | None = None
    """PEM file with its private key (default: in the same file)"""
    tls_client_ca: Path | None = None
    """PEM file with the authorities that sign clients' certificates: clients need one then"""

    api_keys: Path | None = None
    """file of clients' API keys, as hashes, read again when it changes: requests need one then; `hitherto key new`
    makes them"""
    forward_api_keys: bool = False
    """with --api-keys: pass clients' keys on to the engines all the same"""
    engine_api_key: EngineKey | None = Field(None, repr=False)
    """@FILE that holds the API key which the engines ask for; the environment and the configuration file may also have
    the key itself"""

    usage_log: Path | None = None
    """file that gets one line of JSON for each request: tokens, status, seconds, and whose key it came with"""

    model: str | None = None
    """model name or folder, for its tokenizer and chat template (default: what the replicas serve)"""
    served_model_name: str | None = None
    """name clients use for the model (default: what the replicas say)"""
    chat_template: Path | None = None
    """chat template file, if the engines were started with one"""
    block_size: int | None = Field(None, ge=1, le=4096)
    """tokens per KV cache block (default: learned from the replicas)"""

    replica_url: Urls = ()
    """engines that run already:
    http[s]://HOST:PORT[#events=tcp://HOST:PORT,replay=tcp://HOST:PORT,topic=T,model=M,role=prefill|decode|both,spill=yes,transfer=W,bootstrap=PORT,peer=HOST:PORT]"""
    replica_file: Path | None = None
    """file that keeps the replicas added by POST /replicas, so that they are there after a restart"""
    discover: Annotated[Discover, Yaml] | None = None
    """engines that are pods of a Kubernetes cluster, {selector, namespace, url:
    'http://{ip}:8000#events=tcp://{ip}:5557', labels: {role: LABEL, model: LABEL, spill: LABEL, transfer: LABEL}, api}:
    added and removed as pods come and go"""
    replica_ca: Path | None = None
    """PEM file with the authorities that certificates of https:// replicas are checked against (default: the
    system's)"""
    launch: int = Field(0, ge=0, le=256)
    """number of engines to start and look after"""
    profile: str = "sim"
    """how to start them: a profile's name or file"""
    pools: Annotated[dict[Name, Pool], Yaml] = {}
    """kinds of engines to start, NAME: {profile: NAME|FILE, launch: N}; a pool may have a role, model and
    served_model_name of its own, or be slow (spill: true)"""

    policy: AnyPolicy = "least_time"
    """how a replica is chosen; FILE.py:CLASS is a rule of your own"""
    shadow: Shadows = ()
    """policies, and rules for two legs as legs:RULE, to ask about each request as well, without acting: what they would
    have saved or cost is in the metrics"""
    cache_budget: CacheBytes = 512 * 2**20
    """memory for the map of who holds which block, like 512MiB"""
    tokenize_once: Literal["auto", "never"] = "auto"
    """send engines the token ids of long prompts, where they are shown to take them, or never"""
    retries: int = Field(2, ge=0, le=10)
    """further replicas to try before the first byte of an answer"""

    continue_streams: Literal["exact", "never"] = "never"
    """have another replica resume a stream that breaks off where that is exact, or never"""
    continue_budget: Bytes = 64 * 2**20
    """memory for what is kept of running streams to do so"""

    slo: Slo | None = None
    """limits that requests are to be answered within, like ttft=2s,tpot=50ms: one that no replica can keep is queued or
    gets 429"""
    scheduler: Annotated[Scheduler, Yaml] | None = None
    """classes of service, {qos_classes: [{name, reserved_fraction, priority, slo, when_full, max_tokens_floor},
    ...]}"""
    request_router: Annotated[Router, Yaml] | None = None
    """which class a request is of, {routes: [{match: {header, key, model, path}, class}, ...]}: the first that
    matches"""
    admission: Annotated[Admission, Yaml] | None = None
    """what happens while all replicas are full, {when_full: wait|degrade|spill|reject|observe or a list of them,
    max_tokens_floor, engine_wait, max_wait, max_requests, max_bytes, tenant_header, control_window}"""

    slo_figures: bool = False
    """measure TTFT, ITL, TPOT and E2E by class and model, as is done where there are classes or limits"""

    redis_url: RedisUrl | None = Field(None, repr=False)
    """Redis that several gateways share: redis://HOST:PORT, rediss://, redis+sentinel://, redis+cluster:// or
    unix:///PATH (default: this gateway is alone)"""
    deployment: Name = "default"
    """name of those that belong together, where a Redis is used by several"""
    event_intake: Literal["leased", "each"] = "leased"
    """with Redis: one gateway follows a replica's events for all, or each for itself"""

    max_body_bytes: Bytes | None = None
    """largest request body, like 64MiB; larger ones get 413 (default: as the longest context of the replicas needs)"""
    request_budget: Bytes = 512 * 2**20
    """memory for requests that are received, prepared or have no answer yet, like 512MiB; beyond it clients get 503"""
    upload_timeout_s: Seconds = 300.0
    """time a client has to send its request's body"""
    header_timeout_s: Seconds = 10.0
    """time a client has to send its request's head"""
    request_timeout_s: Seconds = 600.0
    """time an engine has to send the first byte of its answer"""
    idle_timeout_s: Seconds = 120.0
    """silence after which a client's connection is closed, or a stream given up"""
    hung_after_s: Seconds = 15.0
    """silence after which a replica is failed: it answers no probe and no request, as an engine that compiles may for a
    minute"""
    drain_timeout_s: Seconds = 30.0
    """time running requests get to finish when the gateway stops"""

    allow_path: Paths = ()
    """further paths of the engines that clients may reach, like /v1/audio/speech or /v1/images/*; the inference API is
    always allowed"""
    allow_origin: Origins = ()
    """origins of web pages that browsers let use this gateway, like https://app.example, or * for all; without it
    engines say which"""
    response_headers: bool = True
    """tell clients in x-hitherto-replica which replica answered"""
    cached_tokens_header: bool = False
    """tell clients in x-hitherto-cached-tokens how much of their prompt was cached, and so whether somebody asked it
    before"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """least severity that is logged"""
    access_log: bool = False
    """log one line per whole request"""
    live_prompts: bool = False
    """show how sampled prompts begin on the status page and at /recent"""

    @field_validator("*", mode="before")
    @classmethod
    def _is_plain(cls, given: Any, info: ValidationInfo) -> Any:
        """Raise ValueError for `yes` where a number or a text belongs, since pydantic would take it for 1.

        NUL characters are refused too: no file or host name may have one, and opening such a name raises no OSError.
        """
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(given, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("its value is yes or no to YAML; write a number, or put a text in quotes")
        if _has_nul(given):
            raise ValueError("there is a NUL character in it; leave it out")
        return given

    @property
    def launches(self) -> bool:
        """Whether the settings name engines that the gateway is to start."""
        return bool(self.launch or self.pools)

    @property
    def has_overload(self) -> bool:
        """Whether latency limits, classes of service, routes or a queue are configured."""
        return any(one is not None for one in (self.slo, self.scheduler, self.request_router, self.admission))

    @property
    def class_names(self) -> list[str]:
        """The names of the configured classes of service; [] without the setting `scheduler`."""
        return self.scheduler.names if self.scheduler is not None else []

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as JSON types, which can be validated to equal settings again.

        Tables hold only the fields that were set.
        """
        return Settings().model_dump(mode="json") | self.model_dump(mode="json", by_alias=True, exclude_unset=True)


for each in Settings.model_fields.values():
    each.description = " ".join(each.description.split())


def _has_nul(given: Any) -> bool:
    if isinstance(given, Mapping):
        given = [*given, *given.values()]
    return any(map(_has_nul, given)) if isinstance(given, (list, tuple)) else isinstance(given, str) and "\0" in given

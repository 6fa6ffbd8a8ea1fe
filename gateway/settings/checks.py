"""Checks that need more than one setting's value: named files, addresses, and settings that exclude each other."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from replicas import pods, tls
from replicas.kept import KeptReplicas
from replicas.pipes import refuse_pipe

from .. import files
from ..files import check_appendable
from ..tenants import key_file
from ..tls import Certificate
from .credentials import MAKE_TOKEN
from .derived import added_replicas, read_engine_key, read_token
from .errors import ConfigError, UnusableFile, using_file
from .fields import ACTING_LEGS
from .schema import Settings

# Settings that `load` can leave out where their files cannot be used, for commands that work without a gateway.
LEFT_OUT = frozenset(("admin_token", "engine_api_key", "replica_ca", "chat_template", "replica_file", "discover"))


def check_all(settings: Settings, sources: Mapping[str, str]) -> dict[str, str]:
    """Check the settings that need more than one value, and return why files that they name cannot be used.

    The result has the reasons by setting. `sources`: where each setting was set. Raises ConfigError for any other
    fault.
    """
    for setting, why in _contradictions(settings):
        raise ConfigError(ConfigError(why, setting).placed(sources))
    unusable: dict[str, str] = {}
    for setting, remedy, use in _files(settings):
        try:
            with using_file(setting, getattr(settings, setting), remedy):
                use()
        except UnusableFile as error:
            unusable.setdefault(error.setting, error.placed(sources))
    return unusable


def unreadable(settings: Settings, unusable: Mapping[str, str]) -> frozenset[str]:
    """Return the settings whose files cannot be read, among those that some commands can do without (LEFT_OUT).

    `unusable`: by setting, why its file cannot be used. `replica_file` is not returned if its file can be read but not
    written.
    """
    found = LEFT_OUT & unusable.keys()
    with suppress(UnusableFile):
        added_replicas(settings)
        found -= {"replica_file"}
    return found


def _contradictions(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the name of each setting that contradicts another one or cannot work on this machine, with the reason.

    The reason also says what would be right.
    """
    if settings.port == settings.admin_port != 0:
        yield (
            "admin_port" if "admin_port" in settings.model_fields_set else "port",
            f"clients and the admin side cannot share port {settings.port}. "
            f"Give --admin-port another one, like {settings.port + 1}",
        )
    if settings.admin_token is None and not _is_loopback(settings.admin_host):
        yield (
            "admin_host",
            f"{settings.admin_host or 'every address'} can be reached from other machines, and whoever reaches the admin "
            "side can add a replica and so receive prompts. Give --admin-token @FILE or HITHERTO_ADMIN_TOKEN, or leave "
            f"--admin-host at 127.0.0.1. {MAKE_TOKEN}",
        )
    if settings.workers > 1 and sys.platform != "linux":
        yield "workers", "only Linux spreads connections over processes (SO_REUSEPORT). Leave it at 1"
    for name in {settings.policy, ACTING_LEGS} & {*settings.shadow}:
        yield (
            "shadow",
            f"{name} is the policy that acts, and has nothing to be compared with. Name others with --shadow, or "
            "another --policy",
        )
    if settings.request_router is not None and (why := settings.request_router.unfit(settings.class_names)):
        yield "request_router", why
    if settings.forward_api_keys and settings.api_keys is None:
        yield (
            "forward_api_keys",
            "clients' keys are passed on anyway while this gateway asks for none. Leave it out, or name a file of keys "
            "with --api-keys",
        )
    for name in ("tls_key", "tls_client_ca"):
        if settings.tls_cert is None and getattr(settings, name) is not None:
            yield name, "it is of use with a certificate alone: name one with --tls-cert"


def _is_loopback(host: str) -> bool:
    """Return whether `host` is an address that only this machine can reach."""
    try:
        return host.rstrip(".").lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # any other name may stand for any address


def _files(settings: Settings) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield each setting that names a file, with a remedy for an unusable file and a function that tries to use it."""
    yield "admin_token", "", partial(read_token, settings)
    yield "engine_api_key", "", partial(read_engine_key, settings)
    yield "replica_file", "", partial(added_replicas, settings)
    if settings.api_keys is not None:
        yield "api_keys", "", partial(key_file.read, settings.api_keys, settings.class_names)
    if settings.tls_cert is not None:
        yield "tls_cert", "", partial(Certificate, settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    if settings.discover is not None:
        yield "discover", "", partial(pods.place, settings.discover)
    written = "Its folder must exist, and the gateway may write there"
    if settings.usage_log is not None:
        yield "usage_log", written, partial(check_appendable, settings.usage_log)
    if settings.replica_file is not None:
        yield "replica_file", written, partial(check_appendable, settings.replica_file)
        yield "replica_file", written, partial(check_appendable, KeptReplicas(settings.replica_file).new)
    if settings.replica_ca is not None:
        remedy = "Name a PEM file with the certificates of the authorities that signed the replicas'"
        yield "replica_ca", remedy, partial(tls.context, settings.replica_ca)
    if settings.chat_template is not None:
        remedy = "Name the Jinja file the engines were started with, or leave it out to use the model's own"
        yield "chat_template", remedy, partial(_read_text, settings.chat_template)


def _read_text(path: Path) -> str:
    refuse_pipe(path)
    return files.read(path).decode()

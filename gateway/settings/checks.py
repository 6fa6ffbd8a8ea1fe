"""Checks that need more than one setting's value: named files, addresses, and settings that exclude each other."""

from __future__ import annotations

import errno
import ipaddress
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from replicas import pods, tls
from replicas.kept import KeptReplicas
from replicas.launch import profile

from .. import files
from ..files import check_appendable
from ..tenants import key_file
from ..tls import Certificate
from .credentials import MAKE_TOKEN
from .derived import added_replicas, read_engine_key, read_token
from .errors import ConfigError, UnusableFile
from .fields import ACTING_LEGS
from .schema import Settings

# Settings that `load` can leave out where their files cannot be used, for commands that work without a gateway.
LEFT_OUT = frozenset(("admin_token", "engine_api_key", "replica_ca", "chat_template", "replica_file", "discover"))


def check_all(settings: Settings, sources: Mapping[str, str]) -> dict[str, str]:
    """Return, by setting, why the file that it names cannot be used. Raises ConfigError for any other fault."""
    unusable: dict[str, str] = {}
    for check in CHECKS:
        try:
            check(settings)
        except UnusableFile as error:
            unusable.setdefault(error.setting, error.placed(sources))
        except ConfigError as error:
            raise ConfigError(error.placed(sources)) from None
    return unusable


def unreadable(settings: Settings, unusable: Mapping[str, str]) -> frozenset[str]:
    """Return the settings of LEFT_OUT whose files cannot be read.

    A replica file that can be read, though not written, is left out.
    """
    found = LEFT_OUT & unusable.keys()
    with suppress(UnusableFile):
        added_replicas(settings)
        found -= {"replica_file"}
    return found


def _check_ports(settings: Settings) -> None:
    if settings.port == settings.admin_port != 0:
        raise ConfigError(
            f"clients and the admin side cannot share port {settings.port}. "
            f"Give --admin-port another one, like {settings.port + 1}",
            "admin_port" if "admin_port" in settings.model_fields_set else "port",
        )


def _check_admin_host(settings: Settings) -> None:
    if settings.admin_token is None and not _is_loopback(settings.admin_host):
        raise ConfigError(
            f"{settings.admin_host or 'every address'} can be reached from other machines, and whoever reaches the admin "
            "side can add a replica and so receive prompts. Give --admin-token @FILE or HITHERTO_ADMIN_TOKEN, or leave "
            f"--admin-host at 127.0.0.1. {MAKE_TOKEN}",
            "admin_host",
        )


def _is_loopback(host: str) -> bool:
    """Return whether `host` is an address that only this machine can reach."""
    try:
        return host.rstrip(".").lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # any other name may stand for any address


def _check_workers(settings: Settings) -> None:
    if settings.workers > 1 and sys.platform != "linux":
        raise ConfigError(
            "several share a port as only Linux spreads connections over processes (SO_REUSEPORT). Leave it at 1",
            "workers",
        )


def _check_shadow(settings: Settings) -> None:
    for name in {settings.policy, ACTING_LEGS} & {*settings.shadow}:
        raise ConfigError(
            f"{name} is the policy that acts, and has nothing to be compared with. Name others with --shadow, or "
            "another --policy",
            "shadow",
        )


def _check_routes(settings: Settings) -> None:
    if settings.request_router is not None and (why := settings.request_router.unfit(settings.class_names)):
        raise ConfigError(why, "request_router")


@contextmanager
def _naming(setting: str, part: str = "") -> Iterator[None]:
    """Turn a ValueError into an UnusableFile for this setting, or for the one that the error's `setting` names.

    `part`: the text before the message, which says where in the setting the fault is.
    """
    try:
        yield
    except ValueError as error:
        raise UnusableFile(f"{part}{error}", getattr(error, "setting", setting)) from None


def _check_keys(settings: Settings) -> None:
    if settings.api_keys is not None:
        with _naming("api_keys"):
            key_file.read(settings.api_keys, settings.class_names)
    elif settings.forward_api_keys:
        raise ConfigError(
            "clients' keys are passed on anyway while this gateway asks for none. Leave it out, or name a file of keys "
            "with --api-keys",
            "forward_api_keys",
        )


def _check_tls(settings: Settings) -> None:
    if settings.tls_cert is not None:
        with _naming("tls_cert"):
            Certificate(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        return
    for name in ("tls_key", "tls_client_ca"):
        if getattr(settings, name) is not None:
            raise ConfigError("it is of use with a certificate alone: name one with --tls-cert", name)


def _check_profiles(settings: Settings) -> None:
    if settings.launch:
        with _naming("profile"):
            profile.load(settings.profile)
    for name, pool in settings.pools.items():
        with _naming("pools", f"{name}.profile: "):
            profile.load(pool.profile)


def _check_written(setting: str, settings: Settings) -> None:
    if (path := getattr(settings, setting)) is not None:
        try:
            if os.path.isdir(path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            check_appendable(KeptReplicas(path).new if setting == "replica_file" else path)
        except OSError as error:
            raise UnusableFile(
                f"{path} cannot be written: {error.strerror or error}. Its folder must exist, and the gateway may write "
                "there",
                setting,
            ) from None


def _check_replica_ca(settings: Settings) -> None:
    if settings.replica_ca is not None:
        try:
            tls.context(settings.replica_ca)
        except OSError as error:
            raise UnusableFile(
                f"{settings.replica_ca} cannot be read as certificates: {error.strerror or error}. Name a PEM file with "
                "the certificates of the authorities that signed the replicas'",
                "replica_ca",
            ) from None


def _check_chat_template(settings: Settings) -> None:
    if settings.chat_template is not None and (why := _why_unreadable(settings.chat_template)):
        raise UnusableFile(
            f"{why}. Name the Jinja file the engines were started with, or leave it out to use the model's own",
            "chat_template",
        )


def _why_unreadable(path: Path) -> str:
    """Return why no text can be read from this file, or ""."""
    try:
        if not path.is_file():
            return f"there is no file {path}"
        files.read(path).decode()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    except UnicodeDecodeError:
        return f"{path} cannot be read: it is not UTF-8 text"
    return ""


def _check_cluster(settings: Settings) -> None:
    if settings.discover is not None:
        with _naming("discover"):
            pods.place(settings.discover)


CHECKS: tuple[Callable[[Settings], object], ...] = (
    _check_ports, read_token, _check_admin_host, read_engine_key, _check_keys, _check_tls, _check_profiles,
    partial(_check_written, "usage_log"),
    partial(_check_written, "replica_file"), added_replicas, _check_replica_ca, _check_chat_template, _check_cluster, _check_workers,
    _check_shadow, _check_routes,
)  # fmt: skip

"""What settings name, and whether it is there: profiles, files, a cluster's API."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from replicas import pods, tls
from replicas.kept import KeptReplicas
from replicas.launch import profile
from replicas.replica import parse_url

from ..files import check_appendable
from .access import UnusableFile
from .pools import Pool


def check_profiles(alone: str | None, pools: Mapping[str, Pool]) -> None:
    """`alone`: that of --launch, if there is one. Raises UnusableFile."""
    named = [("profile", "", alone)] if alone is not None else []
    for setting, part, name in named + [("pools", f"{name}.profile", pool.profile) for name, pool in pools.items()]:
        try:
            profile.load(name)
        except ValueError as error:
            raise UnusableFile(setting, str(error), part) from None


def check_usage_log(usage_log: Path | None) -> None:
    """Raises UnusableFile."""
    if usage_log:
        try:
            check_appendable(usage_log)
        except OSError as error:
            raise UnusableFile(
                "usage_log",
                f"{usage_log} cannot be written: {error.strerror or error}. Its folder must exist, and the gateway may write there",
            ) from None


def check_replica_file(replica_file: Path | None) -> None:
    """Raises UnusableFile."""
    if replica_file:
        try:
            if replica_file.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            check_appendable(KeptReplicas(replica_file).new)
        except OSError as error:
            raise UnusableFile(
                "replica_file",
                f"{replica_file} cannot be written: {error.strerror or error}. Its folder must exist, and the gateway may write there",
            ) from None
    added_replicas(replica_file)


def added_replicas(replica_file: Path | None) -> dict[str, str]:
    """The URLs that operators added before the last restart, by replica's id. Raises UnusableFile."""
    if replica_file is None:
        return {}
    try:
        return {parse_url(url).id: url for url in KeptReplicas(replica_file).urls()}
    except (OSError, ValueError) as error:
        strerror = error.strerror if isinstance(error, OSError) else None
        why = f"{replica_file} cannot be read: {strerror}" if strerror else str(error)
        raise UnusableFile(
            "replica_file", f"{why}. Correct or remove that file, which has one replica's URL a line"
        ) from None


def check_replica_ca(replica_ca: Path | None) -> None:
    """Raises UnusableFile."""
    if replica_ca:
        try:
            tls.context(replica_ca)
        except OSError as error:
            raise UnusableFile(
                "replica_ca",
                f"{replica_ca} cannot be read as certificates: {error.strerror or error}. "
                "Name a PEM file with the certificates of the authorities that signed the replicas'",
            ) from None


def check_chat_template(chat_template: Path | None) -> None:
    """Raises UnusableFile."""
    if chat_template and (why := _unreadable_text(chat_template)):
        raise UnusableFile(
            "chat_template",
            f"{why}. Name the Jinja file the engines were started with, or leave it out to use the model's own",
        )


def _unreadable_text(path: Path) -> str:
    """Why there is no text to be had from this file; empty if there is."""
    try:
        if not path.is_file():
            return f"there is no file {path}"
        path.read_text(encoding="utf-8")
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    except UnicodeDecodeError:
        return f"{path} cannot be read: it is not UTF-8 text"
    return ""


def check_cluster(discover: pods.Discover | None) -> None:
    """Raises UnusableFile."""
    if discover is not None:
        try:
            pods.place(discover)
        except ValueError as error:
            raise UnusableFile("discover", str(error)) from None

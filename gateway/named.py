"""What settings name, and whether it is there: profiles, files, a cluster's API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from replicas import pods, tls
from replicas.launch import profile

from .access import Unusable
from .files import check_appendable
from .pools import Pool


def check_profiles(alone: str | None, pools: Mapping[str, Pool]) -> None:
    """`alone`: that of --launch, if there is one. Raises Unusable."""
    named = [("profile", "", alone)] if alone is not None else []
    for setting, part, name in named + [("pools", f"{name}.profile", pool.profile) for name, pool in pools.items()]:
        try:
            profile.load(name)
        except ValueError as error:
            raise Unusable(setting, str(error), part) from None


def check_files(usage_log: Path | None, replica_ca: Path | None, chat_template: Path | None) -> None:
    """Raises Unusable."""
    if usage_log:
        try:
            check_appendable(usage_log)
        except OSError as error:
            raise Unusable(
                "usage_log",
                f"{usage_log} cannot be written: {error.strerror or error}. Its folder must exist, and the gateway may write there",
            ) from None
    if replica_ca:
        try:
            tls.context(replica_ca)
        except OSError as error:
            raise Unusable(
                "replica_ca",
                f"{replica_ca} cannot be read as certificates: {error.strerror or error}. "
                "Name a PEM file with the certificates of the authorities that signed the replicas'",
            ) from None
    if chat_template and not chat_template.is_file():
        raise Unusable(
            "chat_template",
            f"there is no file {chat_template}. "
            "Name the Jinja file the engines were started with, or leave it out to use the model's own",
        )


def check_cluster(discover: pods.Discover | None) -> None:
    """Raises Unusable."""
    if discover is not None:
        try:
            pods.place(discover)
        except ValueError as error:
            raise Unusable("discover", str(error)) from None

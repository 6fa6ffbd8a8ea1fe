"""What the settings say of who may ask, and over which connections, taken together."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ..tenants.key_file import KeyFileError, read
from ..tls import Certificate, CertificateError


class Unusable(ValueError):
    """The text says why this setting cannot be used, and what would be right."""

    def __init__(self, setting: str, why: str, part: str = ""):
        """`part`: what it is about within the setting, if not all of it."""
        super().__init__(why)
        self.setting, self.part = setting, part


class UnusableFile(Unusable):
    """What the setting says is right; the file that it names is not, or is not there."""


def check_keys(file: Path | None, classes: Collection[str], forward: bool) -> None:
    """Raises Unusable."""
    if file is not None:
        try:
            read(file, classes)
        except KeyFileError as error:
            raise UnusableFile("api_keys", str(error)) from None
    elif forward:
        raise Unusable(
            "forward_api_keys",
            "clients' keys are passed on anyway while this gateway asks for none. Leave it out, or name a file of keys with --api-keys",
        )


def check_tls(certificate: Path | None, key: Path | None, authorities: Path | None) -> None:
    """Raises Unusable."""
    if certificate is not None:
        try:
            Certificate(certificate, key, authorities)
        except CertificateError as error:
            raise UnusableFile(error.setting, str(error)) from None
    for name, path in (("tls_key", key), ("tls_client_ca", authorities)):
        if certificate is None and path is not None:
            raise Unusable(name, "it is of use with a certificate alone: name one with --tls-cert")

"""TLS towards clients: the gateway's certificate, reloaded when renewed, and the check of clients' certificates."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

from replicas.pipes import refuse_pipe

from .files import Followed

log = logging.getLogger("hitherto")


class CertificateError(ValueError):
    """Raised for a certificate or key file that cannot be used; `setting`: the setting that names the file."""

    def __init__(self, setting: str, why: str):
        super().__init__(why)
        self.setting = setting


class Certificate:
    """The gateway's certificate and the TLS context made from it.

    `key`: the file of the private key; None if the certificate's file contains the key. `authorities`: a file of
    certificate authorities, one of which must have signed a client's certificate; None if clients need no certificate.
    Raises CertificateError for a file that cannot be used.
    """

    def __init__(self, certificate: Path, key: Path | None = None, authorities: Path | None = None):
        self._certificate, self._key, self._authorities = certificate, key, authorities
        self._files = Followed([path for path in (certificate, key, authorities) if path is not None])
        # Servers keep this context; after a reload, `_choose` gives new connections the newer one.
        self.context = self._current = self._made()
        self.context.sni_callback = self._choose
        self.problem = ""  # why the files on disk cannot be used, or ""

    async def follow(self) -> None:
        """Reload the files whenever they change, until cancelled.

        Files that cannot be used are logged, and the last good certificate stays in use. Open connections keep theirs.
        """
        await self._files.run(self._renew)

    async def _renew(self) -> None:
        try:
            self._current = await asyncio.to_thread(self._made)
        except CertificateError as error:
            self.problem = str(error)
            log.error("TLS: the certificate known so far stays in use: %s", error)
            return
        self.problem = ""
        log.info("TLS: the certificate in %s is used from now on", self._certificate)

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Use the newest TLS context in this handshake; OpenSSL calls this even if the client sends no server name."""
        connection.context = self._current

    def _made(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        self._load(context)
        if self._authorities is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        for setting, path in (
            ("tls_key", self._key),
            ("tls_cert", self._certificate),
            ("tls_client_ca", self._authorities),
        ):
            try:
                if path is not None:
                    refuse_pipe(path)
                    path.open("rb").close()
            except OSError as error:
                why = f"{path} cannot be read: {error.strerror or error}. Name a PEM file"
                raise CertificateError(setting, why) from None

        def passphrase() -> str:
            raise CertificateError(
                "tls_key", f"{self._key or self._certificate} has a passphrase; name a key without one"
            )

        try:
            context.load_cert_chain(self._certificate, self._key, passphrase)
        except ssl.SSLError as error:
            what = "are no certificate and its key" if self._key else "is no certificate with its key"
            names = f"{self._certificate} and {self._key}" if self._key else f"{self._certificate}"
            reason = f" ({error.reason})" if error.reason else ""  # str(error) names a line of OpenSSL's source
            remedy = "Name PEM files: the certificate followed by those that lead to its authority, and its private key"
            raise CertificateError("tls_cert", f"{names} {what}{reason}. {remedy}") from None
        if self._authorities is not None:
            try:
                context.load_verify_locations(self._authorities)
            except OSError as error:
                remedy = "Name a PEM file with those of the authorities that sign clients'"
                why = f"{self._authorities} cannot be read as certificates: {error.strerror or error}. {remedy}"
                raise CertificateError("tls_client_ca", why) from None

    def status(self) -> dict[str, Any]:
        return {
            "certificate": str(self._certificate),
            "clients_need_certificates": self._authorities is not None,
            "problem": self.problem,
        }

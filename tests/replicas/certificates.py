"""Certificates for tests, made by openssl: an authority, and whom it vouches for."""

import shutil
import ssl
import subprocess

import pytest

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(folder, *arguments: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def authority(folder, name: str = "ca") -> None:
    """Its certificate is in `folder`/NAME.pem. From Python 3.13 on it has to say what its key is for."""
    _openssl(folder, "req", "-x509", *KEY, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name} of tests", "-days", "2",
             "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip


def issue(folder, name: str, names: str, ca: str = "ca") -> None:
    """A certificate for these (`DNS:...,IP:...`) in `folder`/NAME.pem, its key in NAME.key."""
    _openssl(folder, "req", *KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (folder / f"{name}.names").write_text(f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\n")
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-out", f"{name}.pem",
             "-days", "2", "-extfile", f"{name}.names")  # fmt: skip


def server_context(folder, names: str) -> ssl.SSLContext:
    """What a server of these (`DNS:...,IP:...`) uses; the authority's certificate is in `folder`/ca.pem."""
    authority(folder)
    issue(folder, "server", names)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    return context

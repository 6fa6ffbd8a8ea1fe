"""A gateway behind its own certificate: clients that believe it, its renewal, clients with certificates, and what is
said of files that cannot be used."""

import asyncio
import re
import shutil
import ssl
import subprocess
from contextlib import closing

import httpx
import pytest

from gateway import files
from gateway.cli import main
from gateway.tls import Certificate
from tests.replicas.certificates import authority, issue

from .running import running

CHAT = {"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    for ca in ("ca", "clients"):
        authority(folder, ca)
    issue(folder, "server", "IP:127.0.0.1")
    issue(folder, "renewed", "IP:127.0.0.1")
    issue(folder, "client", "DNS:client", "clients")
    issue(folder, "stranger", "DNS:stranger")
    return folder


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine().wait()


def client(url: str, folder, certificate: str = "") -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    if certificate:
        context.load_cert_chain(folder / f"{certificate}.pem", folder / f"{certificate}.key")
    return httpx.AsyncClient(base_url=url.replace("http:", "https:"), verify=context, timeout=30)


def serial_of(gateway, folder) -> str:
    """Of the certificate that a new connection gets."""
    port = int(gateway.url.rpartition(":")[2])
    return ssl.get_server_certificate(("127.0.0.1", port), ca_certs=folder / "ca.pem")


@pytest.mark.parametrize("workers", [1, 2])
async def test_clients_speak_https_and_a_renewed_certificate_is_used_at_once(engine, made, tmp_path, workers):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(made / "server.pem", cert)
    shutil.copy(made / "server.key", key)
    arguments = ("--tls-cert", str(cert), "--tls-key", str(key), "--replica-url", engine.url, "--workers", str(workers))
    async with running(*arguments) as gateway:
        await gateway.ready(1)
        assert b"serves https://" in b"".join(gateway.log)
        async with client(gateway.url, made) as kept:
            assert (await kept.post("/v1/chat/completions", json=CHAT)).status_code == 200
            async with kept.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
                lines = [line async for line in answer.aiter_lines()]
            assert "data: [DONE]" in lines
            shutil.copy(made / "renewed.pem", cert)  # without its key
            await gateway.until(lambda status: "are no certificate and its key" in status["tls"]["problem"])
            before = await asyncio.to_thread(serial_of, gateway, made)
            assert before == (made / "server.pem").read_text()
            shutil.copy(made / "renewed.key", key)
            await gateway.until(lambda status: status["tls"]["problem"] == "")

            async def renewed():
                while any([await asyncio.to_thread(serial_of, gateway, made) == before for _ in range(6)]):
                    await asyncio.sleep(0.05)

            await asyncio.wait_for(renewed(), 20)
            # a connection that is open goes on
            assert (await kept.post("/v1/chat/completions", json=CHAT)).status_code == 200
        async with httpx.AsyncClient(base_url=gateway.url) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get("/health")


async def test_an_authority_that_is_taken_out_lets_nobody_in_any_more(made, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOOK_SECONDS", 0.01)
    authorities = tmp_path / "authorities.pem"
    shutil.copy(made / "clients.pem", authorities)
    tls = Certificate(made / "server.pem", made / "server.key", authorities)

    async def greet(reader, writer) -> None:
        writer.write(b"hello")
        writer.close()

    async def lets_in(name: str) -> bool:
        context = ssl.create_default_context(cafile=made / "ca.pem")
        if name:
            context.load_cert_chain(made / f"{name}.pem", made / f"{name}.key")
        try:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=context)
            with closing(writer):
                return await reader.read() == b"hello"
        except (OSError, ssl.SSLError):
            return False

    async with await asyncio.start_server(greet, "127.0.0.1", 0, ssl=tls.context) as server:
        following = asyncio.create_task(tls.follow())
        try:
            assert [await lets_in(name) for name in ("client", "stranger", "")] == [True, False, False]
            shutil.copy(made / "ca.pem", authorities)  # which issued the stranger's
            async with asyncio.timeout(20):
                while not await lets_in("stranger"):
                    await asyncio.sleep(0.01)
            assert not await lets_in("client")
        finally:
            following.cancel()


def test_what_is_wrong_with_the_files_is_said_with_a_remedy(capsys, made, tmp_path):
    def told(*argv: str) -> str:
        assert main(["serve", "--replica-url", "http://127.0.0.1:1", *argv]) == 2
        return capsys.readouterr().err

    cert, key = ("--tls-cert", str(made / "server.pem")), ("--tls-key", str(made / "server.key"))
    assert re.search(r"flag --tls-key: .* name one with --tls-cert", told(*key))
    assert re.search(r"flag --tls-client-ca: .* --tls-cert", told("--tls-client-ca", str(made / "ca.pem")))
    assert re.search(
        r"flag --tls-cert: \S*none cannot be read: No such file", told("--tls-cert", str(tmp_path / "none"))
    )
    assert re.search(
        r"flag --tls-key: \S*none cannot be read: No such file", told(*cert, "--tls-key", str(tmp_path / "none"))
    )
    assert "are no certificate and its key" in told(*cert, "--tls-key", str(made / "renewed.key"))
    assert "is no certificate with its key" in told(*cert)
    (typo := tmp_path / "typo.pem").write_text("no certificate")
    assert f"{typo} is no certificate with its key. Name PEM files" in told("--tls-cert", str(typo))
    assert re.search(
        "flag --tls-client-ca: .*server.key cannot be read as certificates",
        told(*cert, *key, "--tls-client-ca", str(made / "server.key")),
    )


def test_a_key_with_a_passphrase_is_not_asked_for(capsys, made, tmp_path):
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", str(made / "server.key"), "-aes128", "-passout", "pass:secret", "-out", str(locked)],
        check=True, capture_output=True,
    )  # fmt: skip
    argv = ["serve", "--replica-url", "http://127.0.0.1:1", "--tls-cert", str(made / "server.pem"), "--tls-key"]
    assert main([*argv, str(locked)]) == 2
    assert "has a passphrase" in capsys.readouterr().err

"""A worker in another one's place serves what its siblings serve, whatever has become of the files meanwhile."""

import asyncio
import fcntl
import os
import shutil
import signal
import ssl
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from cachemap.background import Background
from gateway import files
from gateway.config import load
from gateway.tenants.keys import Keys
from gateway.tls import Certificate
from gateway.workers import last_good
from gateway.workers.last_good import LastGood, heard
from tests.gateway.http.talk import eventually
from tests.gateway.running import Running, running
from tests.gateway.test_tenants import CHAT, ENGINE_KEY, bearer, line
from tests.replicas.certificates import authority, issue

from .test_workers import pids, replaced

TOKEN, BROKEN = "the-token-of-the-admin-side", "- {name: "


@pytest.fixture
def folder(tmp_path):
    authority(tmp_path)
    issue(tmp_path, "server", "IP:127.0.0.1")
    (tmp_path / "keys").write_text(line("one"))
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "engine key").write_text(ENGINE_KEY)
    (tmp_path / "replica ca.pem").write_text((tmp_path / "ca.pem").read_text())
    (tmp_path / "logs").mkdir()
    return tmp_path


@asynccontextmanager
async def asking(gateway: Running, folder):
    """A client of which each request has a connection of its own, to whichever worker."""
    believes = ssl.create_default_context(cafile=folder / "ca.pem")
    async with httpx.AsyncClient(
        base_url=gateway.url.replace("http:", "https:"), verify=believes, headers={"connection": "close"}, timeout=30
    ) as client:
        yield client


async def test_a_worker_in_anothers_place_serves_as_its_siblings_though_all_files_are_broken(start_engine, folder):
    engine, keys = start_engine("--api-key", ENGINE_KEY).wait(), folder / "keys"
    arguments = {
        "--replica-url": engine.url, "--replica-ca": folder / "replica ca.pem", "--engine-api-key": f"@{folder / 'engine key'}",
        "--api-keys": keys, "--tls-cert": folder / "server.pem", "--tls-key": folder / "server.key",
        "--admin-token": f"@{folder / 'token'}", "--usage-log": folder / "logs" / "usage",
    }  # fmt: skip
    flags = [str(part) for pair in arguments.items() for part in pair]
    async with running("--workers", "2", *flags) as gateway, asking(gateway, folder) as client:
        gateway.admin.headers["authorization"] = f"Bearer {TOKEN}"
        status = await gateway.ready(1)
        keys.write_text(BROKEN)
        for name in ("server.pem", "replica ca.pem", "token", "engine key"):
            (folder / name).write_text("broken")
        shutil.rmtree(folder / "logs")
        (folder / "logs").touch()
        os.kill(pids(status)[0], signal.SIGKILL)
        status = await replaced(gateway, pids(status)[0])
        assert {one["state"] for one in status["replicas"]} == {"ready"}
        while min(one["requests"] for one in status["workers"]) < 2:
            assert (await client.post("/v1/chat/completions", json=CHAT, headers=bearer("one"))).status_code == 200
            status = await gateway.status()
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 401
        for file in ("api_keys", "tls"):  # which the new worker says as well
            async with asyncio.timeout(20):
                while await gateway.counted("hitherto_unusable_files", file=file) < 2:
                    await asyncio.sleep(0.05)
        keys.write_text(line("two"))
        await gateway.until(lambda status: not status["api_keys"]["problem"])
        for name, expected in [("one", 401), ("two", 200)] * 8:
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=bearer(name))
            assert answer.status_code == expected


async def test_copies_are_of_the_files_as_they_could_last_be_used(folder, monkeypatch):
    monkeypatch.setattr(files, "LOOK_SECONDS", 0.01)
    tried = []

    class TriedKeys(Keys):
        def __init__(self, *arguments):
            tried.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(last_good, "Keys", TriedKeys)
    keys, certificate, authorities = (folder / name for name in ("keys", "server.pem", "replica ca.pem"))
    given = {"api_keys": keys, "tls_cert": certificate, "tls_key": folder / "server.key", "replica_ca": authorities}
    last = LastGood(load({"workers": 2, **{name: str(path) for name, path in given.items()}}, {}).settings)
    following = last.follow(Background())

    def known() -> list[str]:
        return [*Keys(keys, (), heard(last.told()["copies"])["api_keys"]).names]

    try:
        assert known() == ["one"]
        keys.write_text(line("two"))
        await eventually(lambda: known() == ["two"])
        certificate.write_text("broken")
        authorities.write_text("broken")
        for wrong in (BROKEN, ""):
            tried.clear()
            keys.write_text(wrong)
            await eventually(lambda: tried)
            assert known() == ["two"]
        Certificate(certificate, folder / "server.key", None, heard(last.told()["copies"])["tls"])
        copy = Path(last.settings({"replica_ca": str(authorities)})["replica_ca"])
        assert copy.read_bytes() == (folder / "ca.pem").read_bytes()
        keys.unlink()
        keys.write_text(line("one") + "\n" + line("two"))
        await eventually(lambda: known() == ["one", "two"])
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        last.close()


def copies_of(path: Path) -> list[Path]:
    """Those in memory that this process has open."""
    opened = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists the folder
            opened.append(one.readlink())
    return [one for one in opened if str(one).startswith(f"/memfd:{path.name}")]


async def test_a_check_that_fails_leaves_no_copy_behind(folder, monkeypatch):
    keys = folder / "keys that cannot be checked"
    keys.write_text(line("one"))
    last = LastGood(load({"workers": 2, "api_keys": str(keys)}, {}).settings)

    class NoKeys:
        def __init__(self, *arguments):
            raise RuntimeError("a bug")

    monkeypatch.setattr(last_good, "Keys", NoKeys)
    try:
        with pytest.raises(RuntimeError):
            await last._files["api_keys"]._renew()
        assert len(copies_of(keys)) == 1
    finally:
        last.close()


def test_a_copy_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    """As when memory has run out."""
    file = tmp_path / "file that cannot be copied"
    file.write_text("text")
    create = os.memfd_create

    def create_sealed(name: str) -> int:
        number = create(name, os.MFD_ALLOW_SEALING)
        fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        return number

    monkeypatch.setattr(os, "memfd_create", create_sealed)
    assert last_good._Files([file]).made is None
    assert not copies_of(file)

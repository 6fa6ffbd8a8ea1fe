"""Replicas that operators add are there after a restart, however the gateway ended."""

import asyncio

import pytest

from gateway import cli
from gateway.settings import known_urls, load
from replicas.kept import KeptReplicas

from .running import running


async def test_added_and_removed_replicas_are_as_they_were_after_the_gateway_was_killed(tmp_path, engine):
    flags = ("--model", "sim", "--replica-file", str(tmp_path / "replicas"))
    added = {engine.url: 201, "http://127.0.0.3:9#model=m": 201, "http://127.0.0.3:10": 201, "ftp://x": 400}
    async with running(*flags) as gateway:
        for one, status in [*added.items(), (engine.url, 200)]:
            assert (await gateway.admin.post("/replicas", json={"url": one})).status_code == status
        await gateway.ready(1)
        assert (await gateway.admin.delete("/replicas/127.0.0.3:10")).status_code == 200
        gateway.process.kill()
        await gateway.process.wait()
    assert (tmp_path / "replicas").read_text() == f"{engine.url}\nhttp://127.0.0.3:9#model=m\n"
    async with running(*flags) as gateway:
        status = await gateway.ready(1)
        assert {one["id"] for one in status["replicas"]} == {engine.url.removeprefix("http://"), "127.0.0.3:9"}
        assert (await gateway.chat([{"role": "user", "content": "hello"}])).status_code == 200


async def test_a_role_that_was_changed_is_so_after_a_restart_and_the_log_names_both(tmp_path):
    given, changed = "http://127.0.0.3:9#role=both", "http://127.0.0.3:9#role=decode"
    flags = ("--model", "sim", "--replica-url", given, "--replica-file", str(tmp_path / "replicas"))

    async def role(gateway):
        (one,) = (await gateway.admin.get("/status")).json()["replicas"]
        return one["role"]

    async with running(*flags) as gateway:
        assert await role(gateway) == "both"
        assert (await gateway.admin.delete("/replicas/127.0.0.3:9")).status_code == 200
        added = await gateway.admin.post("/replicas", json={"url": "http://127.0.0.3:9", "role": "decode"})
        assert added.status_code == 201
    async with running(*flags) as gateway:
        assert await role(gateway) == "decode"
        (line,) = (line for line in b"".join(gateway.log).decode().splitlines() if given in line)
        assert changed in line and str(tmp_path / "replicas") in line


async def test_what_cannot_be_kept_is_not_added(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    async with running("--replica-file", str(folder / "replicas")) as gateway:
        folder.rmdir()
        refused = await gateway.admin.post("/replicas", json={"url": "http://127.0.0.3:9"})
        assert refused.status_code == 500 and "nothing was changed" in refused.json()["error"]["message"]
        assert (await gateway.status())["replicas"] == []


async def test_a_line_that_is_no_url_ends_the_start_and_is_named(tmp_path):
    """The same check tells `config` of this and other files that cannot be used, below."""
    (tmp_path / "replicas").write_text("http://127.0.0.3:9\n\nhttp://a b\n")
    with pytest.raises(AssertionError, match=r"flag --replica-file: .*replicas: replica URL 'http://a b'"):
        async with running("--replica-file", str(tmp_path / "replicas")):
            pass


def test_who_only_looks_at_the_settings_refuses_what_the_gateway_refuses_and_makes_no_file(capsys, tmp_path):
    def told(path) -> str:
        code = cli.main(["config", "--replica-file", str(path)])
        said = capsys.readouterr().err
        assert (code, said[:32]) == ((2, "hitherto: flag --replica-file: /") if said else (0, ""))
        return said

    assert not told(tmp_path / "replicas") and not [*tmp_path.iterdir()]
    assert "no folder/replicas cannot be used: No such file" in told(tmp_path / "no folder" / "replicas")
    assert f"{tmp_path} cannot be used: Is a directory" in told(tmp_path)
    (tmp_path / "replicas").write_bytes(b"\xff\xfe")
    assert "replicas is not UTF-8 text. Correct or remove that file" in told(tmp_path / "replicas")
    (tmp_path / "replicas").write_text("ftp://x\n")
    assert "scheme 'ftp' is not supported" in told(tmp_path / "replicas")


def test_a_file_that_can_be_read_and_not_written_tells_its_replicas_to_who_only_looks(tmp_path):
    (tmp_path / "replicas").write_text("http://127.0.0.3:9\n")
    (tmp_path / "replicas.new").mkdir()  # where it would be written
    config = load({"replica_file": tmp_path / "replicas"}, {}, without_files=True)
    assert "replicas cannot be used: Is a directory" in config.unusable["replica_file"] and not config.left_out
    assert known_urls(config.settings) == ("http://127.0.0.3:9",)


async def test_the_file_is_whole_at_every_moment(tmp_path):
    """Read while it is written to, and edited by hand in between."""
    kept, seen = KeptReplicas(tmp_path / "replicas"), []

    def write() -> None:
        for number in range(20):
            kept.add(f"http://gpu-{number}:8000")
        for number in range(0, 20, 2):
            kept.remove(f"gpu-{number}:8000")

    writing = asyncio.ensure_future(asyncio.to_thread(write))
    while not writing.done():
        seen.append(len(kept.urls()))
        await asyncio.sleep(0)
    await writing
    assert kept.urls() == tuple(f"http://gpu-{number}:8000" for number in range(1, 20, 2))
    peak = seen.index(max(seen))
    assert seen[:peak] == sorted(seen[:peak]) and seen[peak:] == sorted(seen[peak:], reverse=True)

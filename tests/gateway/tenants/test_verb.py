"""`hitherto key new`: the key once, and the line that lets its bearer in."""

import os
import pty
import re
import tempfile
import threading
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.tenants.key_file import Entry, KeyFileError, add, digest, read


def test_the_key_is_printed_once_and_its_line_is_read_back(capsys, tmp_path):
    assert main(["key", "new", "team-a", "--models", "m1,m2", "--class", "premium"]) == 0
    key, line = capsys.readouterr().out.splitlines()
    (tmp_path / "keys.yaml").write_text(line + "\n")
    tenant = read(tmp_path / "keys.yaml")[digest(key)]
    assert (tenant.name, tenant.models, tenant.qos_class) == ("team-a", {"m1", "m2"}, "premium")
    assert key not in line and tenant.cache_salt is None


CLASSES = "scheduler: {qos_classes: [{name: premium}, {name: free}]}\n"


@pytest.mark.parametrize("how", ["flag", "environment", "folder"])
def test_a_class_that_the_gateway_does_not_have_is_refused(capsys, tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    # Its key file is not there yet, which the gateway would refuse.
    file = tmp_path / ("hitherto.yaml" if how == "folder" else "other.yaml")
    file.write_text(CLASSES + "api_keys: keys.yaml\n")
    if how == "environment":
        monkeypatch.setenv("HITHERTO_CONFIG", str(file))
    flags = ["--config", str(file)] if how == "flag" else []
    assert main(["key", "new", "a", "--class", "gold", "--file", str(tmp_path / "keys.yaml"), *flags]) == 2
    said = capsys.readouterr()
    assert "flag --class: there is no class 'gold'" in said.err and "premium, free" in said.err and not said.out
    assert not (tmp_path / "keys.yaml").exists()
    assert main(["key", "new", "a", "--class", "free", *flags]) == 0
    assert "must be in scheduler" not in capsys.readouterr().err


def test_classes_that_cannot_be_read_are_refused_with_their_place(capsys, tmp_path):
    (tmp_path / "other.yaml").write_text("scheduler: 3\n")
    assert main(["key", "new", "a", "--class", "free", "--config", str(tmp_path / "other.yaml")]) == 2
    assert "other.yaml:1: scheduler: 3 is not a table" in capsys.readouterr().err


def test_limits_and_a_cache_of_its_own(capsys, tmp_path):
    file = tmp_path / "keys"
    salts = set()
    for name in ("a", "b"):
        assert main(["key", "new", name, "--own-cache", "--requests-per-minute", "60", "--file", str(file)]) == 0
        tenant = read(file)[digest(capsys.readouterr().out.strip())]
        assert tenant.limits.requests_per_minute == 60
        salts.add(tenant.cache_salt)
    assert len(salts) == 2 and all(len(one) >= 16 for one in salts)


@pytest.mark.parametrize(
    "first", ["", "- {name: a, sha256: %s}" % ("ab" * 32), '{"name": "a", "sha256": "%s"}\n' % ("ab" * 32)]
)
def test_a_key_is_added_to_a_file_that_is_followed(capsys, tmp_path, first):
    file = tmp_path / "keys"
    if first:
        file.write_text(first)
    for name in ("b", "c"):
        assert main(["key", "new", name, "--file", str(file)]) == 0
        (key,) = capsys.readouterr().out.split()
        assert read(file)[digest(key)].name == name
    before = file.read_text()
    assert main(["key", "new", "b", "--file", str(file)]) == 2
    said = capsys.readouterr().err
    number = next(at for at, line in enumerate(file.read_text().splitlines(), 1) if re.search(r"name\W+b\W", line))
    assert f"argument NAME: {file} has a tenant 'b' already, on line {number}; give another name, or, for a" in said
    assert "--file:" not in said and "stands on line" not in said
    assert file.read_text() == before and [*tmp_path.iterdir()] == [file]


HASH = "ab" * 32


def test_of_calls_at_the_same_time_none_is_lost(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"- {{name: first, sha256: {HASH}}}\n")
    start, failed = threading.Barrier(8), []

    def some(caller):
        start.wait()
        for at in range(5):
            try:
                add(file, Entry(name=f"t{caller}-{at}", sha256=(f"{5 * caller + at:064x}",)))
            except (KeyFileError, OSError) as error:
                failed.append(error)

    callers = [threading.Thread(target=some, args=(caller,)) for caller in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failed and len(read(file)) == 41 and [*tmp_path.iterdir()] == [file]


def test_what_a_link_points_to_is_added_to(tmp_path):
    """As Kubernetes mounts a secret, and as operators share one file."""
    (real := tmp_path / "real").mkdir()
    (real / "keys").write_text(f"- {{name: a, sha256: {HASH}}}\n")
    link = tmp_path / "keys"
    link.symlink_to(real / "keys")
    assert main(["key", "new", "b", "--file", str(link)]) == 0
    assert link.is_symlink() and len(read(real / "keys")) == 2


@pytest.mark.parametrize(
    "kind, said",
    [("loop", "Too many levels of symbolic links"), ("pipe", "no regular file"), ("device", "no regular file")],
)
def test_what_is_no_regular_file_is_not_added_to(capsys, tmp_path, kind, said):
    link = tmp_path / "keys"
    terminal, other = pty.openpty()
    with open(terminal), open(other):
        if kind == "pipe":
            os.mkfifo(tmp_path / "pipe")
        link.symlink_to({"loop": link, "pipe": tmp_path / "pipe", "device": os.ttyname(other)}[kind])
        before = {*tmp_path.iterdir()}
        assert main(["key", "new", "a", "--file", str(link)]) == 2
    printed = capsys.readouterr()
    assert f"flag --file: {link} cannot be added to: " in printed.err and said in printed.err and not printed.out
    assert {*tmp_path.iterdir()} == before and link.is_symlink()


def test_what_a_link_points_to_is_made(tmp_path):
    link = tmp_path / "keys"
    link.symlink_to(tmp_path / "real")
    assert main(["key", "new", "a", "--file", str(link)]) == 0
    assert link.is_symlink() and len(read(tmp_path / "real")) == 1


def test_the_file_stays_whose_it_was(tmp_path):
    """Else `sudo hitherto key new` takes it from the gateway's own user."""
    file = tmp_path / "keys"
    file.write_text(f"- {{name: a, sha256: {HASH}}}\n")
    file.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(file, 12345, 23456)
    before = file.stat()
    assert main(["key", "new", "b", "--file", str(file)]) == 0
    now = file.stat()
    assert (now.st_uid, now.st_gid, now.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    assert now.st_ino != before.st_ino


def test_where_the_owner_cannot_stay_nothing_is_written(capfd):
    if os.geteuid() != 0:
        pytest.skip("only root makes files of another's")
    with tempfile.TemporaryDirectory() as folder:  # which others may enter
        _add_as_another(Path(folder), capfd)


def _add_as_another(folder, capfd):
    folder.chmod(0o777)
    file = folder / "keys"
    file.write_text(before := f"- {{name: a, sha256: {HASH}}}\n")
    file.chmod(0o666)
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os._exit(main(["key", "new", "b", "--file", str(file)]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert "it belongs to another user" in capfd.readouterr().err
    assert file.read_text() == before and [*folder.iterdir()] == [file]


@pytest.mark.parametrize(
    "argv, said",
    [
        (["key", "new", "two words"], "argument NAME: 'two words' is no name"),
        (["key", "new"], "NAME"),
        (
            ["key", "new", "a", "--requests-per-minute", "0"],
            "flag --requests-per-minute: '0' is not a whole number of at least 1",
        ),
        (["key", "new", "a", "--models", ""], "flag --models: it names no model; leave it out to allow all"),
        (["key", "new", "a", "--models", ","], "flag --models: it names no model"),
        (["key", "new", "a", "--requests-per-minute", "x"], "requests-per-minute"),
        (["key", "nwe", "a"], "nwe"),
    ],
)
def test_bad_use_is_exit_code_2(capsys, argv, said):
    assert main(argv) == 2
    assert said in capsys.readouterr().err

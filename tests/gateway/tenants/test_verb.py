"""`hitherto key new`: the key once, and the line that lets its bearer in."""

import os
import pty
import re
import resource
import threading

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
    assert f"flag --file: {file}:" in said and f"the name 'b' stands on line {number} already" in said
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


@pytest.mark.parametrize("exists", [True, False])
def test_what_a_link_points_to_is_added_to_and_stays_whose_it_was(tmp_path, exists):
    """As Kubernetes mounts a secret; else `sudo hitherto key new` takes the file from the gateway's own user."""
    (real := tmp_path / "real").mkdir()
    file, link = real / "keys", tmp_path / "keys"
    link.symlink_to(file)
    if exists:
        file.write_text(f"- {{name: a, sha256: {HASH}}}\n")
        file.chmod(0o640)
        if os.geteuid() == 0:
            os.chown(file, 12345, 23456)
        before = file.stat()
    assert main(["key", "new", "b", "--file", str(link)]) == 0
    assert link.is_symlink() and len(read(file)) == 1 + exists
    now = file.stat()
    if exists:
        assert (now.st_uid, now.st_gid, now.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    else:
        assert now.st_mode & 0o777 == 0o600


def test_a_line_for_which_the_disk_has_no_room_is_not_left_in_parts(capsys, tmp_path):
    file, limits = tmp_path / "keys", resource.getrlimit(resource.RLIMIT_FSIZE)
    file.write_text(before := f"- {{name: a, sha256: {HASH}}}\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        assert main(["key", "new", "b", "--file", str(file)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "No space left" in capsys.readouterr().err and file.read_text() == before


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


@pytest.mark.parametrize(
    "argv, said",
    [
        (["new", "two words"], "argument NAME: 'two words' is not a name of"),
        (["new"], "NAME"),
        (["new", "a", "--requests-per-minute", "0"], "--requests-per-minute: '0' is not a whole number of at least 1"),
        (["new", "a", "--models", ","], "flag --models: an empty value is not the name of a model"),
        (["new", "a", "--requests-per-minute", "x"], "requests-per-minute"),
        (["nwe", "a"], "nwe"),
    ],
)
def test_bad_use_is_exit_code_2(capsys, argv, said):
    assert main(["key", *argv]) == 2
    assert said in capsys.readouterr().err

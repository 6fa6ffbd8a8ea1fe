"""`hitherto key new`: the key once, and the line that lets its bearer in."""

import pytest

from gateway.cli import main
from gateway.tenants.key_file import digest, read


def test_the_key_is_printed_once_and_its_line_is_read_back(capsys, tmp_path):
    assert main(["key", "new", "team-a", "--models", "m1,m2", "--class", "premium"]) == 0
    key, line = capsys.readouterr().out.splitlines()
    (tmp_path / "keys.yaml").write_text(line + "\n")
    tenant = read(tmp_path / "keys.yaml")[digest(key)]
    assert (tenant.name, tenant.models, tenant.qos_class) == ("team-a", {"m1", "m2"}, "premium")
    assert key not in line and tenant.cache_salt is None


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
    assert "the name 'b' stands on line" in capsys.readouterr().err
    assert file.read_text() == before and [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(
    "argv, said",
    [
        (["key", "new", "two words"], "name: 'two words' is no name"),
        (["key", "new"], "NAME"),
        (["key", "new", "a", "--requests-per-minute", "0"], "requests_per_minute: '0' is not valid"),
        (["key", "new", "a", "--requests-per-minute", "x"], "requests-per-minute"),
        (["key", "nwe", "a"], "nwe"),
    ],
)
def test_bad_use_is_exit_code_2(capsys, argv, said):
    assert main(argv) == 2
    assert said in capsys.readouterr().err

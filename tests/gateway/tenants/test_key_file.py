"""The file of API keys: what may stand in it, and what is said of one that cannot be used."""

import hashlib
import json
import os
import re

import pytest

from gateway.tenants.key_file import Entry, KeyFileError, add, digest, new_key, read
from gateway.tenants.tenant import Tenant

A, B = hashlib.sha256(b"key of a").hexdigest(), hashlib.sha256(b"key of b").hexdigest()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.yaml"


def test_a_yaml_list_and_json_lines_say_the_same(file):
    given = [{"name": "a", "sha256": A, "models": ["m"], "class": "premium"}, {"name": "b", "sha256": [B, "0" * 64]}]
    file.write_text("# ours\n" + "".join(f"- {json.dumps(one)}\n" for one in given))
    as_yaml = read(file)
    file.write_text("\n".join(map(json.dumps, given)))
    assert read(file) == as_yaml
    assert as_yaml[digest("key of a")] == Tenant("a", "premium", frozenset({"m"}))
    assert as_yaml[digest("key of b")] is as_yaml[bytes(32)] == Tenant("b")


def test_keys_are_long_and_no_two_are_alike():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100 and all(re.fullmatch(r"sk-hitherto-[\w-]{43}", one) for one in keys)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "holds no key, so nobody could ask anything. `hitherto key new"),
        ("- {name: , sha256: x}", "1: name: an empty value is not a name of 1 to 64"),
        ("- {name: a, sha256: }", "1: sha256: is missing or wrong: .*`hitherto key new NAME` makes"),
        ("- {name: a}", "1: sha256: is missing or wrong: "),
        ("- {name: a, sha256: 12345}", "1: sha256: .* 64 hexadecimal digits in quotes"),
        ("- {name: a, sha256: [12345]}", "1: sha256: .* 64 hexadecimal digits in quotes"),
        ("- {name: a, sha256: []}", "1: sha256: "),
        ("a: b", "1: expected a list of tenants, found a mapping"),
        ("- {name: a", "1: not YAML: .*. Check quotes and indentation there$"),
        ('{"name": "a", "sha256": "%s"}\n{"name"' % A, "2: not JSON"),
        ("- just text", "1: expected a mapping like"),
        (f"- {{name: a, sha256: {A}}}\n\n- {{name: a, sha256: {B}}}", "3: the name 'a' stands on line 1 already"),
        (f"- {{name: a, sha256: {A}}}\n- {{name: b, sha256: {A}}}", "2: this hash stands on line 1 already"),
        (f"- {{sha256: {A}}}", "1: name: is missing"),
        (f"- {{name: 'a b', sha256: {A}}}", "1: name: 'a b' is not a name of"),
        (f"- {{name: a, sha256: {A}, modles: [m]}}", "unknown field. Did you mean 'models'"),
        (f"- {{name: a, sha256: {A}, models: []}}", "1: models: an empty value is not the name of a model"),
        (f"- {{name: a, sha256: {A}, models: ['']}}", "1: models: an empty value is not the name of a model"),
        (f"- {{name: a, sha256: {A}, requests_per_minute: 0}}", "'0' is not a whole number of at least 1"),
        (f"- {{name: a, sha256: {A}, tokens_per_day: yes}}", "1: tokens_per_day: 'True' is not a whole number"),
        (f"- {{name: a, sha256: {A}, cache_salt: short}}", "1: cache_salt: .* 16 to 128"),
    ],
)
def test_what_cannot_be_used_is_said_with_its_place_and_a_remedy(file, text, said):
    file.write_text(text)
    with pytest.raises(KeyFileError) as caught:
        read(file)
    assert str(file) in str(caught.value) and re.search(said, str(caught.value)), caught.value


@pytest.mark.parametrize("entry", ["{name: a, sha256: %s}", "{name: a, key: %s}", "{name: a, sha256: [%s]}"])
def test_a_key_that_was_written_into_the_file_is_not_repeated(file, entry):
    key = new_key()
    file.write_text("- " + entry % key)
    with pytest.raises(KeyFileError) as caught:
        read(file)
    assert key not in str(caught.value) and "hitherto key new" in str(caught.value)


def test_a_file_that_cannot_be_read_is_not_waited_for(file):
    with pytest.raises(KeyFileError, match="cannot be read: No such file"):
        read(file)
    os.mkfifo(pipe := file.with_name("pipe"))
    file.write_bytes(b"\xff\xfe")
    for path, said in ((file, "not UTF-8"), (pipe, "no regular file"), (file.parent, "no regular file|Is a directory")):
        with pytest.raises(KeyFileError, match=said):
            read(path)
        with pytest.raises(KeyFileError, match=f"cannot be added to: .*({said})"):
            add(path, Entry(name="a", sha256=digest(new_key()).hex()))

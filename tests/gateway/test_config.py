"""Settings: where they come from, who wins, and what is said when one is wrong."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import policies
from gateway.settings import ConfigError, Settings, load, read_token
from gateway.settings.fields import parse_bytes
from loadgen.plan import units
from replicas.sizes import show_bytes

pytestmark = pytest.mark.usefixtures("empty_folder")


def wrong(**options) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**{"environ": {}, **options})
    return str(caught.value)


def test_defaults_need_no_source():
    config = load(environ={})
    assert config.settings == Settings()
    assert set(config.sources.values()) == {"default"}


def test_flag_beats_environment_beats_file_beats_default(empty_folder):
    file = empty_folder / "my.yaml"
    file.write_text("# mine\nport: 1\nadmin-port: 2\nretries: 3\n")
    environ = {"HITHERTO_PORT": "11", "HITHERTO_ADMIN_PORT": "12"}
    config = load(flags={"port": "21"}, environ=environ, file=file)
    assert (config.settings.port, config.settings.admin_port, config.settings.retries) == (21, 12, 3)
    assert config.sources["port"] == "flag --port"
    assert config.sources["admin_port"] == "environment HITHERTO_ADMIN_PORT"
    assert config.sources["retries"] == f"file {file}:4"
    assert config.sources["policy"] == "default"


def test_file_in_the_folder_is_found_and_the_environment_may_name_another(empty_folder):
    (empty_folder / "hitherto.yaml").write_text("port: 1234\n")
    (empty_folder / "other.yaml").write_text("port: 4321\n")
    assert load(environ={}).sources["port"] == "file hitherto.yaml:1"
    assert load(environ={"HITHERTO_CONFIG": "other.yaml"}).settings.port == 4321


def test_printed_configuration_reads_back_to_the_same_settings(empty_folder):
    urls = ["http://a:1#events=tcp://a:5557,replay=tcp://a:5558", "http://[::1]:80"]
    config = load(
        flags={"replica_url": urls, "cache_budget": "1.5GiB", "policy": "random", "model": "a: b # c"}, environ={}
    )
    (empty_folder / "again.yaml").write_text(config.to_yaml())
    again = load(environ={}, file="again.yaml")
    assert again.settings == config.settings
    assert set(again.sources.values()) == {f"file again.yaml:{n}" for n in range(1, len(Settings.model_fields) + 1)}


def test_every_line_of_the_printed_configuration_names_its_source():
    config = load(flags={"port": "9"}, environ={"HITHERTO_LAUNCH": "4"})
    lines = dict(line.split(": ", 1) for line in config.to_yaml().splitlines())
    assert set(lines) == set(Settings.model_fields)
    assert lines["port"].endswith("# flag --port") and lines["port"].startswith("9 ")
    assert lines["launch"].endswith("# environment HITHERTO_LAUNCH")


def test_unknown_name_in_the_file_has_file_line_and_suggestion(empty_folder):
    (empty_folder / "hitherto.yaml").write_text("port: 1\npolcy: random\n")
    assert wrong() == "file hitherto.yaml:2: unknown setting 'polcy'. Did you mean 'policy'?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port: 1\nport: 2\n", "hitherto.yaml:2: 'port' is set twice, first on line 1"),
        ("- port\n", "hitherto.yaml:1: expected lines like 'port: 8080'"),
        ("port: [1\n", "hitherto.yaml:1: not YAML"),
        ("host: x\nport: [1\n\n", "hitherto.yaml:2: not YAML"),
        ("a: !!python/object:os.system x\n", "hitherto.yaml:1: unknown setting 'a'"),
        ("port: !!python/name:os.system x\n", "hitherto.yaml:1: not YAML"),
        ("port: 1\nhost: \0\n", "hitherto.yaml:2: not YAML: "),
        ("host: x\nport: 2020-13-45\n", "hitherto.yaml:2: not YAML: month must be in 1..12"),
        ("port: !!int abc\n", "hitherto.yaml:1: not YAML: invalid literal"),
        ("port: " + 5000 * "9", "hitherto.yaml:1: not YAML: "),
        ("port: " + 3000 * "[", "hitherto.yaml:1: not YAML: it is nested too deeply"),
        ("host: x\nport: yes\n", "file hitherto.yaml:2: port: its value is yes or no to YAML; write a number, or"),
        ("block_size: yes\n", "block_size: its value is yes or no to YAML"),
        ("hung_after_s: yes\n", "hung_after_s: its value is yes or no to YAML"),
        ("cache_budget: yes\n", "cache_budget: its value is yes or no to YAML"),
        ("replica_url: true\n", "hitherto.yaml:1: replica_url: its value is yes or no to YAML"),
        ("cache_budget: " + 400 * "9" + ".5GiB", "is more than any machine has; write a size like 512MiB"),
        ("cache_budget: 99999999999GiB\n", "'99999999999GiB' is more than any machine has"),
        ("cache_budget: 64KiB\n", "cache_budget: 64KiB is not a size of at least 1MiB, like 512MiB or 5G"),
        ("request_budget: " + 30 * "9" + "\n", "is more than any machine has"),
        ("port: seven\n", "file hitherto.yaml:1: port: 'seven' is not a whole number. It takes port"),
        ("port: 70000\n", "70000 is not a whole number up to 65535"),
        ("header_timeout_s: 0\n", "0 is not a number of seconds above 0"),
        ("header_timeout_s: .inf\n", "inf is not a finite number"),
        ("header_timeout_s: -1\n", "-1 is not a number of seconds above 0"),
        ("max_body_bytes: -1\n", "max_body_bytes: -1 is not a size above 0, like 512MiB"),
        ("continue_budget: 0\n", "continue_budget: 0 is not a size above 0, like 512MiB"),
        ("request_budget: [1]\n", "request_budget: [1] is not a size above 0, like 512MiB"),
        ("host: 8080\n", "host: 8080 is not text (put it in quotes)"),
        ("host:\n", "host: it has no value, where text (put it in quotes) belongs. It takes address clients"),
        ("port:\n", "port: it has no value, where a whole number belongs. It takes port clients"),
        ("tls_cert: [a]\n", "tls_cert: ['a'] is not what belongs there. It takes PEM file with the gateway's"),
        ("host: {a: b}\n", "host: {'a': 'b'} is not text (put it in quotes). It takes address clients connect to"),
        ("access_log: maybe\n", "'maybe' is not true or false"),
        ("replica_url: 8000\n", "8000 is not a list. It takes engines that run already: http"),
        ("cache_budget: 3 parsecs\n", "'3 parsecs' is not a size; write a number with its unit, like 512MiB or 5G"),
    ],
)
def test_bad_files(empty_folder, text, expected):
    (empty_folder / "hitherto.yaml").write_text(text)
    assert expected in wrong()


FULL = """
host: 127.0.0.1
port: 8080
admin_allow_host: [gateway.example]
replica_url: [http://a:1]
discover: {selector: app=vllm, namespace: n, url: 'http://{ip}:8000', api: 'http://127.0.0.1:1', labels: {role: r, model: m}}
pools: {p: {profile: sim, launch: 1, role: both}}
policy: least_time
shadow: [random]
cache_budget: 512MiB
slo: {ttft: 2s, tpot: 50ms}
scheduler:
  qos_classes:
    - {name: a, reserved_fraction: 0.1, priority: 3, slo: {ttft: 1s}, when_full: [degrade, wait], max_tokens_floor: 3}
request_router:
  routes: [{match: {header: 'x: y', key: k, model: m, path: /v1}, class: a}]
admission: {when_full: [wait, reject], max_tokens_floor: 3, engine_wait: 1s, max_wait: 2s, max_requests: 3, max_bytes: 1MiB,
  tenant_header: x-tenant, control_window: 10s}
deployment: d
header_timeout_s: 3
allow_path: [/v1/x]
log_level: info
access_log: true
"""
# What is as if it were not there where it is empty.
OPTIONAL = (
    "discover slo scheduler request_router admission pools.p.role discover.namespace discover.api "
    "request_router.routes.0.match scheduler.qos_classes.0.slo".split()
)


def places(value, path=()):
    """Where in a file values are: the keys and indexes that lead there."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


def dotted(path) -> str:
    return ".".join(map(str, path))


NEEDED = [path for path in places(yaml.safe_load(FULL))[1:] if dotted(path) not in OPTIONAL]


@pytest.mark.parametrize("path", NEEDED, ids=dotted)
def test_a_value_that_is_empty_is_called_so_at_its_place(empty_folder, path):
    given = yaml.safe_load(FULL)
    at = given
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = None
    (empty_folder / "hitherto.yaml").write_text(yaml.safe_dump(given).replace("null", ""))
    said, name = wrong(), next(key for key in reversed(path) if isinstance(key, str))
    assert "None" not in said and "\n" not in said
    assert re.search(rf"{name}(\[\d\])?: ", said)
    assert "has no value" in said or "it must be a list" in said


def test_file_that_is_not_there_or_not_text(empty_folder):
    assert "missing.yaml: cannot read the configuration: No such file" in wrong(file="missing.yaml")
    (empty_folder / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8 text" in wrong(file="bad.yaml")
    os.mkfifo(empty_folder / "pipe")
    assert "pipe: cannot read the configuration: it is a pipe through which nothing comes" in wrong(file="pipe")


@pytest.mark.parametrize(
    "setting",
    "admin_token engine_api_key replica_file tls_cert tls_key tls_client_ca api_keys chat_template".split(),
)
def test_a_named_pipe_is_refused_and_not_waited_for(empty_folder, setting):
    os.mkfifo(empty_folder / "pipe")
    (empty_folder / "cert.pem").write_text("no certificate")
    secret = setting in ("admin_token", "engine_api_key")
    given = {"tls_cert": "cert.pem"} if setting.startswith("tls") else {}
    said = wrong(flags={**given, setting: "@pipe" if secret else "pipe"})
    assert said.startswith(f"flag --{setting.replace('_', '-')}: ")
    assert re.search(r"it is a pipe|it is no regular file", said)


def test_the_usage_log_may_be_a_pipe(empty_folder):
    os.mkfifo(empty_folder / "pipe")
    assert load({"usage_log": "pipe"}, environ={}).settings.usage_log == Path("pipe")


def test_empty_file_is_fine(empty_folder):
    (empty_folder / "hitherto.yaml").write_text("# nothing yet\n")
    assert load(environ={}).settings == Settings()


def test_misspelt_environment_variable_is_an_error_and_foreign_ones_are_not():
    said = wrong(environ={"HITHERTO_POLCY": "random"})
    assert said == "environment HITHERTO_POLCY: unknown setting. Did you mean HITHERTO_POLICY?"
    kubernetes = {
        "HITHERTO_PORT": "tcp://10.0.0.1:8080", "HITHERTO_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "HITHERTO_PORT_8080_TCP_PORT": "8080", "HITHERTO_SERVICE_HOST": "10.0.0.1", "HITHERTO_DATA": "/d",
    }  # fmt: skip
    assert load(environ=kubernetes).settings == Settings()


def test_an_empty_variable_is_unset(empty_folder):
    """As `${X:-}` in a compose file makes it."""
    empty = {f"HITHERTO_{name.upper()}": "" for name in (*Settings.model_fields, "config", "polcy")}
    config = load(environ=empty)
    assert config.settings == Settings() and set(config.sources.values()) == {"default"}
    Path("hitherto.yaml").write_text("retries: 7")
    assert load(environ=empty).settings.retries == 7


def test_bad_environment_value_names_the_variable():
    said = wrong(environ={"HITHERTO_POLICY": "leasttime"})
    assert said.startswith("environment HITHERTO_POLICY: 'leasttime' is none of") and "mean 'least_time'?" in said


def test_several_errors_are_all_told():
    text = wrong(flags={"port": "x", "policy": "y"})
    assert [line.split(":")[0] for line in text.splitlines()] == ["flag --port", "flag --policy"]


def test_ports_must_differ():
    assert "cannot share port 8080. Give --admin-port another one, like 8081" in wrong(flags={"admin_port": "8080"})
    assert load(flags={"port": "0", "admin_port": "0"}, environ={}).settings.port == 0


TOKEN = "0123456789abcdef"


def test_without_a_token_the_admin_side_is_for_this_machine_alone(tmp_path):
    for host in ("0.0.0.0", "::", "", "10.0.0.7", "gateway.example", "localhost.example"):
        text = wrong(flags={"admin_host": host})
        assert text.startswith(f"flag --admin-host: {host or 'every address'} can be reached")
        assert "--admin-token @FILE" in text
        assert load(flags={"admin_host": host}, environ={"HITHERTO_ADMIN_TOKEN": TOKEN}).settings.admin_host == host
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert load(flags={"admin_host": host}, environ={}).settings.admin_token is None


def test_the_token_is_in_a_file_or_the_environment_and_on_no_command_line(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    both = load(flags={"admin_token": f"@{file}"}, environ={"HITHERTO_ADMIN_TOKEN": "x" * 16})
    assert read_token(both.settings) == TOKEN
    assert read_token(load(environ={"HITHERTO_ADMIN_TOKEN": TOKEN}).settings) == TOKEN
    for token in (TOKEN, "abc", "a b"):
        assert "everybody on this machine can read a command line" in wrong(flags={"admin_token": token})
    assert "No such file" in wrong(flags={"admin_token": "@/nowhere"})
    assert "it is a device, and no file" in wrong(flags={"admin_token": "@/dev/zero"})
    for name in ("token", "a-name-of-sixteen-characters-or-more"):
        (tmp_path / name).write_text(TOKEN)
        assert f"write @{tmp_path / name}" in wrong(flags={"admin_token": str(tmp_path / name)}), "the @ was forgotten"
    for nothing in ("", "\n", "short", "two words of some length", "ä" * 20):
        file.write_text(nothing)
        assert "openssl rand -hex 32" in wrong(flags={"admin_token": f"@{file}"}), nothing
        assert not nothing or "openssl rand -hex 32" in wrong(environ={"HITHERTO_ADMIN_TOKEN": nothing})


def test_the_token_is_never_shown(tmp_path):
    config = load(environ={"HITHERTO_ADMIN_TOKEN": TOKEN})
    assert TOKEN not in config.to_yaml() + repr(config) + json.dumps(config.plain())
    (line,) = [line for line in config.to_yaml().splitlines() if line.startswith("admin_token")]
    assert "********" in line and "environment HITHERTO_ADMIN_TOKEN" in line, "that there is one is shown"
    file = tmp_path / "settings.yaml"
    file.write_text(config.to_yaml())
    assert read_token(load(file=file, environ={"HITHERTO_ADMIN_TOKEN": TOKEN}).settings) == TOKEN
    assert "the secret is hidden here" in wrong(file=file)
    for value in (f"{TOKEN} {TOKEN}", "[1234567890123456]", "1234567890123456"):
        file.write_text(f"admin_token: {value}\n")
        assert "12345678" not in wrong(file=file)
    file.write_text(f"admin_token: '@{file}'\n")
    assert f"'@{file}'" in wrong(file=file) or str(file) in wrong(file=file), "where the token is may be told"


def test_the_password_in_the_redis_url_is_never_shown_and_what_is_shown_is_not_taken_for_it(tmp_path, empty_folder):
    url = "redis://me:hunter2@h:1/2"
    (tmp_path / "file.yaml").write_text(f"redis_url: {url}\n")
    file, environ = tmp_path / "file.yaml", {"HITHERTO_REDIS_URL": url}
    for config in (load({"redis_url": url}), load(environ=environ), load(file=file)):
        assert config.settings.redis_url == url
        shown = config.to_yaml()
        assert "hunter2" not in shown + repr(config) + json.dumps(config.plain())
        (line,) = [line for line in shown.splitlines() if line.startswith("redis_url")]
        assert "redis://me:********@h:1/2" in line and config.sources["redis_url"] in line and "password hidden" in line
        (tmp_path / "shown.yaml").write_text(shown)
        with pytest.raises(ConfigError, match="the password is hidden here"):
            load(file=tmp_path / "shown.yaml")
    assert "hidden" not in load({"redis_url": "redis://h"}).to_yaml()
    assert "redis://[ADDRESS]:PORT" in (said := wrong(flags={"redis_url": "redis://:pw@[::1"})) and "pw" not in said
    assert "it is no URL" in wrong(flags={"redis_url": "@/tmp/file"})
    assert "HITHERTO_REDIS_URL" in wrong(flags={"redis_url": "/tmp/file"})


def test_host_names_of_the_admin_side():
    assert load({"admin_allow_host": "a,b.example c_d"}, {}).settings.admin_allow_host == ("a", "b.example", "c_d")
    for name in ("http://a", "a:8081", "a/b", "*"):
        assert "is not a host name" in wrong(flags={"admin_allow_host": name})


def test_the_policies_offered_are_the_policies_there_are():
    assert set(Settings.model_fields["policy"].annotation.__args__) == set(policies.NAMES)
    assert Settings().policy == policies.DEFAULT


def test_policies_in_shadow_in_one_string_or_a_list(empty_folder):
    (empty_folder / "hitherto.yaml").write_text("shadow: [round_robin, least_load]\n")
    assert load(environ={}).settings.shadow == ("round_robin", "least_load")
    assert load(environ={"HITHERTO_SHADOW": "round_robin, least_load"}).settings.shadow == ("round_robin", "least_load")
    assert load(flags={"shadow": "random"}, environ={}).settings.shadow == ("random",)
    legs = load(flags={"shadow": "legs:over:8192,legs:never"}, environ={}).settings.shadow
    assert legs == ("legs:over:8192", "legs:never")


def test_what_cannot_be_in_shadow_is_said():
    assert "Did you mean 'least_load'?" in wrong(flags={"shadow": "least_laod"})
    assert "shadow: 'over:x' is no rule for legs; there are seconds, pauses:N, always, over:N" in wrong(
        flags={"shadow": "legs:over:x"}
    )
    assert "shadow: legs:seconds is the policy that acts" in wrong(flags={"shadow": "legs:seconds"})
    assert "shadow: random is given twice" in wrong(flags={"shadow": "random,random"})
    assert wrong(flags={"shadow": "random,least_time"}).startswith("flag --shadow: least_time is the policy that acts")


def test_chat_template_must_be_a_text_file(empty_folder):
    assert "nowhere.jinja cannot be used: No such file" in wrong(flags={"chat_template": "nowhere.jinja"})
    (empty_folder / "bad.jinja").write_bytes(b"\xff")
    said = wrong(flags={"chat_template": "bad.jinja"})
    assert said.startswith("flag --chat-template: bad.jinja cannot be used: it is not UTF-8 text. Name the Jinja file")
    (empty_folder / "t.jinja").write_text("x")
    assert load(flags={"chat_template": "t.jinja"}, environ={}).settings.chat_template.name == "t.jinja"


@pytest.mark.parametrize(
    "setting", ["usage_log", "replica_file", "api_keys", "tls_cert", "replica_ca", "model", "host", "pools", "discover"]
)
def test_a_name_with_a_nul_is_refused_in_words(empty_folder, setting):
    inside = {"pools": "{p: {profile: x, launch: 1, model: NAME}}", "discover": "{namespace: NAME}"}
    value = inside.get(setting, "NAME").replace("NAME", r'"a\0b"')
    (empty_folder / "hitherto.yaml").write_text(f"{setting}: {value}\n")
    assert wrong() == f"file hitherto.yaml:1: {setting}: there is a NUL character in it; leave it out"


@pytest.mark.parametrize(
    "setting", ["usage_log", "replica_file", "api_keys", "tls_cert", "replica_ca", "chat_template"]
)
def test_a_name_that_is_too_long_is_refused_in_words(setting):
    assert "File name too long" in wrong(flags={setting: 300 * "x"})


def test_urls_in_one_string():
    first = "http://a:1#events=tcp://a:2,replay=tcp://a:3"
    environ = {"HITHERTO_REPLICA_URL": f"{first}, http://b:1/v1/  http://c,http://d"}
    assert load(environ=environ).settings.replica_url == (first, "http://b:1/v1/", "http://c", "http://d")


@pytest.mark.parametrize(
    "url", ["ftp://a:1", "http://a:port", "http://", "http://a:1/v1/chat/completions", "http://a:1#event=tcp://b:2"]
)
def test_bad_replica_urls_are_told_with_their_place(url):
    text = wrong(flags={"replica_url": [url]})
    assert text.startswith("flag --replica-url: replica URL ") and "\n" not in text
    assert url.partition("#")[2].partition(",")[0] in text


def test_a_replica_given_twice_is_refused():
    assert "a:80 is given twice; name each replica once" in wrong(flags={"replica_url": ["http://a", "http://a:80/v1"]})


# Settings that are sizes, as a file or the environment has them, and a flag of `hitherto plan`.
SETTINGS = ("cache_budget", "continue_budget", "max_body_bytes", "request_budget")


@pytest.mark.parametrize(
    "text", ["5G", "5GB", "5GiB", "5Gi", "5 gb", "5120M", "5242880k", "5368709120B", "0.0048828125T"]
)
def test_a_size_is_read_in_one_way_everywhere(empty_folder, text):
    size = 5 * 2**30
    settings = load(dict.fromkeys(SETTINGS, text), environ={}).settings
    assert {getattr(settings, name) for name in SETTINGS} == {size}
    assert load({"admission": {"max_bytes": text}}, environ={}).settings.admission.max_bytes == size
    assert units.size(text) == size


@given(st.integers(1, 2**45))
def test_shown_sizes_read_back_exactly(count):
    assert parse_bytes(show_bytes(count)) == count


@pytest.mark.parametrize("name", ["", "a b", "x" * 65])
def test_a_name_that_is_none_is_said_to_be_so_in_words(name):
    with pytest.raises(ConfigError) as refused:
        load({"deployment": name}, {})
    said = str(refused.value)
    assert said.startswith(f"flag --deployment: {name!r} is no name: write 1 to 64 letters")

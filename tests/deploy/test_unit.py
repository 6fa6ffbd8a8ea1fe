"""deploy/hitherto.service: systemd takes it, and it fits what the gateway does."""

import configparser
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import cli
from gateway.settings import Settings
from gateway.tenants.key_file import read as read_keys
from gateway.tls import Certificate
from tests.replicas.certificates import authority, issue

FILE = Path(__file__).parents[2] / "deploy" / "hitherto.service"


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str
    unit.read_string(FILE.read_text())
    return dict(unit["Service"])


def with_tls() -> str:
    """The unit with the lines for TLS that it has as comments."""
    return re.sub("^#(?=(?:LoadCredential|Environment)=)", "", FILE.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("text", [FILE.read_text(), with_tls()], ids=["as it is", "with TLS"])
def test_systemd_takes_it(tmp_path, text):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    unit = tmp_path / FILE.name
    unit.write_text(text.replace("/opt/hitherto/bin/hitherto", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_its_lines_for_tls_name_files_that_the_gateway_reads(tmp_path, monkeypatch):
    lines = [line.partition("=")[::2] for line in with_tls().splitlines() if line not in FILE.read_text().splitlines()]
    copies = {
        value.partition(":")[0]: tmp_path / value.partition(":")[0] for key, value in lines if key == "LoadCredential"
    }
    (places,) = (value for key, value in lines if key == "Environment")
    authority(tmp_path)
    issue(tmp_path, "server", "DNS:localhost")
    for copy, made in zip(copies.values(), ("server.pem", "server.key"), strict=True):
        (tmp_path / made).rename(copy)
        copy.chmod(0o400)  # as systemd makes them
    for place in places.replace("%d", str(tmp_path)).split():
        monkeypatch.setenv(*place.split("=", 1))
    settings = cli.load_config(cli._parse(["serve", "--replica-url", "http://gpu1:8000"])).settings
    assert {Path(settings.tls_cert), Path(settings.tls_key)} == {*copies.values()}
    Certificate(Path(settings.tls_cert), Path(settings.tls_key))


def test_its_command_is_one_that_the_gateway_takes(service, tmp_path):
    program, *words = service["ExecStart"].split()
    file = tmp_path / "hitherto.yaml"
    file.write_text("replica_url: http://gpu1:8000\n")
    args = cli._parse([word.replace("/etc/hitherto/hitherto.yaml", str(file)) for word in words])
    assert args.verb == "serve" and cli.load_config(args).settings.replica_url == ("http://gpu1:8000",)
    assert Path(program).name == "hitherto"


def test_wrong_settings_are_not_tried_again_and_a_stop_waits_for_the_drain(service):
    assert service["Restart"] == "always" and service["RestartPreventExitStatus"] == str(cli.USAGE_ERROR)
    assert float(service["TimeoutStopSec"]) > Settings().drain_timeout_s


def test_what_it_may_write_is_where_it_writes(service):
    cache = "/var/cache/" + service["CacheDirectory"]
    places = dict(word.split("=", 1) for word in service["Environment"].split())
    assert places["XDG_CACHE_HOME"] == cache and places["HF_HOME"].startswith(cache + "/")


def test_the_key_file_made_as_its_top_says_is_readable_to_the_services_own_user(tmp_path, monkeypatch):
    """`DynamicUser` is neither the file's owner nor in its group."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "etc"
    said = [line.removeprefix("#   ") for line in FILE.read_text().splitlines() if line.startswith("#   ")]
    commands = [shlex.split(line.replace("/etc/hitherto", str(folder))) for line in said if "/etc/hitherto" in line]
    for program, *words in commands:
        if program == "install":
            subprocess.run([program, *words], check=True, timeout=60)
        elif program.endswith("/hitherto"):
            assert cli.main(words) == 0
    file = folder / "keys.yaml"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644 and stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert [tenant.name for tenant in read_keys(file).values()] == ["team-a"]

"""deploy/hitherto.service: systemd takes it, and it fits what the gateway does."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import cli
from gateway.config import Settings

FILE = Path(__file__).parents[2] / "deploy" / "hitherto.service"


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str
    unit.read_string(FILE.read_text())
    return dict(unit["Service"])


def test_systemd_takes_it(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    unit = tmp_path / FILE.name
    unit.write_text(FILE.read_text().replace("/opt/hitherto/bin/hitherto", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


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

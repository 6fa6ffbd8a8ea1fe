"""compose.yaml: valid by the compose specification, and true about this repository."""

import json
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml

from gateway import cli
from gateway.config import Settings, read_token
from gateway.ops import traces
from replicas.replica import parse_url

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def schema() -> dict:
    """The compose specification's own schema, as the package check-jsonschema carries it."""
    return json.loads(
        resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    )


def test_valid_by_the_compose_specification():
    jsonschema.validate(COMPOSE, schema())


def test_the_schema_would_notice():
    broken = json.loads(json.dumps(COMPOSE))
    broken["services"]["gateway"]["prots"] = ["8080:8080"]
    with pytest.raises(jsonschema.ValidationError, match="prots"):
        jsonschema.validate(broken, schema())


def test_everything_the_issue_names_is_there():
    assert {"gateway", "redis", "prometheus", "grafana"} < set(SERVICES)
    assert len([name for name in SERVICES if name.startswith("replica-")]) >= 2


def gateway_settings(monkeypatch, tmp_path) -> Settings:
    monkeypatch.chdir(tmp_path)
    for name, value in re.findall(r"^ENV (HITHERTO_\w+)=(\S+)$", DOCKERFILE, re.M):
        monkeypatch.setenv(name, value)
    token = tmp_path / "admin-token"  # in place of the volume
    make_token(token)
    words = [word.replace("/run/hitherto/admin-token", str(token)) for word in SERVICES["gateway"]["command"]]
    return cli.load_config(cli._parse(words)).settings


def make_token(file: Path) -> None:
    """What the service does that makes the token."""
    program, option, code = SERVICES["admin-token"]["entrypoint"]
    assert (program, option) == ("python", "-c")
    subprocess.run([sys.executable, "-c", code.replace("/run/hitherto/admin-token", str(file))], check=True, timeout=20)


def test_the_admin_sides_token_is_made_once_and_everybody_may_read_it_who_has_the_volume(tmp_path):
    file = tmp_path / "admin-token"
    make_token(file)
    token = file.read_text()
    make_token(file)
    assert file.read_text() == token and len(token) == 64 and file.stat().st_mode & 0o777 == 0o444
    readers = {
        name for name, service in SERVICES.items() if "admin-token:/run/hitherto:ro" in service.get("volumes", [])
    }
    assert readers == {"gateway", "prometheus"}
    for name in readers:
        assert SERVICES[name]["depends_on"] == {"admin-token": {"condition": "service_completed_successfully"}}


def test_the_admin_side_answers_to_the_name_that_prometheus_asks_and_with_what_it_sends(monkeypatch, tmp_path):
    settings = gateway_settings(monkeypatch, tmp_path)
    (job,) = (
        job
        for job in yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"]
        if job["job_name"] == "hitherto"
    )
    (target,) = job["static_configs"][0]["targets"]
    assert target.partition(":")[0] in settings.admin_allow_host
    assert "@" + job["authorization"]["credentials_file"] in SERVICES["gateway"]["command"] and read_token(settings)


def test_the_gateways_command_is_one_it_takes(monkeypatch, tmp_path):
    settings = gateway_settings(monkeypatch, tmp_path)
    replicas = {parse_url(url).host: parse_url(url).port for url in settings.replica_url}
    assert set(replicas) == {name for name in SERVICES if name.startswith("replica-")}
    assert settings.admin_host == "0.0.0.0", "else Prometheus and the published port cannot reach it"
    published = {port.rpartition(":")[2] for port in SERVICES["gateway"]["ports"]}
    assert published == {str(settings.port), str(settings.admin_port)}
    for port in published:
        assert port in DOCKERFILE
    for name, port in replicas.items():
        command = SERVICES[name]["command"]
        assert command[command.index("--port") + 1] == str(port) and "0.0.0.0" in command


def test_the_replicas_command_is_one_they_take():
    from replicas.simulated import cli as simulated

    for name, service in SERVICES.items():
        if name.startswith("replica-"):
            parser = cli.Parser(prog="hitherto replica")
            simulated.add_arguments(parser)
            assert service["command"][0] == "replica"
            args = parser.parse_args(service["command"][1:])
            assert (args.port, args.events_port, args.replay_port) == (8000, 5557, 5558)


def test_traces_go_to_a_service_that_is_there_by_what_is_installed():
    receiver = urlsplit(traces.receiver(SERVICES["gateway"]["environment"]))
    assert receiver.hostname in SERVICES and receiver.port == 4318
    assert "'.[otel]'" in DOCKERFILE


def test_stopping_waits_for_the_drain(monkeypatch, tmp_path):
    grace = int(SERVICES["gateway"]["stop_grace_period"].removesuffix("s"))
    assert grace > gateway_settings(monkeypatch, tmp_path).drain_timeout_s


def test_nothing_is_published_beyond_this_machine():
    for service in SERVICES.values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), port


def test_what_is_mounted_and_built_exists():
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], mount
    assert (ROOT / COMPOSE["x-hitherto"]["build"]["dockerfile"]).is_file()


def test_images_are_pinned():
    for name, service in SERVICES.items():
        assert service["image"] == "hitherto" or re.search(r":v?\d+\.\d+", service["image"]), name


def test_the_image_has_every_package():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"bench", "tests"}
    assert packages == set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.M))
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text()
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M):
        for name in source.split():
            assert f"!{name}\n" in ignored, f"{name} is copied but not sent to the builder"

"""The compose files: valid by the specification, and true about this repository. `make test-compose` runs them."""

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
from gateway.ops import traces
from gateway.settings import Config, read_token
from gateway.workers.supervisor import STOP_SECONDS
from replicas.replica import parse_url

ROOT = Path(__file__).parents[2]
FILES = ("compose.yaml", "compose.gateway.yaml")
GPUS = "compose.gpu.yaml"  # over compose.yaml
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
PROMETHEUS = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
VARIABLE = re.compile(r"\$\{(\w+)(:-([^}]*))?\}")
OURS = "hitherto"


def compose(file: str, **variables: str) -> dict:
    """The file with its variables put in, as `docker compose config` does."""
    text = VARIABLE.sub(lambda match: variables.get(match[1], match[3] or ""), (ROOT / file).read_text())
    return yaml.safe_load(text)


def merged(base: dict, over: dict) -> dict:
    """Two files as `docker compose -f A -f B` merges them: maps by key, all else replaced."""
    return base | {
        key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in over.items()
    }


STACK, ALONE = compose("compose.yaml"), compose("compose.gateway.yaml")
SERVICES = STACK["services"]
GATEWAYS = [name for name in SERVICES if name.startswith("gateway-")]
REPLICAS = [name for name in SERVICES if name.startswith("replica-")]
EVERY = [(file, name) for file in FILES for name in compose(file)["services"]]
LASTING = [(file, name) for file, name in EVERY if name != "admin-token"]


def service(file: str, name: str) -> dict:
    return compose(file)["services"][name]


def schema() -> dict:
    """The compose specification's own schema, as the package check-jsonschema carries it."""
    file = resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize("file", [*FILES, GPUS])
def test_valid_by_the_compose_specification(file):
    jsonschema.validate(compose(file), schema())
    jsonschema.validate(yaml.safe_load((ROOT / file).read_text()), schema())


def test_the_schema_would_notice():
    broken = compose("compose.yaml")
    broken["services"]["gateway-1"]["prots"] = ["8080:8080"]
    with pytest.raises(jsonschema.ValidationError, match="prots"):
        jsonschema.validate(broken, schema())


@pytest.mark.parametrize("file", [*FILES, GPUS])
def test_every_variable_has_a_default(file):
    text = (ROOT / file).read_text()
    found = {match[1]: match[2] for match in VARIABLE.finditer(text) if match[1] != "NAME"}
    assert found and all(found.values()), [name for name, default in found.items() if not default]
    assert "$" not in VARIABLE.sub("", text), "another way to write a variable"


@pytest.mark.parametrize("file", FILES)
def test_one_service_builds_the_image_and_all_that_use_it_wait_for_that(file):
    services = compose(file)["services"]
    users = {name: one for name, one in services.items() if one["image"] == OURS}
    (builder,) = (name for name, one in services.items() if "build" in one)
    assert builder in users and users[builder]["pull_policy"] == "build"
    for name, one in users.items():
        if name != builder:
            assert one["pull_policy"] == "never" and "build" not in one, name
            assert one["depends_on"][builder] == {"condition": "service_completed_successfully"}, name
    assert services[builder]["build"] == {"context": ".", "dockerfile": "deploy/Dockerfile"}
    assert (ROOT / "deploy" / "Dockerfile").is_file()


@pytest.mark.parametrize(("file", "name"), LASTING)
def test_every_service_that_lasts_is_checked_limited_restarted_and_confined(file, name):
    one = service(file, name)
    assert one["restart"] == "unless-stopped" and one["healthcheck"]["test"][0] == "CMD"
    assert one["cap_drop"] == ["ALL"] and one["security_opt"] == ["no-new-privileges:true"]
    assert one["logging"]["options"]["max-size"], "what is logged has an end"
    assert one["read_only"] is True
    assert set(one["deploy"]["resources"]["limits"]) == {"memory", "pids"}


@pytest.mark.parametrize(("file", "name"), EVERY)
def test_ports_have_variables_and_only_clients_port_can_leave_this_machine_by_itself(file, name):
    text = yaml.safe_load((ROOT / file).read_text())["services"][name]
    for written, port in zip(text.get("ports", []), service(file, name).get("ports", []), strict=True):
        assert re.fullmatch(r"\$\{PUBLISH(_ADMIN)?:-[\d.]+\}:\$\{\w+_PORT:-\d+\}:\d+", written), written
        beyond = (file, name) == ("compose.gateway.yaml", "gateway") and port.endswith(":8080")
        assert port.startswith("0.0.0.0:" if beyond else "127.0.0.1:"), port
        assert ("PUBLISH_ADMIN" in written) != port.endswith(":8080"), "operators' ports have their own variable"


@pytest.mark.parametrize("file", FILES)
def test_no_port_is_published_twice(file):
    ports = [port.split(":")[1] for one in compose(file)["services"].values() for port in one.get("ports", [])]
    assert len(ports) == len(set(ports))


@pytest.mark.parametrize(("file", "name"), EVERY)
def test_what_is_mounted_exists(file, name):
    for mount in service(file, name).get("volumes", []):
        source = mount.split(":")[0]
        assert (ROOT / source).exists() if source.startswith(".") else source in compose(file)["volumes"], mount


@pytest.mark.parametrize(("file", "name"), EVERY)
def test_images_are_pinned(file, name):
    image = service(file, name)["image"]
    assert image == OURS or re.search(r":v?\d+\.\d+", image), name


def gateway_config(one: dict, monkeypatch, tmp_path) -> Config:
    """What `hitherto serve` in that container runs with, and so what `hitherto doctor` in it looks at."""
    monkeypatch.chdir(tmp_path)
    token = tmp_path / "admin-token"  # in place of the volume
    make_token(token)
    for name, value in one["environment"].items():
        if value is not None:
            monkeypatch.setenv(name, value.replace("/run/hitherto/admin-token", str(token)))
    assert one["command"] == ["serve"], "flags would be unknown to `docker compose exec gateway hitherto doctor`"
    return cli.load_config(cli._parse(one["command"]))


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
    assert [path.name for path in tmp_path.iterdir()] == ["admin-token"]
    readers = {name for name, one in SERVICES.items() if "admin-token:/run/hitherto:ro" in one.get("volumes", [])}
    assert readers == {*GATEWAYS, "prometheus"}
    for name in readers:
        assert SERVICES[name]["depends_on"]["admin-token"] == {"condition": "service_completed_successfully"}


def test_the_gateway_alone_has_what_the_gateways_of_the_stack_have():
    alone, among = ALONE["services"], SERVICES
    assert alone["admin-token"]["entrypoint"] == among["admin-token"]["entrypoint"]
    for key in "healthcheck stop_grace_period deploy read_only tmpfs init cap_drop logging security_opt".split():
        assert alone["gateway"][key] == among["gateway-1"][key], key
    assert set(alone["gateway"]["volumes"]) == set(among["gateway-1"]["volumes"])
    assert set(alone) == {"admin-token", "gateway"}


def test_the_admin_side_answers_to_the_names_that_prometheus_asks_and_with_what_it_sends(monkeypatch, tmp_path):
    settings = gateway_config(SERVICES["gateway-1"], monkeypatch, tmp_path).settings
    (job,) = (job for job in PROMETHEUS["scrape_configs"] if job["job_name"] == "hitherto")
    targets = job["static_configs"][0]["targets"]
    assert targets == [f"{name}:{settings.admin_port}" for name in GATEWAYS]
    assert {target.partition(":")[0] for target in targets} <= set(settings.admin_allow_host)
    file = job["authorization"]["credentials_file"]
    assert SERVICES["gateway-1"]["environment"]["HITHERTO_ADMIN_TOKEN"] == "@" + file and read_token(settings)


@pytest.mark.parametrize("name", GATEWAYS)
def test_the_gateways_settings_are_ones_it_takes(name, monkeypatch, tmp_path):
    settings = gateway_config(SERVICES[name], monkeypatch, tmp_path).settings
    replicas = {parse_url(url).host: parse_url(url).port for url in settings.replica_url}
    assert set(replicas) == set(REPLICAS) and len(replicas) >= 2
    assert settings.admin_host == "0.0.0.0", "else Prometheus and the published port cannot reach it"
    published = {port.rpartition(":")[2] for port in SERVICES[name]["ports"]}
    assert published == {str(settings.port), str(settings.admin_port)}
    for port in published:
        assert port in DOCKERFILE
    for replica, port in replicas.items():
        command = SERVICES[replica]["command"]
        assert command[command.index("--port") + 1] == str(port) and "0.0.0.0" in command


def test_the_gateway_alone_takes_its_settings(monkeypatch, tmp_path):
    settings = gateway_config(ALONE["services"]["gateway"], monkeypatch, tmp_path).settings
    (url,) = settings.replica_url
    assert ALONE["services"]["gateway"]["extra_hosts"] == [f"{parse_url(url).host}:host-gateway"]
    assert settings.admin_host == "0.0.0.0" and settings.redis_url is None


def test_the_gateways_share_the_redis_that_is_there(monkeypatch, tmp_path):
    assert len(GATEWAYS) == 2
    for name in GATEWAYS:
        url = urlsplit(SERVICES[name]["environment"]["HITHERTO_REDIS_URL"])
        assert (url.scheme, url.hostname, url.port) == ("redis", "redis", 6379)
    assert "ports" not in SERVICES["redis"], "it asks for no password"


def test_the_replicas_command_is_one_they_take():
    from replicas.simulated import cli as simulated

    for name in REPLICAS:
        parser = cli.Parser(prog="hitherto replica")
        simulated.add_arguments(parser)
        assert SERVICES[name]["command"][0] == "replica"
        args = parser.parse_args(SERVICES[name]["command"][1:])
        assert (args.port, args.events_port, args.replay_port) == (8000, 5557, 5558)


def test_with_gpus_the_gateways_use_vllm_engines_that_publish_their_events():
    gpu = merged(STACK, compose(GPUS))["services"]
    engines = [name for name, one in gpu.items() if "vllm" in one["image"]]
    assert len(engines) == 2
    gpus = []
    for name in engines:
        one = gpu[name]
        assert one["restart"] == "unless-stopped" and one["healthcheck"]["test"][0] == "CMD"
        assert one["cap_drop"] == ["ALL"] and one["security_opt"] == ["no-new-privileges:true"]
        assert one["logging"] == SERVICES["gateway-1"]["logging"] and re.search(r":v\d+\.\d+", one["image"])
        (device,) = one["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
        gpus.append(device["device_ids"])
    assert gpus == [["0"], ["1"]], "one for each"
    readme = (ROOT / "README.md").read_text()
    for name in engines:
        words = gpu[name]["command"]
        assert words[0] == "Qwen/Qwen3-8B" and "--enable-prompt-tokens-details" in words
        (events,) = (word.partition("=")[2] for word in words if word.startswith("--kv-events-config="))
        assert f"--kv-events-config '{events}'" in readme, "as the README starts its engines"


@pytest.mark.parametrize(("files", "profiles"), [((), ()), ((GPUS,), ())])
def test_every_engine_that_is_started_gets_requests_and_no_other_is_expected(files, profiles):
    stack = STACK
    for file in files:
        stack = merged(stack, compose(file))
    started = {name for name, one in stack["services"].items() if set(one.get("profiles", profiles)) <= set(profiles)}
    engines = {name for name in started if name not in GATEWAYS and name.startswith(("replica-", "vllm-"))}
    for name in GATEWAYS:
        urls = stack["services"][name]["environment"]["HITHERTO_REPLICA_URL"].split()
        assert {parse_url(url).host for url in urls} == engines
    assert set(PROMETHEUS["scrape_configs"][1]["dns_sd_configs"][0]["names"]) >= engines


@pytest.mark.parametrize("files", [(), (GPUS,)])
def test_a_gateway_is_stopped_before_all_that_it_talks_to(files):
    """Compose stops what depends on others first. A service without its profile must not be required."""
    stack = STACK
    for file in files:
        stack = merged(stack, compose(file))
    for name in GATEWAYS:
        one = stack["services"][name]
        hosts = {parse_url(url).host for url in one["environment"]["HITHERTO_REPLICA_URL"].split()}
        for key in ("HITHERTO_REDIS_URL", "OTEL_EXPORTER_OTLP_ENDPOINT"):
            hosts.add(urlsplit(one["environment"][key]).hostname)
        assert hosts <= set(one["depends_on"]) and len(hosts) >= 4
        for other, how in one["depends_on"].items():
            if other != "admin-token":
                assert how["condition"] == "service_started", "it starts without them"
            assert not (how.get("required", True) and stack["services"][other].get("profiles")), other


def test_no_command_of_the_documents_replaces_the_env_file_that_users_write():
    """`--env-file` has Compose read that file in place of `.env`, where HF_TOKEN is."""
    found = (ROOT.glob(names) for names in ("README.md", "docs/*.md", "compose*.yaml", "deploy/*.yml"))
    pages = [page for pages in found for page in pages]
    assert len(pages) > 10
    assert [page.name for page in pages if "--env-file" in page.read_text()] == []


def test_traces_go_to_a_service_that_is_there_by_what_is_installed():
    for name in GATEWAYS:
        receiver = urlsplit(traces.receiver(SERVICES[name]["environment"]))
        assert receiver.hostname in SERVICES and receiver.port == 4318
    assert "'.[otel,sim]'" in DOCKERFILE, "with the tokenizer of simulated engines"


def test_stopping_waits_for_the_drain(monkeypatch, tmp_path):
    for one in (SERVICES["gateway-1"], SERVICES["gateway-2"], ALONE["services"]["gateway"]):
        grace = int(one["stop_grace_period"].removesuffix("s"))
        assert grace >= gateway_config(one, monkeypatch, tmp_path).settings.drain_timeout_s + STOP_SECONDS


def test_the_caches_that_are_written_are_in_a_volume():
    places = dict(re.findall(r"(XDG_CACHE_HOME|HF_HOME)=(\S+)", DOCKERFILE))
    (volume,) = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.M)
    assert len(places) == 2 and all(place.startswith(volume) for place in places.values())
    for one in (*(SERVICES[name] for name in GATEWAYS + REPLICAS), ALONE["services"]["gateway"]):
        assert f"cache:{volume}" in one["volumes"] and one["tmpfs"] == ["/tmp"]


def test_the_image_has_every_package():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"bench", "tests"}
    assert packages == set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.M))
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text()
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M):
        for name in source.split():
            assert f"!{name}\n" in ignored, f"{name} is copied but not sent to the builder"


def test_what_the_documents_tell_to_type_names_files_and_services_that_are_there():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / file for file in (*FILES, GPUS)),
             ROOT / "deploy" / "prometheus.yml"]  # fmt: skip
    seen = 0
    for page in pages:
        for words in re.findall(r"docker compose ([^`\n]*)", page.read_text()):
            files = re.findall(r"-f (\S+)", words) or ["compose.yaml"]
            file = files[0]
            assert file in FILES and {*files[1:]} <= {GPUS}, f"{page.name}: {words}"
            if found := re.search(r"\b(?:exec|kill -s HUP) ([a-z][\w-]*)", words):
                seen += 1
                assert found[1] in compose(file)["services"], f"{page.name}: {words}"
    assert seen >= 4

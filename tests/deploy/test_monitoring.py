"""Dashboards and alerts speak of things that exist, and every query of theirs is answered with data by a real
Prometheus."""

import asyncio
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.grafana import dashboards
from deploy.grafana.panels import SERIES
from gateway.settings import Settings

from ..gateway.running import running
from .load import Load
from .prometheus import faster, prometheus

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana/dashboards").glob("*.json"))}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in board["panels"] if panel["type"] != "row"]
QUERIES = [
    (f"{name}: {panel['title']}", target["expr"], target["legendFormat"]) for name, panel in PANELS for target in panel["targets"]
]  # fmt: skip
RULES = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
RUNBOOKS = (DEPLOY.parent / "docs/runbooks.md").read_text()
KEY = "sk-watched-0123456789"
CLASSES = {
    "scheduler": {"qos_classes": [{"name": "premium", "priority": 100}, {"name": "free", "priority": 10}]},
    "request_router": {"routes": [{"match": {"header": "x-customer-tier: premium"}, "qos": "premium"}, {"match": {}, "qos": "free"}]},
    "slo": {"ttft": "20s", "tpot": "1s"}, "admission": {"engine_wait": "1ms"}, "shadow": ["round_robin"],
}  # fmt: skip


def filled(expression: str) -> str:
    """As Grafana sends it with everything chosen."""
    for name, value in {"rate_interval": "15s", "gateway|model|replica": ".*", "objective": "0.99"}.items():
        expression = re.sub(rf"\$(__)?({name})\b", value, expression)
    return expression


def selectors(expression: str) -> list[str]:
    """Metric names with their matchers."""
    return re.findall(r"(?:\b(?:hitherto|process)_\w+|\bup\b)(?:{[^}]*})?|{__name__=[^}]*}", expression)


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:hitherto|process)_\w+", expression))


# --- what can be said of the files alone


def test_the_files_are_those_that_the_command_writes():
    written = {path.name: path.read_text() for path in (DEPLOY / "grafana/dashboards").glob("*.json")}
    assert written == dashboards.texts(), "run `make dashboards`"


def test_the_files_are_those_that_were_checked_against_grafanas_types():
    """`make check-grafana` needs npm, so it is run where a dashboard is changed, and leaves a note."""
    checked = json.loads((DEPLOY / "grafana/checked.json").read_text())
    now = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in dashboards.texts().items()}
    assert checked["files"] == now, "run `make check-grafana` and commit deploy/grafana/checked.json"
    assert checked["against"].startswith("@grafana/schema ")


@pytest.mark.parametrize(("where", "expression"), [*((where, text) for where, text, _ in QUERIES),
                                                   *((rule["alert"], rule["expr"]) for rule in RULES)])  # fmt: skip
def test_each_expression_uses_what_the_gateway_exports(where, expression):
    names = names_in(expression)
    assert (names or where == "HithertoGatewayDown") and names <= set(SERIES), names - set(SERIES)
    groups = re.findall(r"(?:by|on) \(([^)]*)\)", expression)
    labels = {label.strip() for group in groups for label in group.split(",") if label.strip()}
    labels |= set(re.findall(r"[{,]\s*(\w+)\s*[=!]", expression)) - {"__name__", "job"}
    known = set().union(*(SERIES[name] for name in names), {"worker"})
    if "ALERTS{" in expression:  # Prometheus's own series of each alert
        known |= {"alertname", "alertstate"}
        assert set(re.findall(r'alertname="([^"]*)"', expression)) <= {rule["alert"] for rule in RULES} - {where}
    assert labels <= known | ({"instance"} if not names else set()), labels - known


def test_what_expressions_take_from_variables_is_a_variable_of_their_dashboard():
    for name, board in BOARDS.items():
        declared = {one["name"] for one in board["templating"]["list"]}
        text = json.dumps([panel.get("targets", []) for panel in board["panels"]])
        used = set(re.findall(r"\$(\w+)", text.replace("${datasource}", ""))) - {"__rate_interval"}
        assert used <= declared and {"datasource", "gateway"} <= declared, f"{name}: {used - declared}"
        assert declared >= {"model"}, name


def test_each_board_has_the_variables_that_the_documents_name():
    """docs/metrics.md: SLO has the objective in place of the replica."""
    for board, content in BOARDS.items():
        names = [one["name"] for one in content["templating"]["list"]]
        assert names == ["datasource", "gateway", "model", "objective" if board == "slo" else "replica"], board
    page = " ".join((DEPLOY.parent / "docs/metrics.md").read_text().split())
    assert "the data source, gateway, model and replica; SLO has the objective in place of the replica" in page


def test_any_data_source_will_do():
    for _, panel in PANELS:
        assert {one["datasource"]["uid"] for one in (panel, *panel["targets"])} == {"${datasource}"}
    for _, expression, _ in QUERIES:
        assert "job=" not in expression


def test_legends_use_labels_their_expression_keeps():
    for where, expression, legend in QUERIES:
        shown = set(re.findall(r"{{(\w+)}}", legend))
        kept = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        if " by (" not in expression:
            kept = set.union(*(SERIES[name] for name in names_in(expression)))
        assert shown <= kept - {"le"}, where


def test_panels_have_a_place_of_their_own():
    for name, board in BOARDS.items():
        taken: dict[tuple[int, int], str] = {}
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    assert (x, y) not in taken, f"{name}: {panel['title']} lies on {taken[x, y]}"
                    taken[x, y] = panel["title"]
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
    uids = [board["uid"] for board in BOARDS.values()]
    assert len(uids) == len(set(uids)) == 7


def test_each_alert_has_a_page_in_the_runbooks_and_no_page_is_left_over():
    pages = set(re.findall(r"^## (Hitherto\w+)$", RUNBOOKS, re.M))
    assert {rule["alert"] for rule in RULES} == pages
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")
        page = RUNBOOKS.split(f"## {rule['alert']}\n")[1].split("\n## ")[0]
        for part in ("**Means.**", "**See.**", "**Do.**"):
            assert part in page, f"{rule['alert']}: {part}"


def test_durations_of_rules_can_be_made_shorter_for_tests():
    assert faster("rate(x[5m]) > 1\n  for: 2m\n", 30) == "rate(x[10s]) > 1\n  for: 4s\n"
    assert faster("rate(x[5m])\nfor: 0m\n", 300) == "rate(x[4s])\nfor: 0s\n"


# --- Prometheus' own checks


def promtool(*arguments: str) -> None:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_its_configuration():
    promtool("check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml"))  # the token's file is in its container


def test_prometheus_takes_the_alerts():
    promtool("check", "rules", str(DEPLOY / "alerts.yml"))


def test_prometheus_scrapes_the_services_of_compose():
    services = yaml.safe_load((DEPLOY.parent / "compose.yaml").read_text())["services"]
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    gateways = [name for name in services if name.startswith("gateway-")]
    targets = [target for one in jobs["hitherto"]["static_configs"] for target in one["targets"]]
    assert targets == [f"{name}:{Settings().admin_port}" for name in gateways] and gateways
    (found,) = jobs["replicas"]["dns_sd_configs"]
    assert set(found["names"]) >= {name for name in services if name.startswith("replica-")} and found["port"] == 8000
    used = {job for rule in RULES for job in re.findall(r'job="(\w+)"', rule["expr"])}
    assert used <= set(jobs)
    assert [path.name for pattern in config["rule_files"] for path in DEPLOY.glob(pattern)] == ["alerts.yml"]


def test_panels_that_need_a_setting_say_which_where_they_have_no_data():
    for board, least in (("slo", 8), ("overview", 0)):
        panels = [one for one in BOARDS[board]["panels"] if one.get("targets")]
        saying = {one["title"]: one["fieldConfig"]["defaults"].get("noValue") for one in panels}
        assert sum(bool(said) for said in saying.values()) >= least, saying
        if board == "slo":
            assert "--slo-figures" in saying["Goodput"] and "--slo-figures" in saying["Kept, by class"]
            assert all(saying.values()), saying


def test_grafana_finds_the_dashboards_where_compose_mounts_them():
    compose = yaml.safe_load((DEPLOY.parent / "compose.yaml").read_text())["services"]
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/hitherto.yaml").read_text())["providers"][0]
    mounts = dict(mount.split(":")[:2][::-1] for mount in compose["grafana"]["volumes"])
    assert mounts[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    assert mounts["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"
    home = compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == provider["options"]["path"] + "/overview.json"
    mounts = dict(mount.split(":")[:2][::-1] for mount in compose["prometheus"]["volumes"])
    assert mounts["/etc/prometheus"] == "./deploy", "with its configuration and rules"


# --- a real Prometheus, which scrapes real gateways under load


@pytest.mark.timeout(300)
async def test_every_query_returns_data_of_gateways_under_load(tmp_path, start_engine, start_redis):
    redis, engines = start_redis(), [start_engine("--kv-connector"), start_engine("--kv-connector")]
    urls = [engine.wait().url for engine in engines]
    entry = {"name": "one", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}
    (tmp_path / "keys.yaml").write_text("- " + json.dumps(entry))
    (tmp_path / "hitherto.yaml").write_text(yaml.safe_dump(CLASSES))
    flags = ["--config", str(tmp_path / "hitherto.yaml"), "--redis-url", redis.url, "--replica-url", *urls]
    launch = ["--launch", "1", "--profile", "sim"]
    apart = [f"{url}#role={role}" for url, role in zip(urls, ("prefill", "decode"), strict=True)]
    async with (
        running(*flags, *launch, "--api-keys", str(tmp_path / "keys.yaml")) as first,
        running(*flags, "--workers", "2") as second,
        running("--replica-url", *apart, "--policy", "round_robin") as third,
    ):
        targets = [str(one.admin.base_url.netloc, "ascii") for one in (first, second, third)]
        await asyncio.gather(first.ready(3), second.ready(2), third.ready(2))
        async with prometheus(tmp_path / "prometheus", {"hitherto": targets}) as server:
            keyed = {"authorization": f"Bearer {KEY}"}
            async with Load(first.url, 8, headers=keyed) as one, Load(second.url, 8) as other, Load(third.url, 2):
                missing = [*QUERIES]

                async def all_answered() -> bool:
                    nonlocal missing
                    missing = [one for one in missing if not await server.query(filled(one[1]))]
                    return not missing

                try:
                    await server.until(all_answered, 60, "data for every query")
                except AssertionError:
                    pytest.fail("no data: " + "\n".join(f"{where}: {text}" for where, text, _ in missing))
                for rule in RULES:
                    for selector in selectors(rule["expr"]):
                        name = selector.partition("{")[0]
                        if name in ABSENT_UNTIL_IT_HAPPENS:
                            continue
                        assert await server.query(selector), f"{rule['alert']}: {selector}"
                for board in BOARDS.values():
                    for variable in board["templating"]["list"]:
                        if variable["type"] == "query":
                            query = variable["query"]["query"]
                            series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
                            assert await server.query(f"count by ({label}) ({filled(series)})"), variable["name"]
            assert one.statuses.get(200, 0) > 20 and other.statuses.get(200, 0) > 20


# Of events' states it has one, which is live; policies that fail are the operator's, and there is none here.
ABSENT_UNTIL_IT_HAPPENS = [
    f"hitherto_{one}" for one in ("background_failures_total", "events_state", "model_gone", "policy_failures_total")
]

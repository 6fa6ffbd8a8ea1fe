"""Prometheus' configuration and the Grafana dashboard speak of things that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import Settings
from gateway.ops.metrics import READ, Counter, Metrics

from ..gateway.running import running

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "hitherto.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
PROMETHEUS = {"process_cpu_seconds_total": {"job"}, "process_resident_memory_bytes": {"job"}}


def exported() -> dict[str, set[str]]:
    """Every series a scrape can show -> its labels."""
    series = dict(PROMETHEUS)
    for metric in Metrics().all():
        if isinstance(metric, Counter):
            series[f"hitherto_{metric.name}_total"] = set(metric.labels)
        else:
            series |= {f"hitherto_{metric.name}_{part}": {metric.label} for part in ("count", "sum")}
            series[f"hitherto_{metric.name}_bucket"] = {metric.label, "le"}
    for name, (kind, _, labels) in READ.items():
        series[f"hitherto_{name}" + ("_total" if kind == "counter" else "")] = set(labels)
    return series


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:hitherto|process)_\w+", expression))


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_each_expression_uses_what_the_gateway_exports(title, expression):
    series, names = exported(), names_in(expression)
    assert names and names <= set(series), names - set(series)
    labels = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    labels |= set(re.findall(r"[{,]\s*(\w+)\s*=", expression))
    assert all(labels <= series[name] for name in names), f"{title}: {labels}"


async def test_no_query_is_empty_before_the_first_request():
    """Each series a query selects is on the page of a gateway that was asked nothing yet, so that rates begin at 0."""
    async with running("--launch", "1", "--profile", "sim", "--shadow", "round_robin") as gateway:
        await gateway.until(
            lambda status: (
                all(one["waiting"] is not None and one["state"] == "ready" for one in status["replicas"])
                and status["replicas"]
            )
        )
        page = (await gateway.admin.get("/metrics")).text
    shown = [
        (sample.name, sample.labels) for family in text_string_to_metric_families(page) for sample in family.samples
    ]
    for title, expression in EXPRESSIONS:
        for name, matchers in re.findall(r"\b((?:hitherto|process)_\w+)(?:{([^}]*)})?", expression):
            wanted = {label: value for label, value in re.findall(r'(\w+)="([^"]*)"', matchers) if label != "job"}
            assert any(one == name and wanted.items() <= labels.items() for one, labels in shown), (
                f"{title}: {name} {wanted}"
            )


def test_legends_use_labels_their_expression_keeps():
    series = exported()
    for panel in PANELS:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            groups = re.findall(r"by \(([^)]*)\)", target["expr"])
            if "sum (" in target["expr"] and not groups:
                kept = set()
            elif groups:
                kept = {label.strip() for label in groups[0].split(",")} - {"le"}
            else:
                kept = set.union(*(series[name] for name in names_in(target["expr"])))
            assert shown <= kept, panel["title"]


def promtool(*arguments: str) -> None:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_every_expression(tmp_path):
    rules = [{"record": f"dashboard:{number}", "expr": expression.replace("$__rate_interval", "1m")}
             for number, (_, expression) in enumerate(EXPRESSIONS)]  # fmt: skip
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_prometheus_takes_its_configuration():
    promtool("check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml"))  # the token's file is in its container


def test_prometheus_scrapes_the_services_of_compose():
    services = yaml.safe_load((DEPLOY.parent / "compose.yaml").read_text())["services"]
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    jobs = {job["job_name"]: [target.split(":") for one in job["static_configs"] for target in one["targets"]]
            for job in config["scrape_configs"]}  # fmt: skip
    assert jobs["hitherto"] == [["gateway", str(Settings().admin_port)]]
    assert sorted(host for host, _ in jobs["replicas"]) == sorted(
        name for name in services if name.startswith("replica-")
    )
    used = {job for _, expression in EXPRESSIONS for job in re.findall(r'job="(\w+)"', expression)}
    assert used <= set(jobs)


def test_the_dashboard_answers_the_four_questions():
    titles = " ".join(panel["title"] for panel in PANELS).lower()
    for question in ("hit rate", "ttft", "in flight", "prefill saved"):
        assert question in titles


def test_panels_have_a_place_of_their_own_and_the_provisioned_source():
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]
    for panel in PANELS:
        assert {target["datasource"]["uid"] for target in panel["targets"]} | {panel["datasource"]["uid"]} == {
            source["uid"]
        }
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_grafana_finds_the_dashboard_where_compose_mounts_it():
    compose = yaml.safe_load((DEPLOY.parent / "compose.yaml").read_text())["services"]["grafana"]
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/hitherto.yaml").read_text())["providers"][0]
    mounts = dict(mount.split(":")[:2][::-1] for mount in compose["volumes"])
    assert mounts[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    assert mounts["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"
    assert (
        compose["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
        == provider["options"]["path"] + "/hitherto.json"
    )

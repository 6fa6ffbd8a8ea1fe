"""Panels and dashboards in Grafana's JSON, from short descriptions.

Descriptions name metrics without filters: each metric is then filtered by what is chosen in the dashboard's variables
gateway, replica and model, as far as it has such a label. All panels query the data source of variable `datasource`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.ops.metrics import READ, Counter, Metrics

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
PROCESS = ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "process_max_fds")
FILTERS = {"instance": 'instance=~"$gateway"', "replica": 'replica=~"$replica"', "model": 'model=~"$model"'}
NAME = re.compile(r"\b((?:hitherto|process)_\w+)(?:{([^}]*)})?")
COLUMNS = 24


def exported() -> dict[str, set[str]]:
    """Return by name every series that a scrape of a gateway can show, with its labels; Prometheus adds `instance`."""
    series: dict[str, set[str]] = {name: set() for name in PROCESS}
    for metric in Metrics().all():
        if isinstance(metric, Counter):
            series[f"hitherto_{metric.name}_total"] = set(metric.labels)
        else:
            series |= {f"hitherto_{metric.name}_{part}": set(metric.labels) for part in ("count", "sum")}
            series[f"hitherto_{metric.name}_bucket"] = {*metric.labels, "le"}
    for name, (kind, _, labels) in READ.items():
        series[f"hitherto_{name}" + ("_total" if kind == "counter" else "")] = set(labels)
    return {name: labels | {"instance"} for name, labels in series.items()}


SERIES = exported()


def filtered(expression: str) -> str:
    """Return a query with the variables' filters added to its metrics. Raises KeyError for an unknown metric."""

    def with_filters(match: re.Match[str]) -> str:
        labels = SERIES[match[1]]
        chosen = [text for label, text in FILTERS.items() if label in labels]
        return f"{match[1]}{{{', '.join([*filter(None, (match[2],)), *chosen])}}}"

    return NAME.sub(with_filters, expression.replace("[R]", "[$__rate_interval]"))


# By the beginning of a metric's name: the settings without which it has no series.
LIMITS = "needs limits (--slo), classes (--scheduler) or --slo-figures"
NEEDS = {
    **dict.fromkeys(
        ("hitherto_slo_", "hitherto_answer_", "hitherto_admission_", "hitherto_queue", "hitherto_predicted_answers"),
        LIMITS,
    ),
    **dict.fromkeys(("hitherto_predicted_ttft", "hitherto_delivered_ttft", "hitherto_more_replicas"), LIMITS),
    "hitherto_control_": "needs classes (--scheduler) with limits",
    "hitherto_tenant": "needs API keys (--api-keys)",
}


@dataclass
class Panel:
    """A panel of a dashboard."""

    title: str
    queries: Sequence[tuple[str, str]]  # (PromQL expression, legend)
    unit: str = "short"  # one of Grafana's
    kind: str = "timeseries"
    about: str = ""  # description, shown on request
    width: int = 8  # of 24 columns
    height: int = 8
    stacked: bool = False
    below_zero: bool = False  # values may be negative
    most: float | None = None  # upper end of the axis
    thresholds: Sequence[tuple[float | None, str]] = ()  # (value, colour from this value on); None: from the lowest

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        targets = [
            {
                "datasource": SOURCE,
                "editorMode": "code",
                "expr": filtered(expression),
                "legendFormat": legend,
                "range": True,
                "refId": chr(ord("A") + place),
            }
            for place, (expression, legend) in enumerate(self.queries)
        ]
        defaults: dict[str, Any] = {"unit": self.unit, "custom": self._custom()}
        if needs := self._needs():
            defaults["noValue"] = f"No data: {needs}"
        if self.kind != "state-timeline" and not self.below_zero:
            defaults["min"] = 0
        if self.most is not None:
            defaults["max"] = self.most
        if self.thresholds:
            steps = [{"value": value, "color": colour} for value, colour in self.thresholds]
            defaults |= {"thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}}
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.about,
            "datasource": SOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "targets": targets,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": self._options(),
        }

    def _needs(self) -> str:
        """Return in words the setting without which this panel has no data, or ""."""
        metrics = {name for expression, _ in self.queries for name in re.findall(r"\bhitherto_\w+", expression)}
        found = {next((what for prefix, what in NEEDS.items() if name.startswith(prefix)), "") for name in metrics}
        return found.pop() if len(found) == 1 else ""

    def _custom(self) -> dict[str, Any]:
        if self.kind == "timeseries":
            fill, mode = (60, "normal") if self.stacked else (0, "none")
            return {
                "lineWidth": 1 if self.stacked else 2,
                "fillOpacity": fill,
                "showPoints": "never",
                "spanNulls": True,
                "stacking": {"mode": mode, "group": "A"},
            }
        return {"fillOpacity": 80, "lineWidth": 0} if self.kind == "state-timeline" else {}

    def _options(self) -> dict[str, Any]:
        if self.kind == "stat":
            return {
                "colorMode": "value" if self.thresholds else "none",
                "graphMode": "area",
                "justifyMode": "auto",
                "percentChangeColorMode": "standard",
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "orientation": "auto",
                "showPercentChange": False,
                "textMode": "auto",
                "wideLayout": True,
            }
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
        if self.kind == "state-timeline":
            tooltip = {"mode": "single", "sort": "none"}
            return {"mergeValues": True, "showValue": "never", "rowHeight": 0.8, "legend": legend, "tooltip": tooltip}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def stat(title: str, expression: str, unit: str = "short", about: str = "", **more: Any) -> Panel:
    return Panel(title, [(expression, "")], unit, "stat", about, **{"width": 4, "height": 4, **more})


def quantiles(metric: str, by: str = "", *shares: float) -> list[tuple[str, str]]:
    """Return queries for quantiles of a histogram by the labels `by`; `shares`: 0 to 1 (default: 0.5 and 0.99)."""
    groups = ", ".join(filter(None, ("le", by)))
    legend = "".join(f" {{{{{label}}}}}" for label in by.split(", ") if label)
    return [
        (f"histogram_quantile({share}, sum by ({groups}) (rate({metric}_bucket[R])))", f"p{100 * share:g}{legend}")
        for share in shares or (0.5, 0.99)
    ]


# --- queries with their legends


def _legend(by: str, what: str) -> str:
    return " ".join([*filter(None, (what,)), *(f"{{{{{label}}}}}" for label in by.split(", "))])


def rate(metric: str, by: str, what: str = "") -> tuple[str, str]:
    """Return the query for a counter's rate per second, for each value of the labels `by`; `what` begins the legend."""
    return f"sum by ({by}) (rate({metric}[R]))", _legend(by, what)


def growth(metric: str, by: str, what: str = "") -> tuple[str, str]:
    """Return the query for a counter's increase, for rare events, for each value of the labels `by`."""
    return f"sum by ({by}) (increase({metric}[R]))", _legend(by, what)


def largest(metric: str, by: str, what: str = "") -> tuple[str, str]:
    """Return the query for the maximum of a gauge by which several gateways or workers report the same thing."""
    return f"max by ({by}) ({metric})", _legend(by, what)


def total(metric: str, by: str, what: str = "") -> tuple[str, str]:
    """Return the query for the sum of a gauge of which each gateway or worker reports a part."""
    return f"sum by ({by}) ({metric})", _legend(by, what)


def state(metric: str, by: str) -> tuple[str, str]:
    """Return the query for the states of a gauge that is 1 for the state that applies and 0 for others."""
    return f"max by ({by}) ({metric}) == 1", _legend(by, "")


@dataclass
class Dashboard:
    """A dashboard of rows of panels."""

    uid: str
    title: str
    about: str
    rows: Sequence[tuple[str, Sequence[Panel]]]  # (title, panels), top down
    choices: Sequence[str] = ("model", "replica")  # those of these two variables that it has
    more: Sequence[dict[str, Any]] = field(default_factory=tuple)  # further variables, in Grafana's JSON

    def json(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.about,
            "tags": ["hitherto"],
            "schemaVersion": 41,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "templating": {"list": [*variables(self.choices), *self.more]},
            "annotations": {"list": []},
            "links": [LINKS],
            "panels": list(self._panels()),
        }

    def _panels(self) -> Iterable[dict[str, Any]]:
        number = y = 0
        for title, panels in self.rows:
            if title:
                number += 1
                place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
                yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
                y += 1
            x = tallest = 0
            for panel in panels:
                if x + panel.width > COLUMNS:
                    x, y, tallest = 0, y + tallest, 0
                number += 1
                yield panel.json(number, x, y)
                x, tallest = x + panel.width, max(tallest, panel.height)
            y += tallest


# From each dashboard to the others, with the chosen values of variables.
LINKS = {
    "title": "Hitherto",
    "type": "dashboards",
    "tags": ["hitherto"],
    "asDropdown": True,
    "icon": "external link",
    "includeVars": True,
    "keepTime": True,
    "targetBlank": False,
    "tooltip": "",
    "url": "",
}


def variables(choices: Sequence[str]) -> list[dict[str, Any]]:
    """Return the variables: data source, gateways, models of the chosen gateways, replicas of the chosen models."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    models = 'hitherto_replica_models{instance=~"$gateway"'
    queries = {
        "gateway": ("Gateway", "hitherto_build_info", "instance", ".*"),
        "model": ("Model", models + "}", "model", ".*"),
        # Without a value for "All", Grafana takes all values that the query finds: the replicas of the chosen models.
        "replica": ("Replica", models + ', model=~"$model"}', "replica", None),
    }
    found = [source]
    for name, (label, series, of, all_value) in queries.items():
        if name != "gateway" and name not in choices:
            continue
        query = f"label_values({series}, {of})"
        found.append(
            {
                "name": name,
                "label": label,
                "type": "query",
                "datasource": SOURCE,
                "query": {"query": query, "refId": name},
                "refresh": 2,
                "sort": 1,
                "multi": True,
                "includeAll": True,
                **({"allValue": all_value} if all_value else {}),
                "current": {"text": ["All"], "value": ["$__all"], "selected": True},
                "hide": 0,
            }
        )
    return found


# --- what several dashboards ask


def ratio(part: str, whole: str, by: str = "") -> str:
    """Return the expression for one counter's rate over another's, by the labels `by`."""
    of = f"by ({by}) " if by else ""
    return f"sum {of}(rate({part}[R])) / sum {of}(rate({whole}[R]))"


REPORTED = ratio("hitherto_reported_cached_tokens_total", "hitherto_reported_prompt_tokens_total")
PREDICTED = ratio("hitherto_predicted_cached_tokens_total", "hitherto_prompt_tokens_total")
FAILED = ratio('hitherto_requests_total{status=~"5xx|cut"}', "hitherto_requests_total")
READY = 'count (max by (replica) (hitherto_replica_state{state="ready"}) == 1) or vector(0)'
NONE = "0 * max by (instance) (hitherto_uptime_seconds)"  # for series that exist only once something has happened
GREEN, YELLOW, RED = "green", "yellow", "red"

"""Write Grafana's dashboards: `make dashboards`, or `python -m deploy.grafana.dashboards`, after a change in `boards`.

Each dashboard becomes a JSON file in deploy/grafana/dashboards. Dashboards work with any Prometheus that scrapes
gateways, whatever the name of its job. `make check-grafana` checks them against Grafana's own types.
"""

from __future__ import annotations

import json
from pathlib import Path

from .boards.cache_map import CACHE_MAP
from .boards.gateway import GATEWAY
from .boards.overview import OVERVIEW
from .boards.redis import REDIS
from .boards.replicas import REPLICAS
from .boards.slo import SLO
from .boards.two_legs import TWO_LEGS

FOLDER = Path(__file__).parent / "dashboards"

ALL = {
    "overview": OVERVIEW, "replicas": REPLICAS, "cache-map": CACHE_MAP, "gateway": GATEWAY, "slo": SLO,
    "two-legs": TWO_LEGS, "redis": REDIS,
}  # fmt: skip


def texts() -> dict[str, str]:
    """Return the JSON text of each dashboard by the name of its file."""
    return {f"{name}.json": json.dumps(one.json(), indent=1, ensure_ascii=False) + "\n" for name, one in ALL.items()}


def main() -> None:
    for file in FOLDER.glob("*.json"):
        file.unlink()
    for name, text in texts().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()

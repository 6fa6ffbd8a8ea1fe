"""Write docs/configuration.md from the schema of settings:

    python -m bench.config_page [--check]

`--check` writes nothing, and exits with 1 where the page is not what it would be.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gateway.cli import SUBJECTS, metavar
from gateway.settings import ALIASES, SIZES, Settings, flag
from replicas.sizes import show_bytes

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
# Where each subject is explained.
PAGES = {
    "where it listens": "[operating](operations.md#two-ports), [workers](scaling.md), [TLS](security.md#tls)",
    "who may ask": "[security](security.md)",
    "the model": "[before your vLLM](before-your-vllm.md), [exactness](exactness.md)",
    "engines that run already": "[before your vLLM](before-your-vllm.md)",
    "engines that it starts": "[launching engines](vllm.md)",
    "where requests go": "[how it routes](how-it-routes.md)",
    "overload": "[admission](admission.md)",
    "several gateways": "[scaling](scaling.md)",
    "limits": "[requests](requests.md#what-requests-may-take)",
    "what clients get, and what is logged": "[requests](requests.md#response-headers)",
}
HEAD = """\
<!-- Written by `python -m bench.config_page`; tests/test_docs.py holds it to that. -->
# Configuration

Give a setting in one of three ways. The first that names it counts:

1. a flag of `hitherto serve`, as in `--port 8000`,
2. an environment variable, as in `HITHERTO_PORT=8000`,
3. a line of the YAML file that `--config` names (without it `hitherto.yaml` in the working directory), as in `port: 8000`.

`hitherto config` prints what is in force and where each value came from; its output is itself a valid file. Settings are
checked before anything starts; a wrong one is named with its source and the remedy, and the exit code is 2. Give `hitherto
config`, `explain` and `doctor` the same flags as `serve`.

In the file a setting has its flag's name with underscores, as in `admin_port`; in the environment the same in capitals
behind `HITHERTO_`. As a flag or a variable, a list is separated by commas (URLs by spaces), and a mapping is YAML on one line. Sizes are bytes,
or a number with a unit, like `512MiB` or `5G`; units are always binary.
"""


def page() -> str:
    parts = [HEAD]
    for name, field in Settings.model_fields.items():
        if name in SUBJECTS:
            subject = SUBJECTS[name]
            parts.append(f"\n## {subject[0].upper()}{subject[1:]}\n\nExplained in {PAGES[subject]}.\n")
            parts.append("| flag | default | |\n|---|---|---|")
        parts.append(_row(name, field))
    return "\n".join(parts) + "\n"


def _row(name: str, field: Any) -> str:
    shown = flag(name) if field.annotation is bool else f"{flag(name)} {metavar(name, field.annotation)}"
    also = "".join(f", `{alias}`" for alias in ALIASES.get(name, ()))
    text, _, meant = field.description.partition(" (default: ")
    cells = (f"`{shown}`{also}", meant.removesuffix(")") or _default(name, field), text)
    return "| " + " | ".join(map(_escaped, cells)) + " |"


def _escaped(cell: str) -> str:
    """A bar within a cell of a Markdown table would end it."""
    return cell.replace("|", r"\|")


def _default(name: str, field: Any) -> str:
    if field.default in (None, (), {}):
        return "none"
    if field.annotation is bool:
        return "on" if field.default else "off"
    return f"`{show_bytes(field.default) if name in SIZES else field.default}`"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())

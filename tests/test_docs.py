"""What the documents claim is what the code has."""

import re
from pathlib import Path

from bench import config_page
from gateway.config import Settings, flag
from gateway.ops.metrics import READ, Counter, Metrics

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_metric_is_documented_and_every_documented_metric_exists():
    names = {f"hitherto_{one.name}" + "_total" * isinstance(one, Counter) for one in Metrics().all()}
    names |= {f"hitherto_{name}" + "_total" * (kind == "counter") for name, (kind, _, _) in READ.items()}
    told = set(re.findall(r"^\| `(hitherto_\w+)`", (ROOT / "docs/operations.md").read_text(), re.M))
    assert told == names


def test_every_flag_the_documents_name_exists():
    known = {flag(name) for name in Settings.model_fields} | {"--no-response-headers", "--no-access-log"}
    for path in DOCS:
        for name in re.findall(r"`hitherto serve[^`\n]*`", path.read_text()):
            for option in re.findall(r"--[a-z-]+", name):
                assert option in known | {"--config", "--help"}, f"{path.name}: {option}"


def test_links_between_documents_lead_somewhere():
    for path in DOCS:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_page_of_settings_is_up_to_date():
    assert config_page.PAGE.read_text() == config_page.page(), "run python -m bench.config_page"


def test_every_setting_is_on_its_page_once():
    page = config_page.page()
    for name in Settings.model_fields:
        assert page.count(f"| `{flag(name)}`") + page.count(f"| `{flag(name)} ") == 1, name

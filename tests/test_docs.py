"""What the documents claim is what the code has."""

import re
from pathlib import Path

from bench import config_page
from gateway.ops.metrics import READ, Counter, Metrics
from gateway.settings import ALIASES, Settings, flag
from gateway.workers.supervisor import STOP_SECONDS

ROOT = Path(__file__).parent.parent
WRITTEN = {".py", ".lua", ".js", ".html", ".md", ".sh", ".yml", ".yaml", ".json", ".toml", ".env", ".service"}
PAGE_NAMED = re.compile(r'(?<![\w/])docs/([\w-]+\.md)(?:#([\w-]+)|, "([^"\n]+)")?')
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_metric_is_documented_and_every_documented_metric_exists():
    names = {f"hitherto_{one.name}" + "_total" * isinstance(one, Counter) for one in Metrics().all()}
    names |= {f"hitherto_{name}" + "_total" * (kind == "counter") for name, (kind, _, _) in READ.items()}
    told = set(re.findall(r"^\| `(hitherto_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.M))
    assert told == names


def test_every_flag_the_documents_name_exists():
    known = {flag(name) for name in Settings.model_fields} | {"--no-response-headers", "--no-access-log"}
    for path in DOCS:
        for name in re.findall(r"`hitherto serve[^`\n]*`", path.read_text()):
            for option in re.findall(r"--[a-z-]+", name):
                assert option in known | {"--config", "--help"}, f"{path.name}: {option}"


def test_links_between_documents_lead_somewhere():
    for path in [*DOCS, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "bench/results/README.md"]:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            page = path.parent / name if name else path
            assert page.exists(), f"{path.name}: {target}"
            assert not anchor or anchor in anchors(page), f"{path.name}: {target}"


def test_every_page_that_code_and_configuration_name_exists():
    """In messages, docstrings and comments: `docs/security.md#tls`, or docs/security.md, "TLS"."""
    rooms = ("gateway", "policies", "cachemap", "replicas", "loadgen", "bench", "deploy", "tests")
    files = [path for room in rooms for path in (ROOT / room).rglob("*") if path.suffix in WRITTEN]
    files += [path for path in ROOT.iterdir() if path.suffix in WRITTEN or path.name == "Makefile"]
    named = {
        (page, anchor or slug(heading), path.name)
        for path in files
        for page, anchor, heading in PAGE_NAMED.findall(path.read_text(errors="replace"))
    }
    assert len({page for page, _, _ in named}) > 10
    for page, anchor, file in sorted(named):
        assert (ROOT / "docs" / page).exists(), f"{file}: docs/{page}"
        assert not anchor or anchor in anchors(ROOT / "docs" / page), f"{file}: docs/{page}#{anchor}"


def test_every_file_the_documents_name_exists():
    pages = [*DOCS, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "bench/results/README.md"]
    rooms = "gateway|policies|cachemap|replicas|loadgen|bench|deploy|tests"
    named = {
        (path.name, file) for path in pages for file in re.findall(rf"`((?:{rooms})/[\w./-]*\w/?)`", path.read_text())
    }
    assert len(named) > 40
    assert not {(page, file) for page, file in named if not (ROOT / file).exists()}


def test_every_flag_that_another_routers_becomes_exists():
    known = {flag(name) for name in Settings.model_fields} | {alias for one in ALIASES.values() for alias in one}
    rows = [
        line.split(" | ") for line in (ROOT / "docs/migrating.md").read_text().splitlines() if line.startswith("| `")
    ]
    assert len(rows) > 50
    for row in rows:
        assert set(re.findall(r"--[a-z-]+", row[1])) <= known, row[1]


def anchors(page: Path) -> set[str]:
    """What its headings are called in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {slug(heading) for heading in headings}


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


MADE = {"configuration.md", "exactness.md"}  # by bench.config_page and bench.exactness_page, whose lines ruff holds


def test_prose_keeps_to_120_columns():
    """Tables, code, pictures and single words (a code span is one, a link's target another) may be longer."""
    pages = [page for page in DOCS if page.name not in MADE]
    for page in [*pages, *(ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY"))]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for line in text.splitlines():
            words = re.sub(r"`[^`]+`|\]\([^)]*\)", "x", line).split()
            if len(line) > 120 and len(words) > 1:
                assert line.startswith("    ") or line.lstrip().startswith(("|", "#", "!")), f"{page.name}: {line}"


def test_every_page_is_on_the_index():
    index = (ROOT / "docs/README.md").read_text()
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if f"({path.name}" not in index]
    assert missing == ["README.md"]


def test_a_pod_and_a_unit_as_documented_have_the_time_to_drain():
    page = (ROOT / "docs/deploying.md").read_text()
    [wait] = re.findall(r'preStop: .*\["sleep", "(\d+)"\]', page)
    [grace] = re.findall(r"terminationGracePeriodSeconds: (\d+)", page)
    [unit] = re.findall(r"`TimeoutStopSec=(\d+)`", page)
    drain = Settings().drain_timeout_s
    assert f"`--drain-timeout-s` ({drain:g} s)" in page
    assert int(grace) >= int(wait) + drain + STOP_SECONDS and int(unit) >= drain + STOP_SECONDS
    said = re.findall(r"\b(\d+) s (?:above at least|more)\b", page + (ROOT / "docs/operations.md").read_text())
    assert [float(one) for one in said] == 3 * [STOP_SECONDS]
    assert f"TimeoutStopSec={unit}\n" in (ROOT / "deploy/hitherto.service").read_text()


def test_no_table_of_the_index_has_a_row_twice():
    rows = [line for line in (ROOT / "docs/README.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) > 25 and len(rows) == len(set(rows))


def test_the_page_of_settings_is_up_to_date():
    assert config_page.PAGE.read_text() == config_page.page(), "run python -m bench.config_page"


def test_every_setting_is_on_its_page_once():
    page = config_page.page()
    for name in Settings.model_fields:
        assert page.count(f"| `{flag(name)}`") + page.count(f"| `{flag(name)} ") == 1, name

"""The table of truth has a row for each family, nothing in it is wrong, and the page of exactness is what its generator
writes of it."""

import contextlib

import pytest

from bench import exactness_page, families
from bench.families import REAL, of_cache, table
from tests.gateway.prompt.families import FAMILIES
from tests.gateway.prompt.media import bodies as images
from tests.gateway.prompt.read_once import tokenizers_read_once
from tests.gateway.prompt.reference import model_dir


@pytest.fixture(scope="module")
def rows():
    """The whole table, which takes half a minute of CPU: it lacks the families whose tokenizer cannot be had."""
    for name in (*REAL, "gptoss"):
        with contextlib.suppress(pytest.skip.Exception):
            model_dir(name)
    with tokenizers_read_once():
        return families.recorded()


@pytest.fixture(scope="module")
def page(rows):
    if missing := families.not_fetched():
        pytest.skip(f"the tokenizers of {', '.join(missing)} cannot be had")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactness_page, "recorded", lambda: rows)
        return exactness_page.page()


def test_no_family_is_wrong(rows):
    missing = {{**REAL, "gptoss": "gpt-oss"}[name] for name in families.not_fetched()}
    assert {row["family"] for row in rows} == {*REAL.values(), *FAMILIES, *images.FAMILIES} - missing
    for row in rows:
        assert row["requests"] == row["equal"] + row["declined"] and row["wrong"] == 0, row
        assert sum(row["why"].values()) == row["declined"] and "" not in row["why"]
        assert row["equal"] >= 60, row
        if row["family"] in FAMILIES:
            assert row["equal"] >= 0.9 * row["requests"] >= 200, row


def test_what_is_wrong_is_counted_and_shown():
    row = of_cache("a cache", [True, False, True])
    assert row["requests"] == 3 and row["equal"] == 2 and row["declined"] == 0 and row["wrong"] == 1
    assert table([row]).splitlines()[1].split() == ["a", "cache", "simulated", "3", "2", "0", "1"]


def test_the_page_is_up_to_date(page):
    assert exactness_page.PAGE.read_text() == page, "run python -m bench.exactness_page"


def test_no_row_is_wrong(page):
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and line.count(" | ") == 6]
    assert len(rows) > 6
    assert all(cells[5] == "0" for cells in rows[1:])


def test_no_page_is_written_where_a_tokenizer_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(exactness_page, "PAGE", tmp_path / "exactness.md")
    monkeypatch.setattr(families, "CACHED", tmp_path)
    monkeypatch.setattr("sys.argv", ["exactness_page"])
    with pytest.raises(SystemExit) as ended:
        exactness_page.main()
    assert ended.value.code == 2
    assert "no tokenizer of qwen3, mistral_nemo, gptoss here" in capsys.readouterr().err
    assert not exactness_page.PAGE.exists()

"""The page of exactness is what its generator writes."""

import pytest

from bench import exactness_page, families
from bench.families import REAL
from tests.gateway.prompt.reference import model_dir


@pytest.fixture(scope="module")
def page():
    for name in (*REAL, "gptoss"):
        model_dir(name)  # skips the test where its tokenizer cannot be had
    return exactness_page.page()


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

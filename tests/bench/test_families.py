"""The table of truth has a row for each family, and nothing in it is wrong."""

from bench.families import REAL, of_cache, recorded, table
from tests.gateway.prompt.families import FAMILIES
from tests.gateway.prompt.media import bodies as images
from tests.gateway.prompt.reference import model_dir


def test_no_family_is_wrong():
    for name in (*REAL, "gptoss"):
        model_dir(name)  # skips the test where its tokenizer cannot be had
    rows = recorded()
    assert {row["family"] for row in rows} == {*REAL.values(), *FAMILIES, *images.FAMILIES}
    for row in rows:
        assert row["requests"] == row["equal"] + row["declined"] and row["wrong"] == 0, row
        assert sum(row["why"].values()) == row["declined"] and "" not in row["why"]
        assert row["equal"] >= 60, row


def test_what_is_wrong_is_counted_and_shown():
    row = of_cache("a cache", [True, False, True])
    assert row["requests"] == 3 and row["equal"] == 2 and row["declined"] == 0 and row["wrong"] == 1
    assert table([row]).splitlines()[1].split() == ["a", "cache", "simulated", "3", "2", "0", "1"]

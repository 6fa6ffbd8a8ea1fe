"""The benchmarks import what they use of the product, so that a name that goes there is missed here."""

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
# It compares with a package that its environment alone has.
ELSEWHERE = {"dynamo_index"}


@pytest.mark.parametrize("name", sorted({one.stem for one in BENCH.glob("*.py")} - ELSEWHERE - {"__init__"}))
def test_a_benchmark_can_be_imported(name):
    importlib.import_module(f"bench.{name}")

"""The rooms of loadgen stand on each other in one order, and no modules of it import each other in a circle."""

from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from ..test_house import ROOT, imports

ORDER = ("workload", "drive", "report", "calibrate", "simulate", "plan")


def modules() -> dict[str, Path]:
    paths = sorted((ROOT / "loadgen").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@pytest.mark.parametrize("room", ORDER)
def test_a_room_knows_only_those_before_it(room):
    known = {"options", *ORDER[: ORDER.index(room) + 1]}
    for path in (ROOT / "loadgen" / room).rglob("*.py"):
        others = {name.split(".")[1] for name in imports(path) if name.startswith("loadgen.")}
        assert others <= known, f"{path.relative_to(ROOT)} imports {others - known}"


def test_no_module_imports_itself_by_way_of_others():
    known = modules()
    # `from loadgen.report import show` names the package too, which runs first and knows nobody
    graph = {name: {other for other in imports(path) if other in known and other != name and known[other].name != "__init__.py"}
             for name, path in known.items()}  # fmt: skip
    TopologicalSorter(graph).prepare()

"""The house keeps its shape: imports point one way, every module says what its room is for."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("gateway", "cachemap", "policies", "replicas", "loadgen")
# room -> what it may import of the house, besides itself
ALLOWED = {
    "gateway": ("policies", "cachemap", "replicas"),
    "loadgen": ("policies", "cachemap", "replicas.simulated"),
    "cachemap": (),
    "policies": (),
    "replicas": (),
}
# Inside the gateway: the wire knows no LLMs, the prompt knows no replicas.
INSIDE = {"wire": ("wire",), "prompt": ("prompt",)}
MODULES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def imports(path: Path) -> list[str]:
    """Absolute names of everything a module imports, relative imports resolved."""
    package = path.relative_to(ROOT).parent.parts
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found.append(module)
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    room = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        other = name.split(".")[0]
        if other not in ROOMS or other == room:
            continue
        allowed = any(name == one or name.startswith(one + ".") for one in ALLOWED[room])
        # `from replicas import simulated` also names the package it stands in
        parent = any(one.startswith(name + ".") for one in ALLOWED[room])
        assert allowed or parent, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("part", INSIDE)
def test_inner_rooms_of_the_gateway_know_only_their_own(part):
    for path in sorted((ROOT / "gateway" / part).rglob("*.py")):
        for name in imports(path):
            if name.startswith("gateway."):
                assert name.split(".")[1] in INSIDE[part], f"{path.relative_to(ROOT)} imports {name}"


# Kinds of engines, and where the product may name them outside docstrings and comments.
ENGINES = re.compile(r"vllm|sglang|tensorrt|trtllm|lmdeploy|llama[._]?cpp|\btgi\b", re.IGNORECASE)
MAY_NAME_ENGINES = (
    "replicas/engines",  # the dialects
    "replicas/simulated",  # imitates one
    "loadgen/demo",  # plays with simulated or with real engines, as it is told
    "loadgen/plan",  # sizes caches as one engine does, and is compared with its log
    "loadgen/drive/target.py",  # --backend takes the names that other load generators know
    "loadgen/simulate/field",  # other gateways' rules, by their own names
)


def spoken(path: Path) -> list[str]:
    """Every name and every string of a module that is no docstring."""
    tree, found = ast.parse(path.read_text()), []
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list) and node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and id(node) not in docstrings:
            found.append(node.value if isinstance(node.value, str) else node.value.decode("latin-1"))
        found += [value for name in ("id", "attr", "name", "asname", "module", "arg") if isinstance(value := getattr(node, name, None), str)]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_a_dialect_names_an_engine(path):
    """What is said of one kind of engine, to it or to people, comes from its dialect."""
    if not str(path.relative_to(ROOT)).startswith(MAY_NAME_ENGINES):
        assert not [one for one in spoken(path) if ENGINES.search(one)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path):
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text))


def test_the_rooms_that_decide_have_no_clock_and_no_sockets():
    """Policies and state machines are pure: time and load come in as arguments."""
    pure = [*(ROOT / "policies").glob("*.py"), ROOT / "gateway/dispatch/states.py", ROOT / "gateway/dispatch/drift.py",
            ROOT / "replicas/lifecycle.py", ROOT / "replicas/health.py", ROOT / "cachemap/events/sequence.py",
            *(ROOT / "replicas/simulated" / name for name in ("engine.py", "batch.py", "blocks.py", "steps.py", "profile.py"))]  # fmt: skip
    for path in pure:
        for name in imports(path):
            assert name.split(".")[0] not in ("time", "socket", "asyncio", "aiohttp", "threading", "os"), f"{path.relative_to(ROOT)} imports {name}"

"""The house keeps its shape: imports point one way, every module says what its room is for."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("gateway", "cachemap", "policies", "replicas", "loadgen")
# room -> what it may import of the house, besides itself
ALLOWED = {
    "gateway": ("policies", "cachemap", "replicas"),
    "loadgen": (
        "policies",
        "cachemap",
        "replicas.simulated",
        "replicas.access",
        # what commands of both rooms say of their arguments, sizes and files
        *(f"replicas.{one}" for one in "arguments cli_errors hub pipes ports sizes spelling".split()),
        "replicas.engines",
        "replicas.metrics",
        "replicas.served",  # `calibrate` learns as a gateway does
    ),
    "cachemap": (),
    "policies": (),
    "replicas": (),
}
# Layers inside the gateway, the lowest first: a module imports only from its own layer and from those above it in this
# table. A name is a folder or a module; the longest that fits counts, as some modules of a folder stand below it.
LAYERS = """
http
errors files durations validation threads ports
prompt
tls members tenants.limits ops.log ops.metrics ops.spans ops.gains
tenants
proxy.paths proxy.admission.overload settings
model model_files ops.comparison ops.chats ops.doubts
spaces routes models
proxy
tenants.ending tenants.usage_log workers.private_redis
ops
datapath lifetime app
workers
assets tenants.verb cli __main__
"""
LAYER_OF = {name: number for number, names in enumerate(LAYERS.split("\n")) for name in names.split()}
MODULES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(path: Path) -> list[tuple[str, list[str]]]:
    """Every import of a module: the absolute name it imports, and what it takes from there by `from`."""
    package = path.relative_to(ROOT).parent.parts
    found: list[tuple[str, list[str]]] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            found.append((".".join(filter(None, (base, node.module))), [alias.name for alias in node.names]))
    return found


def imports(path: Path) -> list[str]:
    """Absolute names of everything a module imports, relative imports resolved."""
    return [name for module, taken in statements(path) for name in (module, *(f"{module}.{one}" for one in taken))]


def may_import(room: str, name: str) -> bool:
    other = name.split(".")[0]
    if other not in ROOMS or other == room:
        return True
    allowed = any(name == one or name.startswith(one + ".") for one in ALLOWED[room])
    # `from replicas import simulated` also names the package it stands in
    return allowed or any(one.startswith(name + ".") for one in ALLOWED[room])


def test_imports_point_one_way():
    paths = [path.relative_to(ROOT) for path in MODULES]
    named = [(path, name) for path in paths for name in imports(ROOT / path)]
    assert not [f"{path} imports {name}" for path, name in named if not may_import(path.parts[0], name)]


def rings(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules each of which imports, be it by way of others, all of its group."""

    def reached(module: str) -> set[str]:
        found, ahead = set(), [module]
        while ahead:
            new = graph[ahead.pop()] - found
            found |= new
            ahead += new
        return found

    reach = {module: reached(module) for module in graph}
    found = {frozenset(other for other in reach[module] if module in reach[other]) for module in graph}
    return [set(ring) for ring in found if ring]


def test_no_imports_go_in_a_ring():
    """Nor under TYPE_CHECKING: modules that can only be read together are one thing in several files."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}
    graph = {}
    for module, path in names.items():
        # `from package import module` reads the module, `from package import name` the package's __init__
        taken = {
            name
            for base, some in statements(path)
            for name in ([f"{base}.{one}" if f"{base}.{one}" in names else base for one in some] or [base])
        }
        graph[module] = (taken & set(names)) - {module}
    assert rings(graph) == [], "these import each other"


def test_a_ring_is_found():
    assert rings({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [{"b", "c"}]


def layer_of(name: str) -> int:
    """Return the number of the layer of a module of the gateway, or of something in it; 0 for the package itself."""
    parts = name.split(".")[1:]
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((LAYER_OF[one] for one in prefixes if one in LAYER_OF), 0)


def test_inside_the_gateway_no_import_points_up():
    paths = [path for path in MODULES if path.relative_to(ROOT).parts[0] == "gateway"]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    assert not [name for name in names.values() if not layer_of(name) and name != "gateway.__init__"], "of no layer"
    up = [
        f"{names[path]} imports {name}"
        for path in paths
        for name in imports(path)
        if name.startswith("gateway.") and layer_of(name) > layer_of(names[path])
    ]
    assert not up


# Kinds of engines, and where the product may name them outside docstrings and comments.
ENGINES = re.compile(r"vllm|sglang|tensorrt|trtllm|lmdeploy|llama[._]?cpp|\btgi\b", re.IGNORECASE)
MAY_NAME_ENGINES = (
    "replicas/engines",  # the dialects
    "replicas/simulated",  # imitates one
    "loadgen/demo",  # plays with simulated or with real engines, as it is told
    "loadgen/plan",  # sizes caches as one engine does, and is compared with its log
    "loadgen/drive/target.py",  # --backend takes the names that other load generators know
)


def spoken(path: Path) -> list[str]:
    """Every name and every string of a module that is no docstring."""
    tree, found = tree_of(path), []
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(getattr(node, "body", None), list) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and id(node) not in docstrings:
            found.append(node.value if isinstance(node.value, str) else node.value.decode("latin-1"))
        found += [
            value
            for name in ("id", "attr", "name", "asname", "module", "arg")
            if isinstance(value := getattr(node, name, None), str)
        ]
    return found


def test_only_a_dialect_names_an_engine():
    """What is said of one kind of engine, to it or to people, comes from its dialect."""
    paths = [path for path in MODULES if not str(path.relative_to(ROOT)).startswith(MAY_NAME_ENGINES)]
    assert not [(str(path.relative_to(ROOT)), one) for path in paths for one in spoken(path) if ENGINES.search(one)]


def test_every_module_says_what_it_is_for():
    without = [path for path in MODULES if tree_of(path).body and not ast.get_docstring(tree_of(path))]
    assert not [str(path.relative_to(ROOT)) for path in without]


IMPURE = frozenset("time socket asyncio aiohttp threading os datetime selectors".split())


def test_the_rooms_that_decide_have_no_clock_and_no_sockets():
    """Policies and state machines are pure: time and load come in as arguments."""
    pure = [*(ROOT / "policies").rglob("*.py"),
            *(ROOT / "gateway/proxy" / name for name in ("states.py", "failures/retries.py", "failures/blame.py", "exactness/drift.py")),
            ROOT / "replicas/lifecycle.py", ROOT / "replicas/health.py", ROOT / "cachemap/events/sequence.py",
            *(ROOT / "replicas/simulated" / name for name in ("engine.py", "batch.py", "blocks.py", "steps.py", "profile.py"))]  # fmt: skip
    for path in pure:
        for name in imports(path):
            assert name.split(".")[0] not in IMPURE, f"{path.relative_to(ROOT)} imports {name}"


def test_the_proxy_has_no_sockets():
    """It acts on the outside by the connections of `http/`, so that tests can play requests without sockets."""
    for path in (ROOT / "gateway/proxy").rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & {"socket", "ssl", "httptools", "uvloop"}, path
        assert not [
            one for one in ast.walk(tree_of(path)) if isinstance(one, ast.Attribute) and one.attr == "transport"
        ], path


def test_only_settling_ends_a_placement_with_what_was_learned():
    """What is learned from an answer is decided in one place: nobody else calls `Router.finish`."""
    callers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "gateway").rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("router.finish")
    }
    assert callers == {"gateway/proxy/settling.py"}


# The classes of a request's state, where each may be assigned to, and the names that a variable of the class has.
OWNERS = {
    "Exchange": ("gateway/proxy/exchange.py", ("exchange", "asker")),
    "Attempt": ("gateway/proxy/exchange.py", ("attempt", "answering", "first", "second", "again")),
    "Legs": (("gateway/proxy/exchange.py", "gateway/proxy/disagg/legs.py"), ("leg", "held")),  # `legs`, without its s
    "ExternalRequest": ("gateway/proxy/placement/askers.py", ("leased",)),
    "Prompt": ("gateway/prompt/", ("prompt", "also")),
}


def foreign_writes(where: str, tree: ast.AST) -> list[str]:
    """Assignments to fields of exchanges, attempts and prompts that another module than their own makes."""
    found = []
    known = {name: owner for owner, names in OWNERS.values() for name in names}
    for function in ast.walk(tree):
        if isinstance(function, ast.arg) and function.annotation is not None:
            for name in re.findall(r"\w+", ast.unparse(function.annotation)):
                if name.removeprefix("Resumable").removeprefix("Metered").removeprefix("Prefill") in OWNERS:
                    known.setdefault(function.arg, OWNERS[name][0] if name in OWNERS else OWNERS["Attempt"][0])
    for node in ast.walk(tree):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            continue
        for target in [one for some in targets for one in getattr(some, "elts", [some])]:
            if not isinstance(target, ast.Attribute):
                continue
            whose = ast.unparse(target.value).removesuffix("[-1]").removesuffix("s").rpartition(".")[2]
            if whose in known and not where.startswith(known[whose]):
                found.append(f"{where}:{target.lineno} {ast.unparse(target)}")
    return found


def test_the_state_of_a_request_has_one_writer():
    """Other modules call a method that says what has happened, so one file tells all that can happen to a request."""
    modules = [path for path in MODULES if path.relative_to(ROOT).parts[0] == "gateway"]
    assert not [one for path in modules for one in foreign_writes(str(path.relative_to(ROOT)), tree_of(path))]


def test_a_foreign_write_is_found():
    code = "def f(one: Attempt):\n one.sent_at = 0\n exchange.attempts[-1].body = None\n a, exchange.legs.first.state = 1, 2"
    assert len(foreign_writes("gateway/proxy/failures/actions.py", ast.parse(code))) == 3
    assert not foreign_writes("gateway/proxy/exchange.py", ast.parse(code))


def test_no_test_hides_another_of_its_name():
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        functions = [one for one in tree_of(path).body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        names = [one.name for one in functions]
        assert len(names) == len(set(names)), f"{path.relative_to(ROOT)} defines a function twice"

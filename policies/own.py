"""Routing rules from a user's own file: `./mine.py:Mine` names a class whose constructor takes no arguments.

The rule is imported and tried on two idle replicas at startup, so that its errors appear there and not to clients. A
later failure is logged once and reported to `on_failure` each time; the request at which it occurs goes to the replica
with the fewest requests.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from operator import index
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from .costs import CostGroup
from .ledger import Load
from .rules.least_load import fewest_requests
from .rules.least_time import COST, LEG_COST
from .vocabulary import Candidate, Choice, Demand, Policy

FORM = "FILE.py:CLASS"
LEARNING = ("placed", "first", "ended", "gone")
MOST_WORDS = 200  # the most characters of an exception's message that are shown

log = logging.getLogger("hitherto.policies")


def is_own(name: str) -> bool:
    """Return whether a policy's name in the settings refers to a user's own file."""
    return ".py" in name


def make_own(name: str) -> Policy:
    """Import and try the routing rule in a user's file, and return it.

    `name`: FILE.py:CLASS. Raises ValueError if the file is faulty; the message has the error and its line.
    """
    file, _, wanted = name.partition(".py:")
    path = Path(f"{file}.py" if wanted else name)
    module = _imported(path)
    made_there = {key: one for key, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__}
    if not isinstance(made_there.get(wanted), type):
        classes = [key for key, one in made_there.items() if isinstance(one, type)]
        missing = f"{name}: a class is missing, as in {path}:{next(iter(classes), 'Mine')}"
        raise ValueError(f"{path} has no class {wanted!r}" if wanted else missing)
    try:
        policy = made_there[wanted]()
        if not hasattr(policy, "name"):
            policy.name = wanted
        _try(policy)
    except Exception as error:
        raise ValueError(f"{path}: {wanted}{_where(path, error)}: {_words(error)}") from None
    return Own(policy, name, path)


class Own:
    """A routing rule from a user's file, wrapped so that no request is lost when the rule fails.

    `source`: the rule's name in the settings, FILE.py:CLASS; `on_failure`: called with the message of each failure. If
    the rule's class is derived from `LeastTime`, its costs are used too; otherwise only its choice of a replica.
    """

    def __init__(self, rule: Policy, source: str, path: Path) -> None:
        self.name, self.source, self._rule, self._path, self._failed = rule.name, source, rule, path, False
        self.on_failure: Callable[[str], object] = lambda said: None
        for name in LEARNING:
            if learn := getattr(rule, name, None):
                setattr(self, name, partial(self._tell, learn))
        # Other formulas are never called, because they could fail in the middle of a request.
        self._has_cost = getattr(type(rule), "cost", None) is COST
        if self._has_cost:
            self.cost, self.leg_cost, self.in_seconds = COST, LEG_COST, True

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        try:
            choice = self._rule.choose(demand, candidates, explain)
            if 0 <= index(choice.index) < len(candidates):
                if self._has_cost:
                    return choice
                return Choice(index(choice.index), str(choice.reason), choice.terms, choice.lesson)
            error: Exception = IndexError(f"{choice.index} is no index of {len(candidates)} candidates")
        except Exception as raised:
            error = raised
        return Choice(fewest_requests(demand, candidates), f"the fewest requests, since {self._said(error)}")

    def _tell(self, learn: Callable[..., None], *told: Any) -> None:
        try:
            learn(*told)
        except Exception as error:
            self._said(error)

    def _said(self, error: Exception) -> str:
        said = f"{self._path}{_where(self._path, error)} failed: {_words(error)}"
        if not self._failed:
            log.error("policy %s: %s. Its requests go where the fewest are; not said again", self.name, said)
        self._failed = True
        self.on_failure(said)
        return said


def _imported(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    found = spec_from_file_location(f"own_policy_{path.stem}", path)
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    sys.modules[module.__name__] = module  # dataclasses look for their module there
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}{_where(path, error)}: {_words(error)}") from None
    return module


def _try(policy: Policy) -> None:
    """Call a routing rule as the router does: for two idle replicas and for one, with and without `explain`.

    Raises the rule's own exceptions, and TypeError for an invalid choice.
    """
    group, demand = CostGroup(), Demand(tokens=100, block_size=16, root=1, hashes=(1, 2, 3, 4, 5, 6))
    candidates = [
        Candidate("a:8000", 64, Load(), group.add("a"), slot=0),
        Candidate("b:8000", 0, Load(), group.add("b")),
    ]
    for among, explain in product((candidates, candidates[1:]), (False, True)):
        choice, count = policy.choose(demand, among, explain), len(among)
        if not isinstance(choice, Choice) or choice.index not in range(count):
            raise TypeError(
                f"choose() answered {choice!r} about {count} candidates, not a Choice with the index of one"
            )


def _where(path: Path, error: BaseException) -> str:
    """Return ", line N" for the last line of the user's file that the traceback reached, or ""."""
    lines = [one.lineno for one in extract_tb(error.__traceback__) if Path(one.filename) == path.resolve()]
    return f", line {lines[-1]}" if lines else ""


def _words(error: BaseException) -> str:
    """Return the exception's class and message, in one line of bounded length."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # the exception's class is the user's too, and its `__str__` may fail
        text = ""
    return f"{type(error).__name__}: {text[:MOST_WORDS]}" if text else type(error).__name__

"""Find routing policies by name, and rules that split requests into a prefill leg and a decode leg.

The gateway's own policies and rules are always available. Those of other routers, which serve comparisons only, are in
`bench.rules`, which only a checkout of the repository has.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import policies
from policies import leg_rules
from policies.legs import LegRule

from .replica import Replica

if TYPE_CHECKING:
    from bench.rules.prefill_queue import PrefillQueue
    from bench.rules.truth import Truth


def _of_checkout() -> ModuleType | None:
    root = Path(__file__).parents[2]
    if not (root / "bench" / "rules").is_dir():
        return None
    if str(root) not in sys.path:  # the program `loadgen` does not have the checkout in its module path
        sys.path.append(str(root))
    return importlib.import_module("bench.rules")


OTHERS = _of_checkout()
NAMES = (*policies.NAMES, *(OTHERS.NAMES if OTHERS else ()))
LEG_NAMES = (*leg_rules.NAMES, *(OTHERS.LEG_NAMES if OTHERS else ()))
# Appended to the error about an unknown name and to lists of names.
HINT = "" if OTHERS else "; the rules of other routers are in a checkout of Hitherto, in bench/rules"


def make(name: str, seed: int, truth: Truth | None) -> policies.Policy:
    """Return the policy with this name or from this FILE:CLASS. Raises ValueError if there is none.

    `seed` and `truth` (the engines' true state, which oracle policies read) matter only to policies of `bench.rules`.
    """
    return OTHERS.make(name, seed, truth) if OTHERS else policies.make(name)


def make_legs(text: str) -> tuple[LegRule, PrefillQueue | None]:
    """Return the rule that decides which requests are split into a prefill and a decode leg, and its queue.

    Few rules have a queue: the prefill legs of all gateways wait in it for a free prefiller. For other rules it is
    None. `text`: the rule's name, with its parameter if it takes one. Raises ValueError.
    """
    return OTHERS.make_legs(text) if OTHERS else (leg_rules.make_leg_rule(text), None)


def truth_of(replicas: Sequence[Replica], now: Callable[[], float]) -> Truth | None:
    """Return the true state of the engines, which oracle policies read; None without a checkout of the repository."""
    return OTHERS.Truth(replicas, now) if OTHERS else None

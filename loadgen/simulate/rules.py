"""Lookup of routing policies and prefill/decode rules by name.

The gateway's own are always found. The rules of other routers are in `bench.rules`, which only a checkout of the
repository has: they serve comparisons, and the gateway never routes by them.
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
    if str(root) not in sys.path:  # the program `loadgen` does not look for modules where its own sources are
        sys.path.append(str(root))
    return importlib.import_module("bench.rules")


OTHERS = _of_checkout()
NAMES = (*policies.NAMES, *(OTHERS.NAMES if OTHERS else ()))
LEG_NAMES = (*leg_rules.NAMES, *(OTHERS.LEG_NAMES if OTHERS else ()))
# What to add where a name is not known, or the names are listed.
HINT = "" if OTHERS else "; the rules of other routers are in a checkout of Hitherto, in bench/rules"


def make(name: str, seed: int, truth: Truth | None) -> policies.Policy:
    """Return the policy of this name, or of this file. Raises ValueError where there is none."""
    return OTHERS.make(name, seed, truth) if OTHERS else policies.make(name)


def make_legs(text: str) -> tuple[LegRule, PrefillQueue | None]:
    """Return the rule for legs of this name, and its queue. Raises ValueError where there is none."""
    return OTHERS.make_legs(text) if OTHERS else (leg_rules.make_leg_rule(text), None)


def truth_of(replicas: Sequence[Replica], now: Callable[[], float]) -> Truth | None:
    """Return what the oracles among the rules see of the engines."""
    return OTHERS.Truth(replicas, now) if OTHERS else None

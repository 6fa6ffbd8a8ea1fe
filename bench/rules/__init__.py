"""Other routers' rules, to compare with in `loadgen simulate` and `bench.field`: one a file, from its stated source.

They are written after what their authors state (documentation, papers, pull requests), with their defaults;
each docstring gives the formula, the source and what is approximated. They are pure, as the product's are.
"""

from __future__ import annotations

import policies

from .aibrix import Aibrix
from .dynamo import Dynamo
from .kubeai import KubeAi
from .llmd_sticky import LlmdSticky
from .llmd_weights import LlmdWeights
from .lmetric import LMetric
from .mooncake import Mooncake
from .oracle import Oracle, OracleAnswer
from .preble import PrebleE2
from .prefill_queue import NAMES as LEG_NAMES
from .prefill_queue import make_legs
from .ray_prefix import RayPrefix
from .session_hash import SessionHash
from .sglang import Sglang4, Sglang32, SglangChars, SglangTokens
from .smg_spill import SmgSpill
from .sticky_least_loaded import StickyLeastLoaded
from .truth import Truth
from .vllm_kv_aware import VllmKvAware

_RULES = {
    rule.name: rule
    for rule in (
        SglangChars,
        SglangTokens,
        Sglang32,
        Sglang4,
        SmgSpill,
        VllmKvAware,
        LMetric,
        Dynamo,
        LlmdWeights,
        LlmdSticky,
        Aibrix,
        RayPrefix,
        KubeAi,
        PrebleE2,
        Mooncake,
        SessionHash,
        StickyLeastLoaded,
    )
}
_ORACLES = {rule.name: rule for rule in (Oracle, OracleAnswer)}
NAMES = (*_RULES, *_ORACLES)
SOURCES = {rule.name: rule.source for rule in (*_RULES.values(), *_ORACLES.values())}


def make(name: str, seed: int = 0, truth: Truth | None = None) -> policies.Policy:
    """The rule or the product's policy called `name`; `truth` is for the oracles alone. ValueError for an
    unknown name, and for an oracle without truth."""
    if name in _RULES:
        return _RULES[name](seed)
    if name in policies.NAMES or policies.is_own(name):
        return policies.make(name)
    if name not in _ORACLES:
        raise ValueError(
            f"unknown policy {name!r}; ours are {', '.join(policies.NAMES)}; the field's {', '.join(NAMES)}"
        )
    if truth is None:
        raise ValueError("an oracle needs the engines' true state: it exists in `loadgen simulate` only")
    return _ORACLES[name](seed, truth)


__all__ = ["LEG_NAMES", "NAMES", "SOURCES", "Truth", "make", "make_legs"]

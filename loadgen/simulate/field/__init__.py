"""The routing rules of the field, for the simulator alone: one rule a file, from its stated source.

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
from .mooncake import Mooncake
from .oracle import Oracle, Truth
from .preble import PrebleE2
from .ray_prefix import RayPrefix
from .session_hash import SessionHash
from .sglang import SglangChars, SglangTokens
from .smg_spill import SmgSpill
from .vllm_kv_aware import VllmKvAware

_RULES = {
    rule.name: rule
    for rule in (
        SglangChars,
        SglangTokens,
        SmgSpill,
        VllmKvAware,
        Dynamo,
        LlmdWeights,
        LlmdSticky,
        Aibrix,
        RayPrefix,
        KubeAi,
        PrebleE2,
        Mooncake,
        SessionHash,
    )
}
NAMES = (*_RULES, Oracle.name)
SOURCES = {rule.name: rule.source for rule in (*_RULES.values(), Oracle)}


def make(name: str, seed: int = 0, truth: Truth | None = None) -> policies.Policy:
    """The rule or the product's policy called `name`; `truth` is for the oracle alone. ValueError for an
    unknown name, and for an oracle without truth."""
    if name in _RULES:
        return _RULES[name](seed)
    if name in policies.NAMES:
        return policies.make(name)
    if name != Oracle.name:
        raise ValueError(
            f"unknown policy {name!r}; ours are {', '.join(policies.NAMES)}; the field's {', '.join(NAMES)}"
        )
    if truth is None:
        raise ValueError("the oracle needs the engines' true state: it exists in `loadgen simulate` only")
    return Oracle(seed, truth)


__all__ = ["NAMES", "SOURCES", "Truth", "make"]

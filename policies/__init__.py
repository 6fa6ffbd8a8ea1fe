"""Routing policies: pure functions from a request and its candidates to a choice, without I/O or a clock.

Each policy has a file of its own in `rules` and uses the types `Load`, `Demand`, `Candidate` and `Choice`. `Ledger`
keeps the load of each replica; `CostGroup` and `Costs` predict seconds from a load.
"""

from . import leg_rules, legs, two_legs
from .admission import Admission
from .class_queue import QueuedRequest
from .classes import Classes, QosClass, Rule, Slo
from .control import Control
from .costs import CostGroup, Costs, Lower
from .decisions import AdmissionDecision, Rules
from .estimates import Estimate
from .ledger import UNTIMED, Ledger, Load, Reservation
from .options import admit
from .own import FORM, Own, is_own, make_own
from .placement import Decision, Evaluation, Pairing, PrefixMap, behind
from .roster import Roster
from .router import Placement, Router, Targets, hittable
from .rules.consistent_hash import ConsistentHash
from .rules.least_cost import Cost
from .rules.least_load import LeastLoad
from .rules.least_time import LeastTime
from .rules.overlap_cost import OverlapCost
from .rules.power_of_two import PowerOfTwo
from .rules.prefix_affinity import PrefixAffinity
from .rules.random import Random
from .rules.round_robin import RoundRobin
from .vocabulary import Candidate, Choice, Demand, Policy, Pull

_POLICIES = {
    p.name: p
    for p in (RoundRobin, Random, LeastLoad, PowerOfTwo, ConsistentHash, PrefixAffinity, OverlapCost, LeastTime)
}
NAMES = tuple(_POLICIES)
DEFAULT = LeastTime.name


def make(name: str) -> Policy:
    """Return the built-in policy called `name`, or the policy in a user's file if `name` is of the form FILE.py:CLASS.

    Raises ValueError for an unknown name or a faulty file.
    """
    if is_own(name):
        return make_own(name)
    try:
        return _POLICIES[name]()
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(NAMES)}") from None


__all__ = [
    "DEFAULT",
    "FORM",
    "NAMES",
    "UNTIMED",
    "Admission",
    "AdmissionDecision",
    "Candidate",
    "Choice",
    "Classes",
    "Control",
    "Cost",
    "CostGroup",
    "Costs",
    "Decision",
    "Demand",
    "Estimate",
    "Evaluation",
    "Ledger",
    "Load",
    "Lower",
    "Own",
    "Pairing",
    "Placement",
    "Policy",
    "PrefixMap",
    "Pull",
    "QosClass",
    "QueuedRequest",
    "Reservation",
    "Roster",
    "Router",
    "Rule",
    "Rules",
    "Slo",
    "Targets",
    "admit",
    "behind",
    "hittable",
    "is_own",
    "leg_rules",
    "legs",
    "make",
    "make_own",
    "two_legs",
]

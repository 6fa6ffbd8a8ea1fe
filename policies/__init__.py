"""Routing policies: pure functions from a request and its candidates to a choice, without I/O or a clock.

Each policy has a file of its own in `rules` and uses the types `Load`, `Demand`, `Candidate` and `Choice`. `Ledger`
keeps the load of each replica; `CostGroup` and `Costs` predict seconds from a load.
"""

from . import leg_rules as leg_rules
from . import legs as legs
from . import two_legs as two_legs
from .admission import Admission as Admission
from .class_queue import QueuedRequest as QueuedRequest
from .classes import Classes as Classes
from .classes import QosClass as QosClass
from .classes import Rule as Rule
from .classes import Slo as Slo
from .control import Control as Control
from .costs import CostGroup as CostGroup
from .costs import Costs as Costs
from .costs import Lower as Lower
from .decisions import AdmissionDecision as AdmissionDecision
from .decisions import Rules as Rules
from .estimates import Estimate as Estimate
from .ledger import UNTIMED as UNTIMED
from .ledger import Ledger as Ledger
from .ledger import Load as Load
from .ledger import Reservation as Reservation
from .options import admit as admit
from .own import FORM as FORM
from .own import Own as Own
from .own import is_own as is_own
from .own import make_own as make_own
from .placement import Decision as Decision
from .placement import Evaluation as Evaluation
from .placement import Pairing as Pairing
from .placement import PrefixMap as PrefixMap
from .placement import behind as behind
from .roster import Roster as Roster
from .router import Placement as Placement
from .router import Router as Router
from .router import Targets as Targets
from .router import hittable as hittable
from .rules.consistent_hash import ConsistentHash
from .rules.least_cost import Cost as Cost
from .rules.least_load import LeastLoad
from .rules.least_time import LeastTime
from .rules.overlap_cost import OverlapCost
from .rules.power_of_two import PowerOfTwo
from .rules.prefix_affinity import PrefixAffinity
from .rules.random import Random
from .rules.round_robin import RoundRobin
from .vocabulary import Candidate as Candidate
from .vocabulary import Choice as Choice
from .vocabulary import Demand as Demand
from .vocabulary import Policy as Policy
from .vocabulary import Pull as Pull

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

"""The settings of a simulated fleet, and of how a load is played on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.workload import synthetic
from policies import Admission, Classes, QosClass, Rules, Slo
from policies.classes import NO_LIMITS
from replicas.simulated.profile import Profile

from .links import Network


@dataclass(frozen=True, slots=True)
class Outage:
    """The loss of a replica (an index) from second `at` of the run to second `until`; for good if `until` is None."""

    replica: int
    at: float
    until: float | None = None


@dataclass(frozen=True)
class Setting:
    """A fleet and how a load is played on it; the same setting and workload give the same outcome."""

    policy: str
    profiles: Sequence[Profile]  # one per replica, all with the same block size
    seed: int = 0
    gateways: int = 1  # requests are spread over them at random
    shared_ledger: bool = True  # gateways know the requests that others have sent to each replica, as with Redis
    # Seconds from the end of an engine's step until its KV events are in a gateway's map; None: engines publish none.
    event_delay: float | None = 0.005
    event_loss: float = 0.0  # share of the batches of KV events that are lost on the way to each gateway
    outages: Sequence[Outage] = ()
    engine_replies: bool = False  # engines reply what the load's file has, so that later prompts find it in the cache
    salt: int = 0  # seed of made-up token ids
    vocabulary: int = synthetic.VOCABULARY  # upper bound of made-up token ids
    users: int | None = None  # of a closed loop, each with one conversation at a time; None: open loop
    max_concurrency: int | None = None  # requests in flight at most; None: no limit
    # What to do with requests while all engines are full, as in the gateway's setting `when_full`; or a function that
    # makes the admission of a `Gateway`. None: requests are sent at once.
    admission: str | Callable[[Any], Admission] | None = None
    slo: Slo = NO_LIMITS  # limits of TTFT and TPOT by which requests are admitted
    roles: Sequence[str] | None = None  # prefill, decode or both, one per replica; None: no roles
    legs: str = "seconds"  # name of the rule that decides which requests are split into prefill and decode legs
    network: Network = field(default_factory=Network)
    timed: bool = False  # records have the times between tokens
    pulls: bool = False  # replicas fetch prompts from one another's host memory

    @property
    def admitting(self) -> Callable[[Any], Admission] | None:
        """A function that makes the admission of a simulated gateway; None if requests are sent without admission."""
        if not isinstance(self.admission, str):
            return self.admission
        classes, rules = Classes((QosClass("default", slo=self.slo),)), Rules((self.admission,))
        return lambda gateway: Admission(classes, rules)

"""What a simulated fleet is made of, and how it is loaded."""

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
    """The loss of replica `replica` at second `at` of the run, until second `until`; None: for good."""

    replica: int
    at: float
    until: float | None = None


@dataclass(frozen=True)
class Setting:
    """A fleet and how it is loaded; the same setting and workload give the same outcome."""

    policy: str
    profiles: Sequence[Profile]  # one per replica, all with the same block size
    seed: int = 0
    gateways: int = 1  # requests are spread over them at random
    shared_ledger: bool = True  # gateways know each other's load, as with Redis
    event_delay: float | None = 0.005  # seconds from the end of a step to the map; None: engines without events
    event_loss: float = 0.0  # share of event batches lost on the way to each gateway
    losses_unseen: bool = False  # lost batches leave no gap in the numbering, so no replay is requested
    outages: Sequence[Outage] = ()
    engine_replies: bool = False  # see `Prompts`
    salt: int = 0
    vocabulary: int = synthetic.VOCABULARY
    users: int | None = None  # closed loop
    max_concurrency: int | None = None
    tiers_known: bool = True  # events cover slower tiers
    # What to do while all engines are full, as the gateway's `when_full`, or a function that makes the admission of a
    # `Gateway`; None: requests are sent at once.
    admission: str | Callable[[Any], Admission] | None = None
    slo: Slo = NO_LIMITS  # limits by which requests are admitted
    roles: Sequence[str] | None = None  # one per replica; None: no roles
    legs: str = "seconds"  # the prefill/decode rule, see `rules.make_legs`
    network: Network = field(default_factory=Network)
    timed: bool = False  # keep the times between tokens
    pulls: bool = False  # replicas fetch prompts from one another's host memory

    @property
    def admitting(self) -> Callable[[Any], Admission] | None:
        """A function that makes a gateway's admission, or None without admission."""
        if not isinstance(self.admission, str):
            return self.admission
        classes, rules = Classes((QosClass("default", slo=self.slo),)), Rules((self.admission,))
        return lambda gateway: Admission(classes, rules)

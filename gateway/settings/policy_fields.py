"""Names of policies as fields of the settings' schema.

Importing the policies takes a fifth of a second: only a rule for legs is read by them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, WrapValidator

from replicas.spelling import none_of

PolicyName = Literal[
    "least_time", "overlap_cost", "prefix_affinity", "consistent_hash",
    "least_load", "power_of_two", "round_robin", "random",
]  # fmt: skip
OWN = ".py"  # in the name of a policy that is a class of a file
LEGS = "legs:"  # before a rule for legs, among the policies in shadow
ACTING_LEGS = "legs:seconds"  # the rule that acts, whatever the policy


def split_names(value: Any) -> Any:
    return re.findall(r"[^,\s]+", value) if isinstance(value, str) else value


def _check_once(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice; name each policy once")
    return names


def _check_own(name: str) -> str:
    from policies import make_own

    make_own(name)
    return name


def _own_or(value: Any, named: Callable[[Any], Any]) -> Any:
    return _check_own(value) if isinstance(value, str) and OWN in value else named(value)


AnyPolicy = Annotated[PolicyName, WrapValidator(_own_or)]


def _check_shadow(name: str) -> str:
    if name.startswith(LEGS):
        from policies.leg_rules import make_leg_rule

        make_leg_rule(name.removeprefix(LEGS))
    elif OWN in name:
        _check_own(name)
    elif name not in get_args(PolicyName):
        raise ValueError(none_of(name, [*get_args(PolicyName)]))
    return name


Shadows = Annotated[
    tuple[Annotated[str, AfterValidator(_check_shadow)], ...], BeforeValidator(split_names), AfterValidator(_check_once)
]


def acts(name: str, policy: str) -> bool:
    """Whether a policy in shadow is the one that acts."""
    return name in (policy, ACTING_LEGS)

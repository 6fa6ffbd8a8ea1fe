"""Rules for computing a prompt on another replica than the one that writes the answer: the gateway's and others'.

The two replicas serve the request in two legs, in place of one replica for the whole request. The rules of other
systems are compared with the gateway's own rule in `loadgen simulate --legs` and in the gateway's shadow mode.

`seconds`   the gateway's rule (`policies.legs.choose`): two legs where they cost less than one replica.
`pauses:N`  the same, but with another weight for pauses: streams of a replica pause while it computes a prompt. Pauses
            count N times as much as in the choice of a replica for a whole request (0.05 in `least_time`). `seconds`
            counts them three times as much, like a second between the tokens of the request's own answer. The higher
            N, the more requests take two legs, and the longer long prompts wait (`docs/disaggregation.md`).
`always`    two legs for every request that some pair of replicas can take, as vllm-router and sglang-router do in
            their P/D modes.
`over:N`    two legs where the whole request would have N uncached tokens or more; the pair is the one that costs least.
`llmd:N`    llm-d's `prefix-based-pd-decider` with `nonCachedTokens: N` (its README's example: 100): the policy chooses
            among the decoders first, and if N prompt tokens or more are not cached there, among the prefillers for
            that decoder. N = 0 never disaggregates. `--policies llmd_weights` chooses both as llm-d does. llm-d
            estimates tokens as a quarter of the characters; here they are exact.
`never`     no pairs: prefillers are left idle.
"""

from __future__ import annotations

from functools import partial

from . import legs
from .vocabulary import Policy

NAMES = ("seconds", "pauses:N", "always", "over:N", "llmd:N", "never")


def make_leg_rule(text: str) -> legs.LegRule:
    """Return the rule for two legs (prefill on one replica, decode on another) that has this name, such as "over:1000".

    Raises ValueError for an unknown name.
    """
    name, _, number = text.partition(":")
    if name in _PLAIN and not number and text == name:
        return _PLAIN[name]
    if name in _WITH_NUMBER and number.isascii() and number.isdigit():
        return partial(_WITH_NUMBER[name], int(number))
    raise ValueError(f"{text!r} is no rule for legs; there are {', '.join(NAMES)}")


def _always(policy: Policy, ways: legs.Ways) -> legs.LegChoice | None:
    cost = legs.price(policy)
    return legs.by_preference(policy, ways) if cost is None else legs.cheapest(cost, ways)


def _never(policy: Policy, ways: legs.Ways) -> None:
    return None


def _over(least: int, policy: Policy, ways: legs.Ways) -> legs.LegChoice | None:
    return _always(policy, ways) if ways.demand.tokens - ways.whole.cached >= least else None


def _pauses(times: int, policy: Policy, ways: legs.Ways) -> legs.LegChoice | None:
    cost = legs.of_policy(policy)
    return legs.by_preference(policy, ways) if cost is None else legs.by_cost(cost.with_pauses(times), ways)


def _llmd(least: int, policy: Policy, ways: legs.Ways) -> legs.LegChoice | None:
    demand, whole = ways.demand, ways.whole
    others = [one for one in ways.prefillers if one is not whole and ways.can_pair(one, whole)]
    if not least or not others or whole not in ways.decoders or demand.tokens - whole.cached < least:
        return None
    first = others[policy.choose(demand, others).index]
    return legs.LegChoice(first, whole, demand.tokens - whole.overlap, None, None)


_PLAIN: dict[str, legs.LegRule] = {"seconds": legs.choose, "always": _always, "never": _never}
_WITH_NUMBER = {"over": _over, "llmd": _llmd, "pauses": _pauses}

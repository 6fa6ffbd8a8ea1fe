"""The field's rules for two legs, on candidates whose load and caches are given."""

import pytest

from policies import CostGroup, Demand, Ledger, Router, make, two_legs
from policies.leg_rules import make_leg_rule

from .test_router import Prefixes


def chosen(rule, held=(0, 0, 0), tokens=16_001, policy="least_time", streams=0):
    """What the rule makes of a prompt, with a prefiller and two decoders of so many streams each."""
    router = Router(make(policy), Prefixes(*held), Ledger(), CostGroup(), make_leg_rule(rule))
    prefiller, *decoders = [router.add(name, slot) for slot, name in enumerate(("p", "d", "e"))]
    for decoder in decoders:
        for _ in range(streams):
            two_legs.commit_decoder(router, Demand(1000), decoder, 1.0)
    asked = Demand(tokens, 16, 1, hashes=range(1, tokens // 16 + 1), now=1.0)
    whole = router.evaluate(asked, router.targets(decoders), 1.0)
    return two_legs.choose(router, whole, [prefiller], decoders, 1.0)


def test_always_takes_legs_where_the_gateway_would_not():
    assert chosen("seconds") is None and chosen("never") is None
    assert chosen("always").prefiller.replica == "p"


def test_the_more_pauses_count_the_fewer_streams_send_a_prompt_away():
    assert chosen("pauses:10") is None and chosen("pauses:10", policy="least_load") is not None
    least = {
        rule: next(n for n in range(200) if chosen(rule, streams=n) is not None)
        for rule in ("seconds", "pauses:1", "pauses:3", "pauses:10")
    }
    assert 0 < least["pauses:10"] < least["seconds"] == least["pauses:3"] < least["pauses:1"]
    for streams in (least["seconds"], least["pauses:1"]):
        apart = chosen("seconds", streams=streams)
        assert apart.seconds < apart.whole_seconds


def test_another_weight_of_a_term_is_a_cost_of_its_own_with_all_other_terms_as_they_were():
    cost = make("least_time").cost
    heavier = cost.with_pauses(3.0)
    made, asked = Router(make("least_time"), Prefixes(0, 0), Ledger(), CostGroup()), Demand(16_001, 16, 1, now=1.0)
    decoders = [made.add(name, slot) for slot, name in enumerate(("d", "e"))]
    made.ledger.reserve_decode("d", 900)
    for terms, others in zip(cost.of_all(asked, decoders), heavier.of_all(asked, decoders), strict=True):
        expected = [3 * term if name == "stall" else term for name, term in zip(cost.names, terms, strict=True)]
        assert list(others) == pytest.approx(expected) and heavier.names == cost.names
    assert any(terms[cost.names.index("stall")] > 0 for terms in cost.of_all(asked, decoders))


@pytest.mark.parametrize("rule", ["over", "llmd"])
def test_a_threshold_counts_what_is_not_cached_where_the_whole_request_would_go(rule):
    assert chosen(f"{rule}:16001") is not None and chosen(f"{rule}:16002") is None
    assert chosen(f"{rule}:2000", held=(0, 900, 0)) is None and chosen(f"{rule}:1000", held=(0, 900, 0)) is not None


def test_llmd_keeps_the_decoder_that_the_policy_chose_and_zero_means_never():
    apart = chosen("llmd:16", held=(0, 0, 500), policy="prefix_affinity")
    assert (apart.prefiller.replica, apart.decoder.replica, apart.moved) == ("p", "e", 16_001 - 8_000)
    assert chosen("llmd:0") is None


@pytest.mark.parametrize(
    "text", ["", "over", "over:", "over:-1", "over:x", "always:3", "llmd", "pauses", "pauses:0.5", "dynamo"]
)
def test_another_rule_is_refused(text):
    with pytest.raises(ValueError, match="no rule for legs"):
        make_leg_rule(text)

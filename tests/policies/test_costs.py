"""The cost model learns an engine, stays bounded under noise, and follows a change of speed."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import CostGroup, Load
from policies.costs import TTFT_PRIOR, Fit
from policies.ledger import FAR, UNTIMED

ENGINE = (0.004, 60e-6, 9e-9, 45e-6, 0.003, 1.3)  # unlike the prior in every coefficient


def request(rng):
    """A random request and the load it met."""
    ahead = rng.choice([0, 0, 0, int(rng.lognormvariate(6, 1))])
    load = Load(5, int(ahead > 0), ahead, rng.randrange(8), rng.randrange(8000))
    return load, int(rng.lognormvariate(6, 1.5)) + 1, rng.choice([0, 0, 1024, 4096])


def truth(load, uncached, cached, step):
    base, token, pair, queued, busy, crowd = ENGINE
    own, queue = uncached * (token + pair * (cached + uncached / 2)), queued * load.prefill_tokens
    return base + own + queue + (busy if load.prefilling else 0) + crowd * step


def teach(costs, rng, count, noise=0.0, slow=1.0):
    """Show `count` requests; returns the relative errors of the predictions made before each."""
    errors = []
    for _ in range(count):
        load, uncached, cached = request(rng)
        if load.decoding:
            costs.observe_itl(slow * (0.002 + 0.0002 * load.decoding), load.decoding, load.context_tokens)
        step = 0.002 + 0.0002 * load.decoding if load.decoding else 0.0
        seconds = slow * truth(load, uncached, cached, step) * rng.lognormvariate(0, noise)
        errors.append(abs(costs.ttft_seconds(load, uncached, cached) / seconds - 1))
        costs.observe_ttft(seconds, uncached, cached, load)
    return errors


def test_a_prompt_shares_each_of_its_steps_with_what_decodes():
    costs, load = CostGroup().add("a"), Load(decoding=50, context_tokens=50_000)
    idle, step = Load(), costs.step_seconds(load)
    for uncached, steps in ((1, 1), (8192, 1), (81_920, 10)):
        longer = costs.ttft_seconds(load, uncached, 0) - costs.ttft_seconds(idle, uncached, 0)
        assert longer == pytest.approx(steps * step)


def median(values):
    return sorted(values)[len(values) // 2]


def test_a_crowd_is_computed_no_quicker_than_its_prompts_one_by_one_with_what_decodes():
    costs = CostGroup().add("r")
    alone = costs.prefill_seconds(2000, 0)
    few = Load(requests=4, prefilling=4, prefill_tokens=8000)
    assert costs.backlog_seconds(few) == 0.0, "within a step"
    crowd = Load(requests=50, prefilling=50, prefill_tokens=100_000)
    queue = costs.ttft_parts(crowd, 2000, 0)[2]
    assert 48 * alone < queue < 75 * alone
    with_streams = replace(crowd, requests=150, decoding=100, context_tokens=200_000)
    assert costs.backlog_seconds(with_streams) > costs.backlog_seconds(crowd)


def test_learns_an_engine_unlike_its_prior():
    errors = teach(CostGroup().add("a"), random.Random(1), 1500)
    assert median(errors[:10]) > 0.2  # it had something to learn
    assert median(errors[50:150]) < 0.15
    assert median(errors[-300:]) < 0.05


@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_noise_does_not_make_it_worse_than_its_prior(noise):
    rng, group = random.Random(2), CostGroup()
    costs = group.add("a")
    learned = teach(costs, rng, 1500, noise)[-500:]
    prior = teach_nothing(random.Random(3), 500, noise)
    assert median(learned) < median(prior)
    # and the bias it ends with is far below the noise
    assert median(teach(costs, rng, 100)) < 0.5 * noise


def teach_nothing(rng, count, noise):
    errors = []
    for _ in range(count):
        load, uncached, cached = request(rng)
        step = 0.002 + 0.0002 * load.decoding if load.decoding else 0.0
        seconds = truth(load, uncached, cached, step) * rng.lognormvariate(0, noise)
        errors.append(abs(CostGroup().add("a").ttft_seconds(load, uncached, cached) / seconds - 1))
    return errors


def test_a_few_absurd_answers_move_nothing_far():
    rng, costs = random.Random(4), CostGroup().add("a")
    teach(costs, rng, 500)
    for _ in range(3):
        load, uncached, cached = request(rng)
        costs.observe_ttft(600.0, uncached, cached, load)
    assert median(teach(costs, rng, 15)) < 0.5


@pytest.mark.parametrize("slow", [0.25, 4.0])
def test_follows_a_change_of_speed_within_30_answers(slow):
    rng, group = random.Random(5), CostGroup()
    costs, other = group.add("a"), group.add("b")
    for _ in range(30):
        teach(costs, rng, 10, 0.1)
        teach(other, rng, 10, 0.1)
    assert median(teach(costs, rng, 5, 0.1, slow)) > 0.5  # not known yet
    teach(costs, rng, 25, 0.1, slow)
    assert median(teach(costs, rng, 40, 0.1, slow)) < 0.25
    assert median(teach(other, rng, 40, 0.1)) < 0.25  # its neighbour's figures stand


def test_two_kinds_of_replica_in_one_group_are_told_apart():
    rng, group = random.Random(6), CostGroup()
    fast, slow = group.add("fast"), group.add("slow")
    for _ in range(100):
        teach(fast, rng, 4, 0.1)
        teach(slow, rng, 4, 0.1, 2.0)
    ratio = slow.ttft_seconds(Load(), 2000, 0) / fast.ttft_seconds(Load(), 2000, 0)
    assert 1.7 < ratio < 2.3


def test_a_new_replica_starts_from_its_group():
    rng, group = random.Random(7), CostGroup()
    teach(group.add("a"), rng, 800)
    assert median(teach(group.add("b"), rng, 20)) < 0.1


def test_a_replica_found_slow_and_left_alone_is_believed_again():
    rng, group = random.Random(8), CostGroup()
    slow, other = group.add("slow"), group.add("other")
    teach(other, rng, 300)
    teach(slow, rng, 60, 0.1, 4.0)
    found = slow.ttft_seconds(Load(), 500, 0) / other.ttft_seconds(Load(), 500, 0)
    teach(other, rng, 400)
    later = slow.ttft_seconds(Load(), 500, 0) / other.ttft_seconds(Load(), 500, 0)
    assert found > 2.5 and later < 1.3


def test_unusable_seconds_are_ignored():
    group = CostGroup()
    costs = group.add("a")
    costs.observe_ttft(0.0, 100, 0, Load())
    costs.observe_itl(-1.0, 3, 100)
    assert group.ttft.count == group.step.count == 0 and group.ttft.coefficients == TTFT_PRIOR


@given(
    st.lists(
        st.tuples(st.floats(1e-9, 1e6), st.integers(1, 200_000), st.integers(0, 200_000), st.integers(0, 10**6)),
        max_size=60,
    )
)
def test_coefficients_stay_within_their_bounds(answers):
    fit = Fit(TTFT_PRIOR)
    for seconds, uncached, cached, ahead in answers:
        fit.observe((1.0, uncached, uncached * (cached + uncached / 2), ahead, float(ahead > 0), 0.01), seconds)
        for value, prior in zip(fit.coefficients, TTFT_PRIOR):
            assert prior / 100.001 <= value <= prior * 100.001


def test_a_step_under_way_counts_as_far_as_it_is_left():
    costs = CostGroup().add("r")
    load = Load(requests=3, prefilling=3, prefill_tokens=3000, since=10.0, begun=2, begun_tokens=2000)
    base, token, pair = TTFT_PRIOR[:3]
    lasts = base + 2000 * token + 2 * pair * 1000**2 / 2

    def queue(now=UNTIMED):
        return costs.ttft_seconds(load, 0, 0, now) - costs.ttft_seconds(Load(), 0, 0)

    whole, waiting = queue(), 1000 * TTFT_PRIOR[3]
    assert whole == queue(10.0)
    assert queue(10.0 + lasts / 2) == pytest.approx((whole + waiting) / 2)
    assert queue(10.0 + lasts) == pytest.approx(waiting)
    assert queue(10.0 + 9 * lasts) == whole, "a replica that hangs is not taken for one that is done"
    load.due = 10.0 + 3 * lasts
    assert queue(load.due) == whole
    assert queue(10.0 + 9 * lasts) == pytest.approx(whole + 6 * lasts), "nor for one that is done a step later"
    load.since = load.due = FAR
    assert queue(99.0) == whole


def test_another_group_goes_on_from_what_one_learned():
    """As a worker that takes the place of one that died, by way of JSON."""
    rng, one = random.Random(5), CostGroup()
    load = Load(prefilling=2, prefill_tokens=3000, decoding=4, context_tokens=5000)
    for _ in range(300):
        for name, pace in (("a", 1.0), ("b", 2.5)):
            uncached = rng.randrange(50, 8000)
            one.add(name).observe_ttft(pace * (0.05 + 60e-6 * uncached), uncached, 0, Load())
            one.add(name).observe_itl(pace * 0.02, 4, 5000)
    other = CostGroup(json.loads(json.dumps(one.state())))
    for name in "abc":  # c is new to both
        assert other.add(name).ttft_seconds(load, 700, 100) == one.add(name).ttft_seconds(load, 700, 100)
    assert one.add("b").ttft_seconds(load, 700, 100) > 1.5 * one.add("a").ttft_seconds(load, 700, 100)
    for group in (one, other):
        group.add("a").observe_ttft(0.4, 3000, 0, Load())
    assert other.add("a").ttft_seconds(load, 700, 100) == one.add("a").ttft_seconds(load, 700, 100)
    assert other.add("a").error == one.add("a").error < CostGroup().add("a").ttft_seconds(load, 700, 100)


def test_a_slow_replica_that_others_are_chosen_over_is_at_their_speed_again_within_seconds():
    group = CostGroup()
    slow, quick, other = group.add("slow"), group.add("quick"), group.add("other")
    slow.ttft.value, quick.ttft.value, other.ttft.value = 4.0, 0.25, 0.25  # the group's own scale is arbitrary
    seconds = 0.0
    while slow.ttft.value > quick.ttft.value:
        group.decay_idle([slow], [quick, other], 0.25)
        seconds += 0.25
    assert 5 < seconds < 12 and slow.ttft.value > 0.2 and quick.ttft.value == 0.25
    slow.ttft.value = 0.1
    group.decay_idle([slow], [quick, other], 3.0)
    assert slow.ttft.value == 0.1, "quicker ones are chosen anyway"


@pytest.mark.parametrize("requests", [1, 25, 250])
def test_a_replica_that_is_passed_over_is_tried_again_however_many_requests_the_others_get(requests):
    """As soon, whatever the others' speed is to their group's. `requests`: in a quarter of a second."""
    group = CostGroup()
    slow, quick = group.add("slow"), group.add("quick")
    quick.ttft.value = quick.step.value = 0.5
    quarters = 0
    while slow.ttft.value > quick.ttft.value or slow.step.value > quick.step.value:
        group.decay_idle([slow], [quick], 0.25)
        for _ in range(requests):
            quick.observe_ttft(quick.ttft_seconds(Load(), 700, 100), 700, 100, Load())
            quick.observe_itl(quick.step_seconds(Load(decoding=1, context_tokens=800)), 1, 800)
        quarters += 1
        assert quarters < 4 * 12, "twelve seconds"

"""Who is sent, who waits and who is refused: the state machine without clocks and sockets."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import (
    Admission,
    Classes,
    CostGroup,
    Demand,
    Estimate,
    Ledger,
    Load,
    QosClass,
    QueuedRequest,
    Rule,
    Rules,
    Slo,
)
from policies.admission import Space
from policies.class_queue import QUANTUM, ClassQueue
from policies.estimates import estimate
from policies.fair_share import FairShare
from policies.fit import Margin
from policies.vocabulary import Candidate

PREMIUM, STANDARD, FREE = (
    QosClass(name, fraction, priority, Slo(2.0, 0.05))
    for name, fraction, priority in (("premium", 0.1, 100), ("standard", 0.3, 50), ("free", 0.6, 10))
)
CLASSES = Classes((PREMIUM, STANDARD, FREE))
ROOM = Estimate(0.05, 0.0, 0.02, 1.0, there=2)
FULL = Estimate(0.45, 0.4, 0.02, 1.0, there=9, computing=2)
SLOW = Estimate(0.05, 0.0, 0.08, 4.0, there=40)
LATE = Estimate(2.5, 2.4, 0.02, 1.0, there=9, computing=2)


COSTS = CostGroup().add("r")


def ticket(qos=FREE, now=0.0, tenant="", size=1000, slo=None):
    return QueuedRequest(qos, slo or qos.slo, now, tenant, size)


def ask(admission, one, *estimates, now=0.0, tokens=1000):
    verdict = admission.ask(one, tokens, estimates, now)
    if verdict.decision == "admitted":
        admission.sent(one, estimates[verdict.among[0]], COSTS, 2000, now)
    return verdict


def filled(count=3, rules=Rules(), qos=FREE, **given):
    """One with so many of a class in queue."""
    admission = Admission(CLASSES, rules)
    waiting = [ticket(qos, **given) for _ in range(count)]
    for one in waiting:
        assert ask(admission, one, FULL).decision == "queued"
    return admission, waiting


# --- at once


@pytest.mark.parametrize("mode", ["wait", "reject", "observe"])
def test_who_finds_room_goes_at_once(mode):
    admission = Admission(CLASSES, Rules((mode,)))
    assert ask(admission, ticket(), FULL, ROOM).decision == "admitted"
    assert not admission.waiting


def test_it_goes_only_where_there_is_room():
    assert Admission(CLASSES, Rules()).ask(ticket(), 1000, [FULL, ROOM, SLOW, ROOM], 0.0).among == [1, 3]


def test_an_idle_replica_has_room_however_slow_it_is():
    """A limit that no replica can ever keep would else be a door that never opens."""
    idle = Estimate(9.0, 0.0, 0.5)
    for mode in ("wait", "reject"):
        assert ask(Admission(CLASSES, Rules((mode,))), ticket(), idle).decision == "admitted"


def test_reject_sends_who_will_be_in_time_and_refuses_the_others():
    admission = Admission(CLASSES, Rules(("reject",)))
    assert ask(admission, ticket(), FULL)[:2] == ("admitted", "met")
    late = ask(admission, ticket(), LATE)
    slow = ask(Admission(CLASSES, Rules(("reject",))), ticket(), SLOW)  # nobody was refused before it
    assert late[:2] == ("refused", "ttft") and late.retry_after == pytest.approx(0.5)
    assert slow[:2] == ("refused", "tpot") and slow.retry_after == pytest.approx(4.0 * (1 - 50 / 80))


def test_observe_sends_all_and_says_who_would_have_been_refused():
    admission = Admission(CLASSES, Rules(("observe",)))
    assert ask(admission, ticket(), LATE)[:2] == ("observed", "ttft")


def test_a_request_without_limits_is_refused_only_where_nobody_has_room():
    free = QosClass("free")
    admission = Admission(Classes((free,)), Rules(("reject",)))
    assert ask(admission, ticket(free), ROOM)[:2] == ("admitted", "room")
    assert ask(admission, ticket(free), LATE)[:2] == ("refused", "full")
    assert ask(Admission(Classes((free,)), Rules(("observe",))), ticket(free), LATE)[:2] == ("observed", "full")


# --- in queue


def test_who_finds_no_room_waits_and_goes_when_there_is_some():
    admission, (first, second) = filled(2)
    assert admission.head(0.1) is first
    assert ask(admission, first, FULL, now=0.1).decision == "queued"
    assert ask(admission, first, ROOM, now=0.2)[:2] == ("admitted", "turn")
    assert admission.head(0.2) is second and admission.space.requests == 1


def test_a_newcomer_does_not_overtake_its_own_class():
    admission, _ = filled(1)
    assert ask(admission, ticket(), ROOM, now=0.1).decision == "queued"


def places(names):
    return [(name,) for name in names]


def test_who_waits_keeps_only_its_own_replicas_from_others():
    admission, pinned, behind = Admission(CLASSES, Rules()), ticket(), ticket()
    both, alone = places("ab"), places("b")
    assert admission.ask(pinned, 1000, [FULL], 0.0, alone).decision == "queued"
    assert admission.ask(ticket(), 1000, [ROOM, ROOM], 0.1, both).among == [0]
    assert admission.ask(behind, 1000, [FULL, ROOM], 0.1, both).decision == "queued"
    heads = admission.heads(0.2)
    assert next(heads) is pinned and admission.ask(pinned, 1000, [FULL], 0.2, alone).decision == "queued"
    assert next(heads) is behind and admission.ask(behind, 1000, [ROOM, ROOM], 0.2, both).among == [0]
    assert next(heads, None) is None


def test_of_a_class_whoever_came_first_goes_first_also_where_others_may_go_to_more_replicas():
    admission, waiting = Admission(CLASSES, Rules()), [ticket(now=0.1 * number) for number in range(4)]
    for number, one in enumerate(waiting):
        admission.ask(one, 1000, [FULL] * (2 - number % 2), 0.1 * number, places("ab"[number % 2 :]))
    for one in waiting:
        assert admission.head(0.5) is one
        admission.leave(one, 0.5)


def test_a_higher_class_overtakes_a_lower_one():
    admission, _ = filled(1)
    assert ask(admission, ticket(PREMIUM), ROOM, now=0.1).decision == "admitted"
    admission, _ = filled(1)
    waiting = ticket(PREMIUM)
    ask(admission, waiting, FULL)
    assert admission.head(0.1) is waiting


def test_a_class_that_had_its_reserve_lets_go_before_it_those_that_had_not():
    admission = Admission(CLASSES, Rules())
    for _ in range(20):
        ask(admission, ticket(PREMIUM), ROOM)
    free, premium = ticket(FREE), ticket(PREMIUM)
    ask(admission, premium, FULL)
    ask(admission, free, FULL)
    assert admission.head(0.0) is free
    assert admission.head(60.0) is not None


def test_the_lowest_class_may_use_all_while_it_is_alone_and_leaves_room_while_others_ask():
    nearly = ROOM._replace(tpot=0.045, computing=1)
    admission = Admission(CLASSES, Rules())
    assert ask(admission, ticket(), nearly).decision == "admitted"
    ask(admission, ticket(PREMIUM), ROOM, now=1.0)
    ask(admission, ticket(STANDARD), ROOM, now=1.0)
    for _ in range(40):
        ask(admission, ticket(), ROOM, now=1.0)
    assert ask(admission, ticket(), nearly, now=1.0).decision == "queued"
    assert ask(admission, ticket(PREMIUM), nearly, now=1.0).decision == "admitted"
    later = Admission(CLASSES, Rules())
    ask(later, ticket(PREMIUM), ROOM, now=1.0)
    assert ask(later, ticket(), nearly, now=60.0).decision == "admitted"


def with_a_prompt(qos, others=0):
    """Of three replicas the first computes a prompt of this class from 1.0 on, by what is predicted to 1.05."""
    admission = Admission(CLASSES, Rules())
    for _ in range(others):
        admission.sent(ticket(), ROOM, COSTS, 2000, 1.0, "b")
    one = ticket(qos, now=1.0)
    assert admission.ask(one, 1000, [ROOM] * 3, 1.0, places("abc")).decision == "admitted"
    admission.sent(one, ROOM, COSTS, 2000, 1.0, "a")
    return admission


def finds(admission, qos, now, computing=(1, 1, 0)):
    estimates = [ROOM._replace(computing=prompts) for prompts in computing]
    return admission.ask(ticket(qos, now=now), 1000, estimates, now, places("abc")).among


def test_a_lower_class_joins_no_prompt_of_a_higher_one_that_is_within_its_reserve():
    admission = with_a_prompt(PREMIUM, others=40)
    assert finds(admission, FREE, 1.01) == [1], "one step would compute both"
    assert finds(admission, FREE, 1.01, (0, 1, 0)) == [0, 1, 2], "its first token was sooner than predicted"
    assert finds(admission, FREE, 1.06) == [0, 1]
    assert finds(admission, PREMIUM, 1.01, (1, 1, 1)) == [0, 1, 2]
    assert finds(with_a_prompt(FREE, others=40), STANDARD, 1.01, (1, 1, 1)) == [0, 1, 2], "nor a higher one's a lower"
    assert finds(with_a_prompt(PREMIUM), FREE, 1.01, (1, 1, 1)) == [0, 1, 2], "it has had its reserve"


def test_of_replicas_that_compute_for_nobody_any_more_few_are_remembered():
    fair_share = FairShare(CLASSES)
    for number in range(1000):
        fair_share.compute(FREE, f"r{number}", number + 1.0, float(number))
    assert fair_share.computes("r999", [FREE], 999.5) and not fair_share.computes("r999", [PREMIUM], 999.5)
    assert len(fair_share._computes) <= 256


def test_who_is_predicted_to_wait_too_long_is_refused_at_once_and_told_when_to_come_back():
    admission, _ = filled(8)
    verdict = ask(admission, ticket(), FULL._replace(ttft=1.9, wait=1.85), now=0.0)
    assert verdict[:2] == ("refused", "ttft") and verdict.retry_after > 0


def test_who_has_waited_too_long_leaves_in_time_to_be_told():
    admission, waiting = filled(3)
    assert not [*admission.turned_out(1.0)]
    out = [*admission.turned_out(2.0)]
    assert [one for one, _ in out] == waiting
    assert {verdict[:2] for _, verdict in out} == {("refused", "deadline")}
    assert admission.head(2.0) is None and admission.space.requests == admission.space.bytes == 0


def test_seconds_in_which_nobody_could_be_asked_are_waited_by_nobody():
    """The caller did not run: neither who waits then nor who comes later is refused for it."""
    admission, (first, second) = filled(2)
    admission.held_up(100.0)
    assert not [*admission.turned_out(101.4)]
    assert ask(admission, first, ROOM, now=101.4).decision == "admitted"
    without, (same, _) = filled(2)
    assert ask(without, same, ROOM, now=1.4).decision == "admitted"
    assert admission.queues[0].pace.value == pytest.approx(without.queues[0].pace.value)
    assert [one for one, _ in admission.turned_out(102.1)] == [second]


def test_whose_turn_comes_too_late_is_not_computed_for_nothing():
    admission, (first, second) = filled(2)
    assert ask(admission, first, ROOM._replace(ttft=0.6), now=1.5)[:2] == ("refused", "deadline")
    assert admission.head(1.5) is second and admission.space.requests == 1
    quick, slow = ROOM, ROOM._replace(ttft=0.6)
    assert ask(admission, second, slow, quick, now=1.5).among == [1]


def test_without_a_limit_the_longest_wait_counts():
    free = QosClass("free")
    admission = Admission(Classes((free,)), Rules(max_wait=5.0))
    ask(admission, ticket(free), FULL)
    assert not [*admission.turned_out(4.9)] and len([*admission.turned_out(5.1)]) == 1


@pytest.mark.parametrize("rules", [Rules(max_requests=3), Rules(max_bytes=3000)])
def test_a_full_queue_sheds_its_lowest_class_for_a_higher_one(rules):
    admission, waiting = filled(3, rules)
    assert ask(admission, ticket(), FULL)[:2] == ("refused", "queue_full")
    assert ask(admission, ticket(STANDARD), FULL).decision == "queued"
    assert [(one, verdict.reason) for one, verdict in admission.turned_out(0.0)] == [(waiting[-1], "shed")]
    assert admission.space.requests == 3 and admission.space.bytes == 3000


def test_space_is_shared_by_the_fleets_of_a_process():
    space = Space()
    one, other = (Admission(CLASSES, Rules(max_requests=1), space) for _ in range(2))
    assert ask(one, ticket(), FULL).decision == "queued"
    assert ask(other, ticket(), FULL)[:2] == ("refused", "queue_full")


def test_nobody_gives_way_to_a_request_that_would_find_no_space_all_the_same():
    admission, waiting = filled(3, Rules(max_bytes=6000))
    others = [ticket(PREMIUM) for _ in range(3)]
    assert {ask(admission, one, FULL).decision for one in others} == {"queued"}
    assert ask(admission, ticket(STANDARD, size=4000), FULL)[:2] == ("refused", "queue_full")
    assert ask(admission, ticket(PREMIUM, size=6001), FULL)[:2] == ("refused", "queue_full")
    assert all(one.waits for one in waiting + others) and not [*admission.turned_out(0.0)]
    assert ask(admission, ticket(STANDARD, size=2500), FULL).decision == "queued"
    assert [one.waits for one in waiting] == [False] * 3 and admission.space.bytes == 5500


def test_a_tenant_with_much_gives_way_to_a_large_request_of_another_or_not_at_all():
    admission, waiting = filled(5, Rules(max_bytes=5000), tenant="hog")
    assert ask(admission, ticket(tenant="other", size=3000), FULL)[:2] == ("refused", "queue_full")
    assert all(one.waits for one in waiting)
    assert ask(admission, ticket(tenant="other", size=2000), FULL).decision == "queued"
    assert [one for one, _ in admission.turned_out(0.0)] == waiting[:2:-1]


def test_the_lowest_class_gives_way_to_a_higher_one_of_another_fleet():
    """Requests for one model that fill the queue would else keep out whoever asks for another."""
    space = Space()
    one, other = (Admission(CLASSES, Rules(max_requests=3), space) for _ in range(2))
    waiting = [ticket() for _ in range(3)]
    assert {ask(one, each, FULL).decision for each in waiting} == {"queued"}
    assert ask(other, ticket(), FULL)[:2] == ("refused", "queue_full")
    assert ask(other, ticket(PREMIUM), FULL).decision == "queued"
    assert space.untold == 1 and space.requests == 3
    assert [(each, verdict.reason) for each, verdict in one.turned_out(0.0)] == [(waiting[-1], "shed")]
    assert space.untold == 0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 9), st.booleans()), max_size=60))
def test_the_tenant_with_most_is_known_whoever_comes_and_leaves(steps):
    queue, waiting = ClassQueue(FREE, 1.0), []
    for tenant, size, leaves in steps:
        if leaves and waiting:
            queue.drop(waiting.pop(size % len(waiting)), 0.0)
        else:
            waiting.append(ticket(tenant=tenant, size=size))
            queue.add(waiting[-1], 0.0)
        counts, sizes = Counter(one.tenant for one in waiting), Counter()
        for one in waiting:
            sizes[one.tenant] += one.size
        assert queue.most("count") == max(counts.values(), default=0)
        assert queue.most("size") == max(sizes.values(), default=0) and queue.size == sum(sizes.values())
        for resource, sums in (("count", counts), ("size", sizes)):
            last = queue.last(resource)
            if last is not None:
                assert sums[last.tenant] == max(sums.values())
                assert last is [one for one in waiting if one.tenant == last.tenant][-1], "the latest of them"
        assert {one for tenant in queue._tenants.values() for one in tenant.requests} == set(waiting)


class Name(str):
    """One that counts how often it is compared."""

    compared, __hash__ = 0, str.__hash__

    def __eq__(self, other):
        Name.compared += 1
        return str.__eq__(self, other)


def test_tenants_give_way_without_each_being_looked_for_among_all():
    queue, waiting = ClassQueue(FREE, 1.0), [ticket(tenant=Name(number)) for number in range(2000)]
    for one in waiting:
        queue.add(one, 0.0)
    Name.compared = 0
    while (last := queue.last("count")) is not None:
        queue.drop(last, 0.0)
    assert not queue.count and Name.compared < 100_000


def test_tenants_whose_requests_have_all_left_are_not_ahead():
    queue, here = ClassQueue(FREE, 1.0), [ticket(tenant="here") for _ in range(4)]
    gone = [ticket(tenant=f"gone {number}") for number in range(20)]
    for one in here + gone:
        one.own = 1.0
        queue.add(one, 0.0)
    for one in gone:
        queue.drop(one, 0.0)
    assert queue.ahead("new") == 1.0


@pytest.mark.parametrize("rules", [Rules(max_requests=5), Rules(max_bytes=5000)])
def test_a_full_queue_is_shared_out_among_the_tenants_of_a_class(rules):
    """One that fills it gives up its latest for others, until they have as many."""
    admission, waiting = filled(5, rules, tenant="hog")
    others = [ticket(tenant="other") for _ in range(3)]
    assert [ask(admission, one, FULL).decision for one in others] == ["queued", "queued", "refused"]
    assert ask(admission, ticket(tenant="hog"), FULL).decision == "refused"
    assert [one for one, _ in admission.turned_out(0.0)] == waiting[:2:-1]
    assert admission.space.requests == 5 and admission.space.bytes == 5000


def test_a_tpot_limit_of_a_requests_own_holds_up_nobody():
    """No replica with streams keeps it, so it would wait for an idle one, and all behind it as well."""
    strict = Slo(FREE.slo.ttft, 1e-5)
    admission, (one,) = filled(1, slo=strict)
    behind = ticket(tenant="other")
    assert ask(admission, behind, FULL).decision == "queued"
    assert ask(admission, one, FULL, ROOM)[:2] == ("refused", "tpot")
    assert not one.waits and admission.space.requests == 1
    assert admission.head(0.0) is behind and ask(admission, behind, FULL, ROOM).decision == "admitted"
    assert ask(admission, ticket(slo=strict), FULL, ROOM)[:2] == ("refused", "tpot")
    assert ask(admission, ticket(slo=strict), FULL, ROOM._replace(there=0)).among == [1]
    assert Admission(CLASSES, Rules(("reject",))).ask(ticket(slo=strict), 1000, [ROOM], 0.0)[:2] == ("refused", "tpot")


def test_a_limit_of_a_requests_own_keeps_it_no_longer_than_the_settings_do():
    admission, (one, *_) = filled(2, Rules(max_wait=5.0), slo=Slo(3600.0))
    assert not [*admission.turned_out(4.9)] and len([*admission.turned_out(5.1)]) == 2
    patient = QosClass("patient", slo=Slo(60.0))
    admission = Admission(Classes((patient,)), Rules(max_wait=5.0))
    ask(admission, ticket(patient, slo=Slo(3600.0)), FULL)
    assert not [*admission.turned_out(59.0)] and len([*admission.turned_out(60.1)]) == 1


def test_requests_that_left_leave_no_deadlines_behind():
    admission, _ = filled(1)
    for _ in range(1000):
        one = ticket()
        assert ask(admission, one, FULL).decision == "queued"
        admission.leave(one, 0.0)
    assert len(admission._deadlines) < 100


def test_who_leaves_is_no_more_in_line():
    admission, (first, second) = filled(2)
    admission.leave(first, 0.1)
    admission.leave(first, 0.1)
    assert admission.head(0.1) is second and admission.space.requests == 1


steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "turn", "leave", "out"]),
        st.sampled_from([PREMIUM, STANDARD, FREE]),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from([ROOM, FULL, SLOW, LATE]),
        st.floats(0, 0.5),
    ),
    max_size=60,
)


@given(steps)
def test_its_counts_are_those_of_who_waits_whatever_happens(steps):
    """Nobody is lost, nobody is there twice, and nothing is counted for who has left."""
    admission, waiting, now = Admission(CLASSES, Rules(max_requests=8)), set(), 0.0
    for what, qos, tenant, offer, seconds in steps:
        now += seconds
        if what == "ask":
            one = ticket(qos, now, tenant)
            if ask(admission, one, offer, now=now).decision == "queued":
                waiting.add(one)
        elif what == "turn" and (head := admission.head(now)) is not None:
            assert head in waiting
            if ask(admission, head, offer, now=now).decision != "queued":  # it is too late for some
                waiting.remove(head)
        elif what == "leave" and waiting:
            admission.leave(waiting.pop(), now)
        for one, _ in admission.turned_out(now):
            waiting.remove(one)
        assert admission.space.requests == len(waiting) == sum(queue.count for queue in admission.queues)
        assert admission.space.bytes == 1000 * len(waiting)
        assert {one for one in waiting if not one.waits} == set()
        for queue in admission.queues:
            assert queue.work == pytest.approx(sum(one.own for one in waiting if one.qos is queue.qos))


# --- tenants


def test_tenants_of_a_class_take_turns_by_the_tokens_of_their_prompts():
    """One that asks ten times as much gets as many tokens, not ten times as many."""
    queue, sent = ClassQueue(FREE, 1.0), Counter()
    for _ in range(400):
        for tenant, tokens in (("greedy", 4096), ("greedy", 4096), ("small", 512)):
            one = QueuedRequest(FREE, FREE.slo, 0.0, tenant)
            one.tokens, one.own = tokens, tokens * 1e-5
            queue.add(one, 0.0)
    for _ in range(300):
        head = queue.head()
        sent[head.tenant] += head.tokens
        queue.take(head, 0.0)
    assert abs(sent["greedy"] - sent["small"]) <= 2 * max(QUANTUM, 4096)


def test_tenants_that_left_leave_nothing_behind():
    queue = ClassQueue(FREE, 1.0)
    for number in range(1000):
        one = QueuedRequest(FREE, FREE.slo, 0.0, f"t{number}")
        queue.add(one, 0.0)
        queue.drop(one, 0.0)
    assert queue.count == 0 and len(queue._tenants) < 100 and queue.head() is None and not queue._tenants


# --- estimates and their margin


def candidate(**load):
    ledger = Ledger()
    found = Candidate("r", 0, ledger.add("r"), CostGroup().add("r"))
    for name, value in load.items():
        setattr(found.load, name, value)
    return found


def demand(tokens=1000, output=100.0):
    return Demand(tokens, output=output)


def test_a_quote_is_what_the_costs_predict():
    one = candidate(requests=3, prefilling=1, prefill_tokens=900, decoding=2, context_tokens=3000, output_tokens=300)
    assert estimate(one, demand()).ttft == pytest.approx(one.costs.ttft_seconds(one.load, 1000, 0))
    assert estimate(candidate(), demand()).own == pytest.approx(estimate(candidate(), demand()).ttft)


def test_prompts_ahead_are_streams_by_then_and_streams_end_meanwhile():
    streams = {"requests": 20, "decoding": 20, "context_tokens": 40_000}
    lasting, ending = candidate(output_tokens=20_000, **streams), candidate(output_tokens=20, **streams)
    assert estimate(ending, demand()).tpot < estimate(lasting, demand()).tpot
    ahead = candidate(
        requests=25, prefilling=5, prefill_tokens=5000, decoding=20, context_tokens=40_000, output_tokens=25_000
    )
    assert estimate(ahead, demand()).tpot > estimate(lasting, demand()).tpot


def test_a_full_cache_makes_it_wait_for_streams_to_end():
    load = {"requests": 20, "decoding": 20, "context_tokens": 40_000, "output_tokens": 4000}
    with_room, full = candidate(**load), candidate(capacity_tokens=40_000, **load)
    assert estimate(full, demand()).wait > estimate(with_room, demand()).wait
    assert estimate(full, demand()).full > 1.0 and estimate(with_room, demand()).full == 0.0


def test_the_margin_grows_to_what_nearly_all_keep():
    margin = Margin()
    for number in range(2000):
        margin.learn(1.0, 1.5 if number % 5 == 0 else 1.0, 2.0)
    assert 1.3 < margin.factor < 1.7
    for _ in range(2000):
        margin.learn(0.01, 5.0, 2.0)  # far from the limit: it says nothing
    assert margin.factor < 1.7


@pytest.mark.parametrize("answers, grows", [(0, False), (2, False), (3, True)])
def test_what_was_predicted_before_the_costs_had_learned_leaves_no_margin(answers, grows):
    """As of a burst that comes first to an engine which is slow: the costs are corrected, and nothing besides."""
    admission, costs = Admission(CLASSES, Rules()), CostGroup().add("r")
    for _ in range(answers):
        costs.observe_ttft(0.05, 1000, 0, Load())
    for _ in range(20):
        admission.sent(one := ticket(slo=Slo(2.0, None)), Estimate(1.9, 1.8, 0.02), costs, 2000, 0.0)
        admission.first_token(one, 6.0)
    assert (admission.fit.ttft_margin.factor > 1.1) == grows and (grows or admission.fit.ttft_margin.factor == 1.0)


# --- classes


def test_the_first_rule_whose_conditions_hold_says_the_class():
    classes = Classes(
        (PREMIUM, STANDARD, FREE),
        (
            Rule(PREMIUM, ("x-customer-tier", "premium")),
            Rule(STANDARD, None, "big*", "/v1/chat/*"),
            Rule(STANDARD, ("x-internal", None)),
            Rule(FREE),
        ),
    )

    def of(path="/v1/completions", model="m", **headers):
        return classes.of(lambda name: headers.get(name.decode().replace("-", "_")), path, model).name

    assert of(x_customer_tier=" premium ") == "premium" and of(x_customer_tier="gold") == "free"
    assert of("/v1/chat/completions", "big-1") == "standard" and of("/v1/completions", "big-1") == "free"
    assert of(x_internal="") == "standard" and of() == "free"


def test_where_no_rule_holds_it_is_of_the_lowest_priority():
    assert CLASSES.of(lambda name: None, "/", "") is FREE


def test_an_api_key_says_the_class_itself_or_by_its_name():
    classes = Classes((PREMIUM, STANDARD, FREE), (Rule(STANDARD, key="team-*"), Rule(FREE)))

    def of(**key):
        return classes.of(lambda name: None, "/", "m", **key).name

    assert of(key="team-a") == "standard" and of(key="other") == of() == "free"
    assert of(key="other", named="premium") == "premium"
    assert of(key="team-a", named="gone since the file was written") == "standard"


def test_an_earlier_time_lets_no_time_pass_again():
    """As of a caller that goes through those that wait, by the time at which it began."""
    fair_share = FairShare(CLASSES)
    fair_share.take(PREMIUM, 5.0, 5.0, 100.0)
    pace = fair_share.pace(101.0)
    for _ in range(100):
        fair_share.decay(100.0)
        fair_share.decay(101.0)
    assert fair_share.pace(101.0) == pace

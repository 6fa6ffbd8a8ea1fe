"""Requests in two legs, in virtual time: who does what, how long it takes, and what is left when something fails."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.simulate import Fleet, Network, Setting, Turn, simulate
from replicas.simulated.profile import load_profile

from .test_fleet_faults import work

PROFILE = load_profile("gpu-8b", num_blocks=4096)
ROLES = ["prefill", "decode", "decode"]


def turn(blocks, output=24, first=1, tail=8):
    hashes = list(range(first, first + blocks))
    tokens = 16 * blocks + tail
    reply = range(10**9 + first, 10**9 + first + (tokens + output) // 16 - blocks)
    return Turn(hashes, tokens, output, hashes + list(reply))


def fleet(legs="always", roles=ROLES, policy="least_time", **more):
    return Fleet([more.pop("profile", PROFILE)] * len(roles), policy, 1, roles=roles, legs=legs, **more)


def nothing_is_left(made):
    """No load in any ledger, no block in use on any engine."""
    loads = [gateway.router.ledger.total() for gateway in made.gateways]
    assert all(
        (one.requests, one.prefill_tokens, one.context_tokens, one.output_tokens) == (0, 0, 0, 0) for one in loads
    )
    assert [one.engine.kv_usage for one in made.replicas] == [0.0] * len(made.replicas)


def test_one_request_takes_its_prompt_its_transfer_and_a_step_of_the_decoder():
    made, step = fleet(network=Network(gbit_per_s=100.0, fixed=0.010)), PROFILE.step
    record = made.send(turn(100))
    made.run()
    moved = 1608 * 131_072 * 8e-9 / 100.0
    assert record.prefilled_by == 0 and record.replica in (1, 2)
    decoder = step.seconds(1, 0.0, 0, 0, 0.0)
    assert record.first == pytest.approx(step.seconds(1608, 0.0, 0, 0, 0.0) + moved + 0.010 + decoder)
    (transfer,) = made.links.transfers
    assert (transfer.prefiller, transfer.tokens, transfer.waited) == (0, 1608, 0.0)
    nothing_is_left(made)


def test_what_the_decoder_holds_is_not_moved_and_the_prefillers_hits_are_told():
    made = fleet(roles=["prefill", "decode"])
    made.send(turn(100))
    made.run()
    record = made.send(turn(150))  # the first hundred blocks are known to both
    made.run()
    assert [one.tokens for one in made.links.transfers] == [1608, 2408 - 1600]
    assert (record.cached, record.predicted) == (1600, 1600)


def test_an_engine_sends_one_cache_at_a_time():
    made = fleet(network=Network(gbit_per_s=1.0))
    for first in (1, 10**6):
        made.send(turn(100, first=first))
    made.run()
    one, other = made.links.transfers
    moving, computing = 1608 * 131_072 * 8e-9, PROFILE.step.seconds(1608, 0.0, 0, 0, 0.0)
    assert one.waited == 0.0 and other.waited == pytest.approx(moving - computing)  # its prompt was computed meanwhile


def test_without_roles_there_are_no_legs_whatever_the_rule():
    told = [(r.sent, r.first, r.last, r.replica) for r in simulate(work(90), Setting("least_time", [PROFILE] * 3)).done]
    made = simulate(work(90), Setting("least_time", [PROFILE] * 3, roles=["both"] * 3, legs="always"))
    assert [(r.sent, r.first, r.last, r.replica) for r in made.done] == told and not made.transfers


def test_the_gateways_rule_moves_the_long_prompt_and_leaves_the_chats():
    made = fleet(legs="seconds", roles=["prefill", "decode"])
    chats = []
    for number in range(30):
        made.at(0.03 * number, lambda n: chats.append(made.send(turn(4, output=400, first=1000 * n))), number)
    made.run(until=1.0)
    long = made.send(turn(2000, first=10**7))
    made.run()
    assert long.prefilled_by == 0 and all(chat.prefilled_by < 0 for chat in chats)
    nothing_is_left(made)


@pytest.mark.parametrize("policy", ["least_time", "round_robin", "llmd_weights"])
@pytest.mark.parametrize("legs", ["seconds", "always", "over:64", "llmd:64", "never"])
def test_every_request_ends_on_a_decoder_under_every_rule(policy, legs):
    made = simulate(work(90), Setting(policy, [PROFILE] * 3, 1, roles=ROLES, legs=legs))
    assert len(made.done) == 90 and all(record.error is None and record.first < record.last for record in made.done)
    assert {record.replica for record in made.done} == {"r1", "r2"}
    assert (len(made.transfers) == 90) if legs == "always" and policy == "least_time" else len(made.transfers) <= 90
    assert bool(made.transfers) == (legs not in ("seconds", "never") or (policy != "least_time" and legs == "seconds"))


def test_the_lease_holds_the_prefillers_blocks_until_they_are_read():
    made = fleet(network=Network(gbit_per_s=0.1))
    made.send(turn(1000))
    made.run(until=5.0)  # computed within a second, and on its way for 168 s
    assert made.replicas[0].engine.kv_usage > 0.2
    made.run()
    nothing_is_left(made)


def test_who_waits_for_blocks_that_are_kept_begins_when_they_are_free():
    made = fleet(profile=load_profile("gpu-8b", num_blocks=1100), network=Network(gbit_per_s=1.0))
    records = [made.send(turn(1000, first=first)) for first in (1, 10**6)]  # two do not fit
    made.run()
    assert [record.prefilled_by for record in records] == [0, 0]
    moved = 16_008 * 131_072 * 8e-9
    assert records[1].first - records[0].first > moved
    nothing_is_left(made)


def test_a_transfer_that_cannot_begin_within_the_lease_leaves_the_request_whole():
    made = fleet(roles=["prefill", "decode"], network=Network(gbit_per_s=1.0, lease=1.0))
    records = [made.send(turn(1000, first=first)) for first in (1, 10**6)]
    made.run(until=3.0)
    assert made.gateways[0].router.transfers.paused("r0", "r1", 3.0)
    made.run()
    assert [record.prefilled_by for record in records] == [0, -1] and all(record.error is None for record in records)
    assert records[1].first > 1.0  # nobody knew before the lease was over
    nothing_is_left(made)


def test_a_decoder_that_is_lost_meanwhile_is_replaced_without_computing_the_prompt_again():
    made = fleet()
    record = made.send(turn(1000))
    made.run(until=0.01)
    (placed,) = made._live[0].values()
    reserved = placed.legs.second.candidate.slot
    made.lose(reserved)
    made.run()
    assert record.error is None and record.replica == ({1, 2} - {reserved}).pop() and record.tried == ()
    assert made.replicas[0].engine.counters.prompt_tokens == 16_008
    made.restore(reserved)
    nothing_is_left(made)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["always", "seconds", "llmd:64"]),
    st.integers(1, 2),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 3), st.one_of(st.none(), st.floats(0.1, 3))), max_size=4),
    st.sampled_from([0.5, 100.0]),
    st.sampled_from([0.2, 30.0]),
)
def test_whatever_is_lost_every_request_ends_once_and_nothing_is_left(legs, gateways, lost, gbit, lease):
    network = Network(gbit, 0.010, lease)
    made = fleet(legs=legs, roles=["prefill", "both", "decode", "decode"], gateways=gateways, network=network)
    for replica, at, away in lost:
        made.at(at, made.lose, replica)
        if away is not None:
            made.at(at + away, made.restore, replica)
    ended = []
    for number in range(40):
        made.at(0.05 * number, lambda n: made.send(turn(20 + n, first=1 + 1000 * (n % 7)), None, lambda: ended.append(n)), number)  # fmt: skip
    made.run()
    assert sorted(ended) == list(range(40))
    for index, replica in enumerate(made.replicas):
        if not replica.up:
            made.restore(index)
    nothing_is_left(made)


def test_gaps_between_tokens_are_those_of_the_steps():
    made = simulate(work(90), Setting("least_time", [PROFILE] * 3, 1, roles=ROLES, legs="over:64", timed=True))
    assert any(record.outputs > 20 for record in made.done)
    for record in made.done:
        assert len(record.gaps) == record.outputs - 1
        assert sum(record.gaps) == pytest.approx(record.last - record.first)
    untimed = simulate(work(90), Setting("least_time", [PROFILE] * 3, 1, roles=ROLES, legs="over:64"))
    assert [record.last for record in untimed.done] == [record.last for record in made.done]
    assert not any(record.gaps for record in untimed.done)

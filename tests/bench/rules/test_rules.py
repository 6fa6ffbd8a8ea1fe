"""What every rule of the field must hold, and the one function that makes them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policies
from bench import rules
from bench.rules.guess import Guess
from bench.rules.least import Least
from policies import Candidate, CostGroup, Load

from .fleets import asked, chain, fleet, picks, send


class Seconds:
    """A truth that is written down."""

    def __init__(self, *seconds):
        self._seconds = seconds

    def seconds(self, index, request):
        return self._seconds[index % len(self._seconds)]

    def answer_seconds(self, index, request):
        return -self.seconds(index, request)


def make(name, seed=0):
    return rules.make(name, seed, Seconds(2.0, 1.0, 1.0))


def test_one_function_makes_the_fields_rules_and_the_products_policies():
    assert not set(rules.NAMES) & set(policies.NAMES)
    for name in (*rules.NAMES, *policies.NAMES):
        assert make(name).name == name
    with pytest.raises(ValueError, match="least_time.*sglang_chars.*oracle"):
        rules.make("fastest")


def test_every_rule_says_where_it_is_stated():
    assert set(rules.SOURCES) == set(rules.NAMES) and all(rules.SOURCES.values())


def test_the_oracle_of_answers_takes_the_least_seconds_of_these():
    assert {make("oracle_answer", seed).choose(asked(), fleet(3)).index for seed in range(20)} == {0}
    with pytest.raises(ValueError, match="loadgen simulate"):
        rules.make("oracle_answer")


def test_the_oracle_takes_the_least_true_seconds_and_needs_the_truth():
    assert {make("oracle", seed).choose(asked(), fleet(3)).index for seed in range(20)} == {1, 2}
    with pytest.raises(ValueError, match="loadgen simulate"):
        rules.make("oracle")


@pytest.mark.parametrize("name", rules.NAMES)
@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 62), st.floats(0, 1)),
        min_size=1,
        max_size=40,
    ),
    st.integers(0, 9),
    st.integers(0, 1010),
)
def test_any_fleet_gets_one_of_its_candidates_and_the_same_one_again(name, replicas, seed, tokens):
    group = CostGroup()
    candidates = []
    for i, (prefilling, decoding, queued, blocks, usage) in enumerate(replicas):
        load = Load(
            prefilling + decoding, prefilling, queued * bool(prefilling), decoding, queued * bool(decoding), 0, usage
        )
        overlap = min(16 * blocks, max(0, tokens - 1) // 16 * 16)
        candidates.append(Candidate(f"r{i}", overlap, load, group.add(f"r{i}"), (("cpu", 16),) if i % 3 else ()))
    request = asked(chain(tokens // 16), max(1, tokens), session=None if seed % 2 else "s")
    choice = make(name, seed).choose(request, candidates)
    assert 0 <= choice.index < len(candidates) and choice.reason
    assert choice == make(name, seed).choose(request, candidates)


OF_REPLICAS = {"_ever", "_of", "_ring", "_now", "_truth"}  # what rules keep of replicas and of the time


def left(value) -> bool:
    """Whether there is anything in it. A guess of the caches keeps prompts, and dice nothing."""
    if isinstance(value, dict):
        return any(map(left, value.values()))
    if isinstance(value, float):
        return abs(value) > 1e-9
    return not isinstance(value, Guess | Least) and not callable(value) and bool(value)


@pytest.mark.parametrize("name", rules.NAMES)
def test_what_a_rule_keeps_of_requests_goes_with_them(name):
    """Requests are sent, answered and end in any order, a replica leaves with requests on it and comes back; when all
    have ended and the longest window has passed, nothing is left of them but the prompts."""
    rng, policy, candidates, live, now = random.Random(5), make(name), fleet(4), [], 0.0
    hooks = {hook: getattr(policy, hook, None) for hook in ("first", "ended", "gone")}
    prompts = [chain(rng.randrange(1, 12)) for _ in range(10)]
    for turn in range(400):
        now += rng.random()
        among = [c for c in candidates if c.replica != "r3" or turn % 100 < 70]
        request = asked(chain(14, after=rng.choice(prompts)), 14 * 16 + turn % 16, now=now, session=str(turn % 7))
        index = policy.choose(request, among).index
        send(policy, request, among, index)
        live.append((among[index].replica, request))
        if turn % 100 == 70 and hooks["gone"]:
            hooks["gone"]("r3")
        while len(live) > 20 or (live and rng.random() < 0.4):
            replica, ending = live.pop(rng.randrange(len(live)))
            for hook in ("first", "ended"):
                if hooks[hook]:
                    hooks[hook](replica, ending)
    for replica, ending in live:
        if hooks["ended"]:
            hooks["ended"](replica, ending)
    policy.choose(asked(chain(3), now=now + 1000), candidates)
    assert {kept for kept, value in vars(policy).items() if left(value)} <= OF_REPLICAS


BY_SESSION = {"session_hash", "sticky_least_loaded", "kubeai"}


@pytest.mark.parametrize(
    "name", sorted(set(rules.NAMES) - BY_SESSION - {"oracle", "oracle_answer", "llmd_weights", "lmetric"})
)
def test_a_prompt_seen_before_returns_to_its_replica(name):
    """By events or by the rule's own memory, on a fleet that is otherwise idle."""
    prompt = chain(40)
    for home in range(4):
        candidates = fleet(4)
        policy = make(name)
        send(policy, asked(prompt), candidates, home)
        again = fleet(4, overlap=[39 * 16 * (index == home) for index in range(4)])
        assert policy.choose(asked(prompt), again).index == home


def test_rules_that_break_ties_at_random_do():
    """Nothing held, nobody busy: a rule that always took the first would fill one replica before the next."""
    request = asked(chain(20))
    for name in (
        "vllm_kv_aware",
        "lmetric",
        "dynamo",
        "llmd_weights",
        "llmd_sticky",
        "aibrix",
        "ray_prefix",
        "preble_e2",
        "mooncake",
    ):
        assert picks(name, request, fleet(3)) == {0, 1, 2}, name
    assert picks("sglang_chars", request, fleet(3)) == picks("smg_spill", request, fleet(3)) == {0}, "as stated there"

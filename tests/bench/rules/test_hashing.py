"""The rules that hash a session or a prefix to a replica."""

from collections import Counter

from bench.rules import make

from .fleets import asked, chain, fleet


def homes(name, candidates, sessions=400):
    policy = make(name)
    return {
        s: candidates[policy.choose(asked(chain(2), session=str(s)), candidates).index].replica for s in range(sessions)
    }


def test_a_session_has_one_home_and_homes_are_even():
    for name in ("session_hash", "kubeai"):
        first = homes(name, fleet(4))
        assert first == homes(name, fleet(4))
        counts = Counter(first.values())
        assert len(counts) == 4 and min(counts.values()) > 60


def test_a_replica_that_leaves_moves_only_its_own_sessions():
    for name in ("session_hash", "kubeai"):
        before, after = homes(name, fleet(4)), homes(name, fleet(4)[:3])
        assert all(after[s] == home for s, home in before.items() if home != "r3")
        assert len({after[s] for s, home in before.items() if home == "r3"}) == 3, "and those go everywhere"


def test_the_session_hash_is_blind_to_load_and_prompts():
    home = make("session_hash").choose(asked(chain(5), session="s"), fleet(3)).index
    busy = fleet(
        3, requests=[1000 * (index == home) for index in range(3)], overlap=[80 * (index != home) for index in range(3)]
    )
    assert make("session_hash").choose(asked(chain(9), session="s"), busy).index == home


def test_without_a_session_the_first_block_decides():
    for name in ("session_hash", "kubeai"):
        prompt = chain(5)
        assert len({make(name).choose(asked(chain(9, after=prompt[:1])), fleet(8)).index for _ in range(20)}) == 1
        assert len({make(name).choose(asked(chain(9)), fleet(8)).index for _ in range(40)}) > 3
    assert len({make("session_hash", seed).choose(asked(tokens=9), fleet(8)).index for seed in range(40)}) > 3, (
        "too short for that: any"
    )


def test_kubeai_bounds_the_load_at_a_quarter_above_the_mean():
    """4 replicas, 127 requests: 1.25 x 128 / 4 = 40, the new one included."""
    request = asked(chain(3), session="s")
    home = make("kubeai").choose(request, fleet(4)).index
    others = {39: 88, 40: 87}
    for there, rest in others.items():
        requests = [rest // 3 + (index < rest % 3) for index in range(3)]
        requests.insert(home, there)
        index = make("kubeai").choose(request, fleet(4, requests=requests)).index
        assert (index == home) is (there == 39)
        assert requests[index] + 1 <= 40


def test_kubeai_overflows_to_the_same_neighbour_and_stays_home_when_nobody_fits():
    request = asked(chain(3), session="s")
    home = make("kubeai").choose(request, fleet(5)).index
    full = fleet(5, requests=[20 * (index == home) for index in range(5)])
    neighbour = make("kubeai").choose(request, full).index
    assert neighbour != home and {make("kubeai", seed).choose(request, full).index for seed in range(9)} == {neighbour}
    assert make("kubeai").choose(request, fleet(5, requests=[index == home for index in range(5)])).index == home, (
        "1.25 x 2 / 5 fits nobody"
    )

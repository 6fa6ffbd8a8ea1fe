"""What every policy must hold, and each one's own rule."""
import pytest

from policies import NAMES, Candidate, CostGroup, Demand, Load, make


def fleet(n, **loads):
    group = CostGroup()
    return [Candidate(f"r{i}", 0, Load(**{k: v[i] for k, v in loads.items()}), group.add(f"r{i}")) for i in range(n)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 2, 8, 70])
def test_chooses_a_candidate(name, count):
    policy = make(name, 3)
    candidates = fleet(count)
    for root in range(20):
        assert 0 <= policy.choose(Demand(100, root=root), candidates, explain=root % 2 == 0).index < count


def test_unknown_name_says_what_there_is():
    with pytest.raises(ValueError, match="least_time"):
        make("fastest")

"""How many tokens an answer is expected to have."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Demand, outputs
from policies.outputs import Outputs


def learned(*lengths, **demand):
    made = Outputs()
    for length in lengths:
        made.learn(Demand(100, **demand), length)
    return made


def test_it_starts_somewhere_and_learns_the_mean():
    assert Outputs().expected(Demand(100)).mean == outputs.FIRST
    assert learned(*[80] * 200).expected(Demand(100)).mean == pytest.approx(80, rel=0.05)


def test_what_is_left_of_an_answer_tells_how_much_lengths_differ():
    """Half of it where all are equal; all of it where they are exponential, for these have no memory."""
    chance = Random(1)
    equal = learned(*[80] * 400).expected(Demand(100))
    wild = learned(*[1 + int(chance.expovariate(1 / 80)) for _ in range(4000)]).expected(Demand(100))
    assert equal.residual == pytest.approx(40, abs=8)
    assert wild.residual == pytest.approx(wild.mean, rel=0.25)


def test_the_basis_says_by_how_much_lengths_differ():
    chance = Random(2)
    equal, wild = learned(*[80] * 400), learned(*[max(1, round(chance.gauss(400, 50))) for _ in range(4000)])
    assert equal.basis(Demand(100)).spread < 30  # what four assumed answers of other lengths leave
    assert wild.basis(Demand(100)).spread == pytest.approx(50, abs=20)
    assert learned().basis(Demand(100)).spread == outputs.FIRST, "of nothing learned as much as the length itself"


def test_a_narrower_kind_is_believed_the_more_it_has_been_heard_of():
    made = learned(*[100] * 100, root=1)
    means = []
    for _ in range(12):
        means.append(made.expected(Demand(100, root=2)).mean)
        made.learn(Demand(100, root=2), 900)
    assert means == sorted(means) and means[1] < 400 and means[-1] > 500
    assert made.expected(Demand(100, root=1)).mean < made.expected(Demand(100, root=3)).mean < 500
    made.learn(Demand(100, root=2, session="short"), 10)
    assert made.expected(Demand(100, root=2, session="short")).mean < made.expected(Demand(100, root=2)).mean


def test_models_are_told_apart():
    assert learned(*[1000] * 99, space=1).expected(Demand(100, space=2)).mean == outputs.FIRST


@given(
    st.lists(st.integers(0, 100_000), max_size=30),
    st.none() | st.integers(0, 5000),
    st.integers(0, 2),
    st.none() | st.just("s"),
)
def test_the_bound_holds_and_nothing_is_negative(lengths, most, root, session):
    made = learned(*lengths, root=root, session=session)
    mean, residual = made.expected(Demand(100, root=root, session=session, max_tokens=most))
    assert mean > 0 and residual >= 1
    if most is not None:
        assert mean <= max(1, most) and residual <= max(1, most), "an engine makes one token of a prompt alone, too"


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(outputs, "_KINDS", 10)
    made = Outputs()
    for number in range(100):
        made.learn(Demand(100, root=number + 1, session=f"{number}"), 50)
    assert [*map(len, (made._spaces, made._roots, made._sessions))] == [1, 10, 10]
    assert made.expected(Demand(100, root=100)).mean < made.expected(Demand(100, root=1)).mean, "the oldest are gone"

"""Weighing many candidates at once is weighing each: the same sums, the same choices, whatever happened in between."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import NAMES, UNTIMED, Candidate, CostGroup, Demand, Ledger, Roster, make
from policies.ledger import FAR, Changes

REPLICAS = [f"r{i}" for i in range(7)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "first byte", "release", "others", "scrape", "ttft", "itl"]),
        st.integers(0, 6),
        st.integers(0, 5000),
        st.floats(0.001, 0.5),
    ),
    max_size=40,
)


class House:
    """Replicas with a history, and candidates for the next prompt."""

    def __init__(self):
        self.ledger, self.group, self.now = Ledger(), CostGroup(), 100.0
        self.candidates = [Candidate(name, 0, self.ledger.add(name), self.group.add(name)) for name in REPLICAS]
        self.roster = Roster(self.candidates, self.ledger, self.group)
        self.sent = []

    def step(self, what, index, tokens, seconds):
        name, ledger, costs = REPLICAS[index], self.ledger, self.candidates[index].costs
        self.now += seconds
        if what == "reserve":
            due = self.now + seconds if tokens % 3 else FAR
            self.sent.append(ledger.reserve(name, tokens // 2, tokens, now=self.now, output=tokens // 3, due=due))
        elif what == "others":
            ledger.others(name, (3, tokens % 3, tokens % 3 * 400, 3 - tokens % 3, tokens, tokens // 2), self.now)
        elif what == "scrape":
            ledger.scraped(name, 0, min(1.0, 2 * seconds))
        elif what == "itl":
            costs.observe_itl(seconds / 20, 3, tokens)
        elif self.sent:
            one = self.sent[tokens % len(self.sent)]
            if what == "first byte":
                ledger.first_byte(one, self.now)
            elif what == "release":
                ledger.release(one)
            else:
                costs.observe_ttft(seconds, one.uncached, one.tokens - one.uncached, one.before, one.at)

    def ask(self, tokens, overlaps):
        """A demand, with candidates that have these overlaps, one by one and together."""
        self.roster.overlaps = np.array(overlaps, float)
        plain = [
            Candidate(one.replica, overlap, one.load, one.costs)
            for one, overlap in zip(self.candidates, overlaps, strict=True)
        ]
        return Demand(tokens, 16, now=self.now, hashes=range(1, tokens // 16 + 1)), plain


@settings(max_examples=100)
@given(st.integers(0, 1 << 30))
def test_the_choices_are_equal(seed):
    """In a run where each choice counts for the next; ties are broken alike."""
    rng, house = random.Random(seed), House()
    one, together = make("least_time"), make("least_time")
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            house.step(
                rng.choice(["first byte", "release", "scrape", "ttft", "itl"]),
                rng.randrange(7),
                rng.randrange(5000),
                rng.random() / 10,
            )
        tokens = rng.randrange(1, rng.choice((8000, 60_000)))
        held = [rng.choice([0, 0, rng.randrange(tokens)]) for _ in REPLICAS]
        demand, plain = house.ask(tokens, held)
        demand.draw = rng.random()
        chosen, alike = together.choose(demand, house.roster), one.choose(demand, plain)
        assert (chosen.index, chosen.among) == (alike.index, alike.among) and chosen.terms is None
        assert chosen.lesson == pytest.approx(alike.lesson)
        together.placed(demand, house.roster, chosen)
        one.placed(demand, plain, alike)
        house.sent.append(
            house.ledger.reserve(
                REPLICAS[chosen.index], tokens - held[chosen.index], tokens, now=demand.now, due=demand.now + 0.1
            )
        )


def test_explained_each_has_its_terms():
    house = House()
    demand, plain = house.ask(4000, [16 * i for i in range(7)])
    assert make("least_time").choose(demand, house.roster, explain=True) == make("least_time").choose(
        demand, plain, explain=True
    )


@pytest.mark.parametrize("name", NAMES)
def test_to_a_policy_that_knows_nothing_of_it_a_roster_is_a_list(name):
    house = House()
    for index in range(7):
        house.step("reserve", index, 1000 * index % 3000, 0.01)
    demand, plain = house.ask(4000, [160 * (i % 3) for i in range(7)])
    demand.now = UNTIMED
    assert make(name).choose(demand, house.roster).index == make(name).choose(demand, plain).index
    overlaps = [one.overlap for one in house.roster]
    assert overlaps == [one.overlap for one in plain] and {*map(type, overlaps)} == {int} and len(house.roster) == 7


def test_blocks_in_lower_tiers_are_counted():
    house = House()
    demand, plain = house.ask(4000, [0] * 7)
    house.candidates[3].lower = plain[3].lower = (("cpu", 3200),)
    house.roster.tiered = True
    assert make("least_time").choose(demand, house.roster).index == make("least_time").choose(demand, plain).index == 3


def test_changes_are_told_once_to_each_who_asks_and_too_many_not_at_all():
    changes = Changes()
    for number in range(10):
        changes.tell(number)
    assert sorted(changes.since(7)) == [7, 8, 9] and list(changes.since(10)) == []
    for number in range(5000):
        changes.tell(number)
    assert changes.since(10) is None

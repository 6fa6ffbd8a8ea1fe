"""What is predicted, against a reference that has each block of each replica by itself."""

from array import array

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cachemap.table.routed import Routed

SECONDS, SLOTS = 5.0, 3


class Reference:
    """A reference that keeps for each block until when it is predicted, and the number of the prompt that says so."""

    def __init__(self):
        self.until: dict[tuple[int, int], tuple[float, int]] = {}
        self.number = 0

    def add(self, slot, hashes, now):
        self.number += 1
        self.until |= {(slot, block): (now + SECONDS, self.number) for block in hashes}
        return self.number

    def reach(self, hashes, now, confirmed):
        found = {}
        for slot, known in enumerate(confirmed):
            end = known
            while end < len(hashes) and self.until.get((slot, hashes[end]), (now, 0))[0] > now:
                end += 1
            if end > known:
                found[slot] = end
        return found

    def take_back(self, slot, hashes, held, number):
        for block in hashes[held:]:
            if self.until.get((slot, block), (0.0, 0))[1] <= number:
                self.until.pop((slot, block), None)

    def discard(self, slot, hashes):
        for block in hashes:
            self.until.pop((slot, block), None)

    def clear(self, slot):
        self.until = {key: until for key, until in self.until.items() if key[0] != slot}


def hashed(path: list[int]) -> list[int]:
    """Return the chained hashes of blocks of one token each."""
    return [hash(tuple(path[: i + 1])) % (1 << 64) for i in range(len(path))]


CHAINS = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(hashed)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "refused", "refused later", "drop tail", "drop", "clear"]),
        st.integers(0, SLOTS - 1), CHAINS, st.integers(0, 8), st.sampled_from([0.0, 0.5, 1.0, 6.0]),
    ),
    max_size=40,
)  # fmt: skip


AB, REFUSED = hashed([0, 1]), ("refused later", 0, hashed([0]), 0, 0.0)


@settings(max_examples=400)
@example([("add", 0, AB[:1], 0, 0.0), ("add", 0, AB, 0, 0.0), REFUSED], AB, False)
@given(STEPS, CHAINS, st.booleans())
def test_predicts_what_single_blocks_would(steps, asked, packed):
    routed, reference, now = Routed(SECONDS), Reference(), 100.0
    waiting = []  # added, and still to be refused
    for what, slot, chain, place, pause in steps:
        now += pause
        given = array("Q", chain) if packed else chain
        held = reference.reach(chain, now, [0] * SLOTS).get(slot, 0)
        refused = [waiting.pop(place % len(waiting))] if what == "refused later" and waiting else []
        for one in (routed, reference):
            if what == "add":
                number = one.add(slot, given, now)
                waiting.append((slot, given, held, number)) if one is routed else None
            elif what == "refused":
                one.take_back(slot, given, held, one.add(slot, given, now))
            elif what == "refused later":
                for slot_, chain_, held_, number_ in refused:
                    one.take_back(slot_, chain_, held_, number_)
            elif what == "clear":
                one.clear(slot)
            else:
                one.discard(slot, given[place:] if what == "drop tail" else given[place : place + 1])
        for question in (chain, asked):
            for known in (0, place):
                confirmed = [min(known + slot, len(question)) for slot in range(SLOTS)]
                assert routed.reach(question, now, confirmed) == reference.reach(question, now, confirmed)


def test_memory_is_bounded_by_prompts_and_by_what_engines_drop():
    routed, most = Routed(SECONDS), 0
    routed.most = 1000
    for number in range(500):
        routed.add(0, hashed([number, *range(50)]), 1.0)
        most = max(most, len(routed))
    assert 1000 < most < 2200
    chain = hashed([*range(50)])
    routed.add(0, chain, 1.0)
    for _ in range(100):  # of other prompts, nobody asks us any more
        routed.discard(0, chain[:40])
    assert len(routed) < 1000

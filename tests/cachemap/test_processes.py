"""One map in several processes knows what one in one process knows, and reading it while it is written does no harm."""

import mmap
import os
import random
import subprocess
import sys
from array import array
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap import CacheMap
from cachemap.memory import segment
from cachemap.processes import FollowingMap, LeadingMap
from cachemap.ring import BYTES, MOST, SIZE, Reader, Ring

from .test_map import PROMPTS, SLOTS, keys

MIB = 1 << 20


class House:
    """A leader and its followers in one process, speaking as processes do."""

    def __init__(self, followers: int = 2, budget: int = 64 * MIB):
        descriptor = segment(BYTES * (followers + 1))
        memory = memoryview(mmap.mmap(descriptor, 0))
        os.close(descriptor)
        rings = [memory[BYTES * i : BYTES * (i + 1)] for i in range(followers + 1)]
        self.leader = LeadingMap(budget, Ring(rings[-1]), lambda: None, self._cleared)
        self.followers = [
            FollowingMap(budget, Ring(rings[i]), [Reader(ring) for j, ring in enumerate(rings) if j != i], self.leader.clear)
            for i in range(followers)
        ]  # fmt: skip
        self._seen: dict[str, list] = {}
        self._slots: dict[int, str] = {}

    def _cleared(self, slot: int) -> None:
        for follower in self.followers:
            follower.cleared(slot)

    def attach(self, name: str, capacity: int | None, observed: bool) -> int:
        slot = self.leader.attach(name, capacity, observed)
        self._slots[slot] = name
        self.tell()
        return slot

    def tell(self) -> None:
        for tier, arrays in self.leader.tables().items():
            if self._seen.get(tier) != arrays:
                self._seen[tier] = arrays
                for follower in self.followers:
                    follower.look_at(tier, [(dtype, os.dup(descriptor)) for dtype, descriptor, _ in arrays])
        for slot, name in self._slots.items():
            for follower in self.followers:
                follower.place(slot, name, 8, self.leader.observes(slot))
        for follower in self.followers:
            follower.catch_up()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "lower", "remove", "clear", "expect", "expect", "back", "learn", "observe"]),
        st.sampled_from(SLOTS), st.sampled_from(PROMPTS), st.integers(0, 17),
    ), max_size=40,
)  # fmt: skip


@settings(max_examples=60)
@given(STEPS, st.randoms(use_true_random=False))
def test_followers_know_what_a_map_alone_would(steps, rng):
    """Whoever of them was asked to route a prompt."""
    house, alone = House(), CacheMap(64 * MIB)
    for slot in SLOTS:
        for one in (house, alone):
            one.attach(str(slot), 8, observed=slot != 2)
    for what, slot, prompt, end in steps:
        start, now = min(end, 5), monotonic()
        asked = rng.choice(house.followers)
        if what == "clear":
            alone.clear(slot)
            asked.clear(slot)
        elif what == "back":
            for one in (alone, asked):
                one.take_back(slot, prompt, start, now)
        elif what in ("expect", "learn"):
            blocks = array("Q", prompt)
            for one in (alone, asked):
                one.match(blocks, now)
                if what == "expect":
                    one.expect(slot, blocks, now)
                else:
                    one.learn(slot, blocks, end, 5)
        elif what == "observe":
            for one in (alone, house.leader):
                one.observed(slot, bool(end % 2))
        else:
            for one in (alone, house.leader):
                if what == "remove":
                    one.remove(slot, keys(slot, prompt[start:]))
                else:
                    one.store(slot, prompt[: end + 1], keys(slot, prompt[: end + 1]), "cpu" if what == "lower" else "gpu")
        house.tell()
        for prompt in PROMPTS:
            wanted = alone.match(prompt, now)
            for follower in house.followers:
                found, here = follower.match(prompt, now), slice(len(SLOTS))  # a follower has room for more
                assert (found.held[here], found.confirmed[here], found.lower) == (wanted.held, wanted.confirmed, wanted.lower)
                assert not any(found.held[len(SLOTS) :])


@pytest.mark.parametrize("budget", [64 * MIB, MIB])
def test_it_grows_sheds_and_widens_under_its_readers(budget):
    house, rng = House(1, budget), random.Random(7)
    for number in range(70):
        house.attach(str(number), 1000, observed=True)
    leader, follower = house.leader, house.followers[0]
    chains = [[rng.randrange(1, 1 << 63) for _ in range(64)] for _ in range(400)]
    for number, chain in enumerate(chains):
        leader.store(number % 70, chain, keys(number % 70, chain))
        if number % 50 == 49:
            house.tell()
            assert [follower.match(one, 0.0).confirmed[:70] for one in chains] == [leader.match(one, 0.0).confirmed for one in chains]
    assert (leader.stats()["evicted"] > 0) == (budget == MIB)


def test_what_followers_ask_for_is_not_what_goes():
    house, rng = House(1, MIB), random.Random(7)
    slot = house.attach("a", None, observed=True)
    kept, *others = [[rng.randrange(1, 1 << 63) for _ in range(64)] for _ in range(1000)]
    for chain in (kept, *others):
        house.leader.store(slot, chain, keys(slot, chain))
        house.tell()
        assert house.followers[0].match(kept, 0.0).held[slot] == 64
    assert house.followers[0].match(others[0], 0.0).held[slot] == 0


READER = """
import mmap, sys
from time import monotonic
from cachemap.memory import segment
from cachemap.processes import FollowingMap
from cachemap.ring import BYTES, Ring

types, descriptors, stays, never = (part.split(",") for part in sys.argv[1:])
seen = FollowingMap(1 << 26, Ring(memoryview(mmap.mmap(segment(BYTES), 0))), [], print)
seen.look_at("gpu", list(zip(types, map(int, descriptors))))
for slot in range(3):
    seen.place(slot, str(slot), None, True)
stays, never, wrong, looks = [*map(int, stays)], [*map(int, never)], 0, 0
print("reads", flush=True)
end = monotonic() + 1
while monotonic() < end:
    wrong += seen.match(stays, 0.0).confirmed[0] != len(stays)
    wrong += any(seen.match(never, 0.0).confirmed)
    wrong += seen.match(stays[:40] + never, 0.0).confirmed[0] != 40
    looks += 1
print(wrong, looks, flush=True)
"""


def test_a_process_that_reads_while_another_writes():
    """What stays is always found, what never was never, and nothing of it fails."""
    house, rng = House(1), random.Random(3)
    for number in range(3):
        house.attach(str(number), 20_000, observed=True)
    stays, never, *others = ([rng.randrange(1, 1 << 63) for _ in range(200)] for _ in range(102))
    house.leader.store(0, stays, keys(0, stays))
    for slot in range(3):  # now it has the size it will keep
        house.leader.store(slot, others[slot], keys(slot, others[slot]))
    before = house.leader.tables()
    arrays = before["gpu"]
    descriptors = [descriptor for _, descriptor, _ in arrays]
    texts = [",".join(map(str, part)) for part in ([dtype for dtype, *_ in arrays], descriptors, stays, never)]
    with subprocess.Popen([sys.executable, "-c", READER, *texts], pass_fds=descriptors, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "reads\n"
        while reader.poll() is None and not _readable(reader):
            chain, slot = rng.choice(others), rng.randrange(3)
            house.leader.store(slot, chain, keys(slot, chain))
            chain, slot = rng.choice(others), rng.randrange(3)
            house.leader.remove(slot, keys(slot, chain))
        wrong, looks = map(int, reader.stdout.readline().split())
    assert house.leader.tables() == before, "it was to keep its size"
    assert wrong == 0 and looks > 100


def _readable(process: subprocess.Popen) -> bool:
    import select

    return bool(select.select([process.stdout], [], [], 0)[0])


@pytest.fixture
def memory():
    descriptor = segment(BYTES)
    yield memoryview(mmap.mmap(descriptor, 0))
    os.close(descriptor)


def test_a_ring_tells_all_in_order_over_its_end(memory):
    ring, reader = Ring(memory), Reader(memory)
    for number in range(200):  # once round and a half
        words = array("Q", [number + (1 << 63)] * (number * 10))
        ring.write(number % 3, number, number / 8, words)
        assert [*reader.read()] == [(number % 3, number, number / 8, words)]
        assert [*reader.read()] == []
    assert SIZE < sum(number * 10 for number in range(200))


def test_who_is_too_far_behind_goes_on_with_what_is_new(memory):
    ring, slow = Ring(memory), Reader(memory)
    for number in range(SIZE // 1000 + 1):
        ring.write(0, number, 0.0, array("Q", [number] * 1000))
    assert [*slow.read()] == []
    ring.write(1, 5, 0.0, array("Q", [7]))
    assert [*slow.read()] == [(1, 5, 0.0, array("Q", [7]))]


def test_a_writer_goes_on_where_one_that_died_stopped(memory):
    reader, ring = Reader(memory), Ring(memory)
    ring.write(0, 1, 0.0, array("Q", [1]))
    Ring(memory).write(0, 2, 0.0, array("Q", range(2 * MOST)))
    first, second = reader.read()
    assert (first[1], second[1], len(second[3])) == (1, 2, MOST)

"""The simulation's map answers as the gateway's does, whatever happened before."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap import CacheMap
from loadgen.simulate.holders import Holders

REPLICAS = 3
# (text, where it turns into another, length)
chains = st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 8))
events = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 2), chains, st.integers(0, 7)),
    st.tuples(st.just("remove"), st.integers(0, 2), chains, st.integers(0, 7)),
    st.tuples(st.sampled_from(["expect", "refuse"]), st.integers(0, 2), chains, st.floats(0, 3)),
    st.tuples(st.sampled_from(["cpu", "disk"]), st.integers(0, 2), chains, st.integers(0, 7)),
    st.tuples(st.just("clear"), st.integers(0, 2), chains, st.just(0)),
)


def blocks(chain) -> list[int]:
    text, turn, length = chain
    return [1000 * text + index + (100 * turn if index >= turn else 0) + 1 for index in range(length)]


@settings(max_examples=200)
@given(st.lists(events, max_size=40), st.lists(chains, min_size=1, max_size=4), st.booleans())
def test_matches_are_those_of_the_cache_map(script, asked, observed):
    real, ours, now = CacheMap(1 << 24), Holders([64] * REPLICAS, observed), 0.0
    slots = [real.attach(f"r{index}", 64, observed) for index in range(REPLICAS)]

    def same(hashes):
        match = real.match(hashes, now)
        found = ours.match(hashes, now)
        assert ([match.held[slot] for slot in slots], [match.confirmed[slot] for slot in slots]) == (
            found.held,
            found.confirmed,
        )
        assert {slots.index(slot): runs for slot, runs in match.lower.items()} == found.lower
        in_memory = real.leading("cpu", hashes)
        assert [in_memory[slot] for slot in slots] == ours.leading("cpu", hashes)
        if hashes:
            assert [real.last_below(slot, hashes, 0) for slot in slots] == [
                ours.last_below(index, hashes, 0) for index in range(REPLICAS)
            ]
        return found.held

    for kind, replica, chain, detail in script:
        hashes = blocks(chain)
        if kind in ("expect", "refuse"):
            now += detail
            held = same(hashes)[replica]
            number = ours.expect(replica, hashes, now)
            same_number = real.expect(slots[replica], hashes, now)
            if kind == "refuse":
                ours.take_back(replica, hashes, held, number)
                real.take_back(slots[replica], hashes, held, same_number)
        elif kind == "clear":
            ours.clear(replica)
            real.clear(slots[replica])
        elif kind in ("cpu", "disk"):
            if observed:
                real.store(slots[replica], hashes[detail:], hashes[detail:], kind)
                ours.store(replica, hashes[detail:], kind)
        elif observed and kind == "store":
            start = min(detail, len(hashes) - 1)
            real.store(slots[replica], hashes[start:], hashes[start:], heads=[(0, hashes[start - 1] if start else 0)])
            ours.store(replica, hashes[start:])
        elif observed:
            real.remove(slots[replica], hashes[detail:])
            ours.remove(replica, hashes[detail:])
    for chain in asked:
        same(blocks(chain))

"""CacheMap against a reference, and what each of its rules promises."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap import CacheMap, chain_seed, hash_blocks

MIB = 1 << 20


def chain(*branches: int, length: int = 6) -> list[int]:
    """Hashes of a prompt whose sections are named: equal names from the start, equal prefix."""
    tokens = b"".join(name.to_bytes(4, "little") * length * 4 for name in branches)
    return hash_blocks(tokens, 4, chain_seed("m", 4))


def keys(slot: int, hashes: list[int]) -> list[int]:
    """An engine's own keys: a function of content, different on each replica."""
    return [h * 3 + slot & (1 << 64) - 1 for h in hashes]


class ReferenceMap:
    """The map without caring for speed: confirmed blocks of each replica by engine key, and what its prompts match."""

    def __init__(self):
        self.keys: dict[int, dict] = {}

    def attach(self, slot):
        self.keys[slot] = {}

    def store(self, slot, hashes, engine_keys):
        self.keys[slot].update(zip(engine_keys, hashes, strict=True))

    def remove(self, slot, engine_keys):
        for key in engine_keys:
            self.keys[slot].pop(key, None)

    def clear(self, slot):
        self.keys[slot] = {}

    def confirmed(self, slot, hashes):
        held = set(self.keys[slot].values())
        length = 0
        while length < len(hashes) and hashes[length] in held:
            length += 1
        return length


PROMPTS = [chain(*path) for path in [(1, 2, 3), (1, 2, 4), (1, 5), (6, 7, 8), (6, 7), (9,)]]
SLOTS = range(3)

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "clear"]),
        st.sampled_from(SLOTS),
        st.sampled_from(PROMPTS),
        st.integers(0, 17),
        st.integers(1, 18),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.randoms(use_true_random=False), st.floats(0, 0.4), st.floats(0, 0.4))
def test_equals_a_reference_under_lost_repeated_and_reordered_events(events, rng, lost, repeated):
    table, reference = CacheMap(MIB), ReferenceMap()
    for slot in SLOTS:
        assert table.attach(f"r{slot}", None, True) == slot
        reference.attach(slot)
    stream = [e for e in events if rng.random() >= lost]
    stream += [e for e in stream if rng.random() < repeated]
    rng.shuffle(stream)
    for kind, slot, prompt, start, count in stream:
        part = prompt[start : start + count]
        if not part:
            continue
        if kind == "store":
            parent = prompt[start - 1] if start else 0
            table.store(slot, part, keys(slot, part), "gpu", [(0, parent)])
            reference.store(slot, part, keys(slot, part))
        elif kind == "remove":
            table.remove(slot, keys(slot, part[::-1]), "gpu")
            reference.remove(slot, keys(slot, part))
        else:
            table.clear(slot)
            reference.clear(slot)
    for prompt in PROMPTS:
        match = table.match(prompt, 0.0)
        assert match.confirmed == [reference.confirmed(slot, prompt) for slot in SLOTS]
        assert match.held == match.confirmed
    for slot in SLOTS:
        assert table.stats()["slots"][slot] == len(reference.keys[slot])
    union = set().union(*(reference.keys[slot].values() for slot in SLOTS))
    assert table.stats()["blocks"] == len(union)

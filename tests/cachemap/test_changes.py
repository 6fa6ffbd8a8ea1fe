"""Many small changes as few large ones."""

import random

import numpy as np
import pytest

from cachemap import CacheMap
from cachemap.changes import CacheGroup, Clear, Observe, Remove, Store, merged

TOP = 1 << 35  # set in every tag


def u64(numbers):
    return np.array(numbers, np.uint64)


def some_changes(rng, count=60, names=40):
    """Of blocks that have one or two tags, some on a slower tier or in another group, some stored or dropped twice."""
    changes = []
    for _ in range(count):
        tier = rng.choice(("cpu", "disk", CacheGroup(0, 2).tier)) if rng.random() < 0.2 else "gpu"
        some = rng.sample(range(1, names), rng.randint(1, 6))
        tags = u64([TOP | one + names * rng.randrange(2) for one in some])
        kind = rng.random()
        if kind < 0.6:
            changes.append(
                Store(
                    tier,
                    u64([one * 7919 for one in some]),
                    tags,
                    [(0, 0)] if rng.random() < 0.5 else [(0, rng.randrange(names) * 7919)],
                )
            )
        elif kind < 0.97:
            changes.append(Remove(tier, tags))
        else:
            changes.append(rng.choice([Clear(), Clear(below=False), Observe(True)]))
    return changes


def told(changes):
    """Tags, hashes and copies of a map that was told these."""
    cache = CacheMap(1 << 22)
    slot = cache.attach("r", None, True)
    for change in changes:
        cache.change(slot, change)
    contents = cache.contents(slot)
    held = {
        (tier, tag): h
        for tier, (hashes, tags) in contents.held.items()
        for tag, h in zip(tags.tolist(), hashes.tolist(), strict=True)
    }
    return held, {key: count for key, count in contents.copies.items() if count}


@pytest.mark.parametrize("seed", range(30))
def test_a_map_that_is_told_them_merged_holds_the_same(seed):
    changes = some_changes(random.Random(seed))
    held, copies = told(changes)
    assert told(merged(changes)) == (held, copies) and (held or seed)
    assert told(merged(changes, most=5)) == (held, copies)


def test_what_does_not_meet_becomes_one_change_of_each_kind():
    changes = []
    for at in range(0, 80, 8):
        changes += [
            Store("gpu", u64(range(1000 + at, 1008 + at)), u64(range(TOP + at, TOP + at + 8)), [(0, at), (4, 7)]),
            Remove("gpu", u64([TOP + 500 + at])),
        ]
    dropped, stored = merged(changes)
    assert dropped.tags.tolist() == [TOP + 500 + at for at in range(0, 80, 8)]
    assert stored.hashes.tolist() == list(range(1000, 1080)) and stored.heads[:4] == [(0, 0), (4, 7), (8, 8), (12, 7)]

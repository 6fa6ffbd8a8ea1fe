"""Tests of `merged`, which makes few large changes of many small ones."""

import random

import numpy as np
import pytest

from cachemap import CacheMap
from cachemap.changes import CacheGroup, Clear, Observe, Remove, Store, merged

from .cluster.gateways import contents

TOP = 1 << 35  # set in every tag


def u64(numbers):
    return np.array(numbers, np.uint64)


def some_changes(rng, count=60, names=40):
    """Return random changes: blocks have one or two tags, some are in a slower tier or group, some come or go twice."""
    changes = []
    for _ in range(count):
        tier = rng.choice(("cpu", "disk", CacheGroup(0, 2).tier)) if rng.random() < 0.2 else "gpu"
        some = rng.sample(range(1, names), rng.randint(1, 6))
        tags = u64([TOP | one + names * rng.randrange(2) for one in some])
        kind = rng.random()
        if kind < 0.6:
            parent = 0 if rng.random() < 0.5 else rng.randrange(names) * 7919
            changes.append(Store(tier, u64([one * 7919 for one in some]), tags, [(0, parent)]))
        elif kind < 0.97:
            changes.append(Remove(tier, tags))
        else:
            changes.append(rng.choice([Clear(), Clear(below=False), Observe(True)]))
    return changes


def told(changes):
    """Return what a map holds that was told these changes."""
    cache = CacheMap(1 << 22)
    slot = cache.attach("r", None, True)
    for change in changes:
        cache.change(slot, change)
    return contents(cache)


@pytest.mark.parametrize("seed", range(30))
def test_a_map_that_is_told_them_merged_holds_the_same(seed):
    changes = some_changes(random.Random(seed))
    one_by_one = told(changes)
    assert told(merged(changes)) == told(merged(changes, most=5)) == one_by_one and (one_by_one["held"] or seed)


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

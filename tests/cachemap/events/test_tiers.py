"""Copies in slower tiers, in every form in which an engine tells of them: the map has what a prompt would find."""

import random
from array import array
from dataclasses import replace

import pytest

from cachemap import CacheMap
from cachemap.events.apply import EventApplier
from cachemap.events.records import Cleared, Removed
from replicas.simulated.profile import load_profile

from ..publisher import record
from .played import SIZE, Played, named, text

PROFILE = replace(load_profile("gpu-8b"), num_blocks=41, cpu_blocks=90)


def some_texts():
    """Return texts of which some share beginnings, in whole chunks and parts of chunks."""
    texts = [text(n, 400) for n in range(12)]
    return texts + [one[:232] + texts[0][232:] for one in texts[1:4]]


@pytest.mark.parametrize("self_describing, tiers", [(True, {}), (False, {}), (True, {"chunk_blocks": 3})])
def test_the_map_has_what_a_prompt_would_find(self_describing, tiers):
    rng, texts = random.Random(1), some_texts()
    with Played(replace(PROFILE, **tiers), self_describing) as played:
        for number in range(300):
            if number % 60 == 59:  # host memory, too, goes with some resets
                assert played.engine.reset_prefix_cache(external=True)
            played.finish(rng.choice(texts)[: rng.randrange(17, 400)])
            assert {played.differ(one) for one in texts} == {(0, 0)}
        assert played.engine.counters.external_hits > 5000 and not played.applier.orphans


@pytest.mark.parametrize("chunk", [4, 1])
def test_the_map_has_what_lmcache_would_find(chunk):
    """Whole chunks from a prompt's beginning, while host memory evicts; they may be as small as blocks."""
    rng, texts = random.Random(1), some_texts()
    with Played(replace(PROFILE, cpu_blocks=48, chunk_blocks=chunk, lmcache=True)) as played:
        for number in range(400):
            if number % 80 == 79:
                assert played.engine.reset_prefix_cache(external=number % 160 == 79)
            played.finish(rng.choice(texts)[: rng.randrange(17, 400)])
            assert {played.differ(one[: 400 - number % 65]) for one in texts} == {(0, 0)}
        assert played.engine.counters.external_hits > 1500 and played.applier.blocks_removed > 1000
        assert not played.applier.orphans and not played.applier.ignored


def test_after_a_reset_host_memory_of_the_engine_is_not_promised():
    """Whether it is emptied as well the engine does not tell: what is there is found all the same."""
    with Played(PROFILE) as played:
        for number in range(4):
            played.finish(text(number, 390))
        assert played.engine.reset_prefix_cache()
        played.finish(text(0, 390))
        assert played.differ(text(0, 390)) == (0, 0)
        assert all(played.differ(text(one, 390))[1] < 0 for one in (1, 2, 3))


def test_of_chunks_that_are_told_by_key_alone_only_what_is_sure_counts():
    """A chunk's key is that of its last block: nothing is known of the others, so nothing is promised."""
    with Played(replace(PROFILE, chunk_blocks=3), self_describing=False) as played:
        for number in range(20):
            played.finish(text(number % 5, 390))
            assert all(one <= 0 for one in played.differ(text(number % 5, 390)))


CHUNK = 4
ON_GPU = record([*range(1, 9)], range(8 * SIZE), SIZE)


def told_of_chunks(events, apart):
    """Apply these events between the storing of 8 blocks on the GPU and their removal from there.

    Returns the applier, and the runs of blocks that are found in slower tiers then.
    """
    cache_map = CacheMap(1 << 20)
    applier = EventApplier(cache_map, cache_map.attach("r", None, True), "m", SIZE)
    for one in [[ON_GPU], *([event] for event in events), [GONE]] if apart else [[ON_GPU, *events, GONE]]:
        applier.apply(one)
        if apart:
            applier.flush()
    applier.flush()
    return applier, cache_map.match(named(array("I", range(8 * SIZE))), 0.0).lower.get(0, [])


GONE = Removed([*range(1, 9)], "gpu", 0)
WITH_TOKENS = record([1, 2, 3, 4], range(CHUNK * SIZE), SIZE, tier="cpu", together=CHUNK)  # the first chunk
BY_KEY = record([8], [], SIZE, tier="cpu")  # the second one


@pytest.mark.parametrize("apart", [False, True])
def test_chunks_told_by_key_alone_are_found_with_those_told_by_tokens_before(apart):
    """However many events at a time. Counts are in blocks on both ways."""
    events = [WITH_TOKENS, BY_KEY]
    applier, found = told_of_chunks(events, apart)
    assert found == [("cpu", 8)] and applier.blocks_stored == 16 and applier.blocks_removed == 8 and not applier.orphans
    applier, found = told_of_chunks([*events, Removed([8], "cpu", 0)], apart)
    assert found == [("cpu", 4)] and applier.blocks_stored == 16 and applier.blocks_removed == 12
    applier, found = told_of_chunks([*events, Removed([4, 8], "cpu", 0)], apart)
    assert found == [] and applier.blocks_stored == applier.blocks_removed == 16
    assert told_of_chunks([BY_KEY, WITH_TOKENS], apart)[1] == [("cpu", 4)]  # its size was not known


@pytest.mark.parametrize("apart", [False, True])
def test_a_chunk_told_by_key_that_went_before_its_size_was_told_is_not_found(apart):
    applier, found = told_of_chunks([BY_KEY, Removed([8], "cpu", 0), WITH_TOKENS], apart)
    assert found == [("cpu", 4)] and applier.blocks_stored == 13 and applier.blocks_removed == 9
    applier, found = told_of_chunks([BY_KEY, Cleared(), ON_GPU, WITH_TOKENS], apart)
    assert found == [("cpu", 4)] and applier.blocks_removed == 8

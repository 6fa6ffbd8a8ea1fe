"""Copies in slower tiers, in every form in which an engine tells of them: the map has what a prompt would find."""

import random
from array import array
from dataclasses import replace

import pytest

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.events.apply import EventApplier
from cachemap.events.records import FULL_ATTENTION, Cleared, Removed, Stored
from replicas.simulated.engine import Engine, EngineRequest
from replicas.simulated.keys import chain, root
from replicas.simulated.profile import load_profile
from replicas.simulated.publisher import Publisher

from ..publisher import decode

SIZE = 16
PROFILE = replace(load_profile("gpu-8b"), num_blocks=41, cpu_blocks=90)


class Played:
    """An engine, and a map that is told of its events as they go over the wire."""

    def __init__(self, profile, self_describing):
        self.engine, self.published = Engine(profile), 0
        self.publisher = Publisher("127.0.0.1", 0, 0, profile, self_describing)
        self.map = CacheMap(1 << 22)
        self.applier = EventApplier(self.map, self.map.attach("r", None, True), "m", SIZE)

    def step(self):
        step = self.engine.step()
        if step is not None and step.events:
            self.publisher.publish(step.events, lambda owner: owner)
            _, payload = self.publisher._kept[-1]
            batch = decode(payload)
            assert not batch.passed_over
            self.applier.apply(batch.events)
            self.applier.flush()
        return step

    def differ(self, ids):
        """Blocks of a prompt that the map takes to be there, less those that the engine would find: in its own cache,
        and behind that."""
        blocks, keys = (len(ids) - 1) // SIZE, chain(ids, SIZE, root(1))
        match = self.map.match(hash_blocks(ids.tobytes(), SIZE, chain_seed("m", SIZE)), 0.0)
        held = min(match.held[0], blocks)
        behind = min(sum(count for _, count in match.lower.get(0, ())), blocks - held)
        own = self.engine.cached(keys, len(ids))
        return held - own, held + behind - min(self.engine._offload.find(keys, own, len(keys)).end, blocks)


@pytest.mark.parametrize(
    "self_describing, tiers",
    [(True, {}), (False, {}), (True, {"chunk_blocks": 3})],
)
def test_the_map_has_what_a_prompt_would_find(self_describing, tiers):
    played, rng = Played(replace(PROFILE, **tiers), self_describing), random.Random(1)
    texts = [random.Random(n).choices(range(500), k=400) for n in range(12)]
    texts += [text[:232] + texts[0][232:] for text in texts[1:4]]  # the same beginnings, in chunks and parts of chunks
    try:
        fetched = 0
        for number in range(300):
            if number % 60 == 59:  # host memory, too, goes with some resets
                assert played.engine.reset_prefix_cache(external=True)
            ids = array("I", rng.choice(texts)[: rng.randrange(17, 400)])
            keys = chain(ids, SIZE, root(1))
            played.engine.add(EngineRequest(number, keys, len(ids), 3, owner=(ids, None, None, None)))
            while played.step():
                pass
            for text in texts:
                own, all_tiers = played.differ(array("I", text))
                assert (own, all_tiers) == (0, 0)
            fetched = played.engine.counters.external_hits
        assert fetched > 5000 and not played.applier.orphans and played.applier.fault is None
    finally:
        played.publisher.close()


@pytest.mark.parametrize("chunk", [4, 1])
def test_the_map_has_what_lmcache_would_find(chunk):
    """Whole chunks from a prompt's beginning, while host memory evicts; they may be as small as blocks."""
    profile = replace(PROFILE, cpu_blocks=48, chunk_blocks=chunk, lmcache=True)
    played, rng = Played(profile, True), random.Random(1)
    texts = [random.Random(n).choices(range(500), k=400) for n in range(12)]
    texts += [text[:232] + texts[0][232:] for text in texts[1:4]]  # the same beginnings, in chunks and parts of chunks
    try:
        for number in range(400):
            if number % 80 == 79:
                assert played.engine.reset_prefix_cache(external=number % 160 == 79)
            ids = array("I", rng.choice(texts)[: rng.randrange(17, 400)])
            keys = chain(ids, SIZE, root(1))
            played.engine.add(EngineRequest(number, keys, len(ids), 3, owner=(ids, None, None, None)))
            while played.step():
                pass
            assert all(played.differ(array("I", text[: 400 - number % 65])) == (0, 0) for text in texts)
        assert played.engine.counters.external_hits > 1500 and played.applier.blocks_removed > 1000
        assert not played.applier.orphans and not played.applier.ignored and played.applier.fault is None
    finally:
        played.publisher.close()


def test_after_a_reset_host_memory_of_the_engine_is_not_promised():
    """Whether it is emptied as well the engine does not tell: what is there is found all the same."""
    played = Played(PROFILE, True)
    try:
        for number in range(8):
            ids = array("I", random.Random(number % 4).choices(range(500), k=390))
            played.engine.add(
                EngineRequest(number, chain(ids, SIZE, root(1)), len(ids), 3, owner=(ids, None, None, None))
            )
            while played.step():
                pass
            if number == 3:
                assert played.engine.reset_prefix_cache()
            elif number == 4:
                others = [array("I", random.Random(one).choices(range(500), k=390)) for one in (1, 2, 3)]
                assert played.differ(ids) == (0, 0) and all(played.differ(one)[1] < 0 for one in others)
    finally:
        played.publisher.close()


def test_of_chunks_that_are_told_by_key_alone_only_what_is_sure_counts():
    """A chunk's key is that of its last block: nothing is known of the others, so nothing is promised."""
    played = Played(replace(PROFILE, chunk_blocks=3), False)
    try:
        for number in range(20):
            ids = array("I", random.Random(number % 5).choices(range(500), k=390))
            keys = chain(ids, SIZE, root(1))
            played.engine.add(EngineRequest(number, keys, len(ids), 3, owner=(ids, None, None, None)))
            while played.step():
                pass
            assert all(one <= 0 for one in played.differ(ids)) and played.applier.fault is None
    finally:
        played.publisher.close()


CHUNK = 4


def told_of_chunks(events, apart):
    """A map that was told that 8 blocks are on the GPU, of these events, and that the blocks have left the GPU."""
    cache_map = CacheMap(1 << 20)
    applier = EventApplier(cache_map, cache_map.attach("r", None, True), "m", SIZE)
    on_gpu = stored(range(1, 9), range(8 * SIZE))
    for one in [[on_gpu], *([event] for event in events), [GONE]] if apart else [[on_gpu, *events, GONE]]:
        applier.apply(one)
        if apart:
            applier.flush()
    applier.flush()
    hashes = hash_blocks(array("I", range(8 * SIZE)).tobytes(), SIZE, chain_seed("m", SIZE))
    return applier, cache_map.match(hashes, 0.0).lower.get(0, [])


def stored(keys, tokens, tier="gpu", together=1):
    ids = array("I", tokens).tobytes()
    return Stored([*keys], None, ids, SIZE, tier, None, None, 0, FULL_ATTENTION, together=together)


GONE = Removed([*range(1, 9)], "gpu", 0)
WITH_TOKENS = stored(range(1, 5), range(CHUNK * SIZE), "cpu", CHUNK)  # the first chunk
BY_KEY = stored([8], [], "cpu")  # the second one


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
    applier, found = told_of_chunks([BY_KEY, Cleared(), stored(range(1, 9), range(8 * SIZE)), WITH_TOKENS], apart)
    assert found == [("cpu", 4)] and applier.blocks_removed == 8

"""The model of an engine's cache against a cache that stamps each block, and what it may cost."""

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap.table.chains import BYTES_PER_BLOCK, EngineModel


class BlockLru:
    """A cache whose blocks have the number of their last use and their depth; the oldest, then deepest goes first."""

    def __init__(self, capacity: int):
        self.limit = capacity
        self.blocks: dict[int, tuple[int, int]] = {}
        self.uses = 0

    def add(self, hashes: list[int]) -> None:
        self.uses += 1
        for depth, block in enumerate(hashes):
            self.blocks[block] = (self.uses, -depth)
        for block in sorted(self.blocks, key=self.blocks.get)[: max(len(self.blocks) - self.limit, 0)]:
            del self.blocks[block]

    def reach(self, hashes: list[int]) -> int:
        return next((i for i, block in enumerate(hashes) if block not in self.blocks), len(hashes))


def hashed(tokens: list[int]) -> list[int]:
    """Return the chained hashes of blocks of one token each."""
    return [hash(tuple(tokens[: i + 1])) % (1 << 64) for i in range(len(tokens))]


def random_chain(rng, count: int) -> list[int]:
    return rng.integers(1, 1 << 64, count, np.uint64).tolist()


# (prompt to leave, after how many of its blocks, number of blocks of its own, what they start with)
FORKS = st.tuples(st.integers(0, 30), st.integers(0, 40), st.integers(0, 12), st.integers(0, 2))
STEPS = st.lists(
    st.one_of(FORKS, FORKS, FORKS, st.tuples(st.integers(0, 2), st.integers(0, 2))), min_size=1, max_size=60
)


@settings(max_examples=400)
@given(st.integers(1, 80), STEPS)
def test_keeps_the_blocks_that_a_cache_of_single_blocks_keeps(capacity, steps):
    model, reference, prompts = EngineModel(capacity), BlockLru(capacity), [[]]
    for step in steps:
        if len(step) == 2:
            model.learn(*step)
            assert capacity / 4 <= model.limit <= capacity
            reference.limit = model.limit
            continue
        at, keep, own, kind = step
        prompt = prompts[at % len(prompts)][:keep] + [kind] * own
        prompts.append(prompt)
        model.add(hashed(prompt))
        reference.add(hashed(prompt))
        assert len(model) == len(reference.blocks) <= model.limit
        for other in prompts:
            assert model.reach(hashed(other)) == reference.reach(hashed(other))


@given(st.integers(1, 12), st.lists(st.lists(st.integers(1, 9), max_size=12), max_size=60))
def test_hashes_that_collide_break_nothing_but_the_guess(capacity, lists):
    model = EngineModel(capacity)
    for hashes in lists:
        model.add(hashes)
        assert 0 <= model.reach(hashes) <= len(hashes) and 0 <= len(model) <= capacity
    model.clear()
    assert len(model) == 0 and model.reach([1, 2]) == 0


def test_bytes_are_bounded_whatever_the_prompts():
    """Prompts of one block, short turns, long ones: never more than the budget that `most` stands for."""
    rng, most = np.random.default_rng(2), 3000
    for size in (1, 2, 5, 20, 300):
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            model, prompt = EngineModel(1 << 20), []
            model.most = most
            for _ in range(4 * most // size):
                prompt = prompt[: rng.integers(0, 20)] + random_chain(rng, size)
                model.add(prompt)
            used = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert len(model) > most / 7 and used < most * BYTES_PER_BLOCK


def test_a_budget_that_holds_no_prompt_holds_none():
    """As of many replicas on a small one."""
    model, rng = EngineModel(1 << 20), np.random.default_rng(4)
    for most in (4, 0):
        model.most = most
        for size in (1, 3, 50):
            prompt = random_chain(rng, size)
            model.add(prompt)
            assert model.reach(prompt) == len(model) == 0


def test_work_follows_what_is_new():
    """A conversation that grows is one segment; a turn leaves the rest of it as it was."""
    model, rng = EngineModel(1 << 20), np.random.default_rng(3)
    system, other = random_chain(rng, 50), random_chain(rng, 10)
    model.add(system + other)
    prompt = system
    for _ in range(40):
        prompt = prompt + random_chain(rng, 10)
        model.add(prompt)
    assert len(model) == 460 and len(model._order) == 3  # the system prompt and two that follow it
    assert model.reach(prompt) == 450 and model.reach(system + other) == 60


def test_a_segment_whose_branches_all_went_is_extended_again():
    model, rng = EngineModel(30), np.random.default_rng(4)
    system, other = random_chain(rng, 10), random_chain(rng, 20)
    prompts = [system + random_chain(rng, 10) for _ in range(3)]
    for prompt in (prompts[0], prompts[1], other, prompts[2]):
        model.add(prompt)
    assert [model.reach(prompt) for prompt in (*prompts, other)] == [10, 10, 20, 10]
    assert len(model._order) == 2

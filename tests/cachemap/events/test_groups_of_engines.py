"""An engine with several cache groups, simulated, and a map that is told of its events as they go over the wire: what
the map predicts is what the engine delivers, by its own statement of the rule."""

import random
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.simulated.profile import load_profile

from .played import SIZE, Played, named, text

PROFILE = replace(load_profile("gpu-8b"), num_blocks=161, max_num_seqs=8, max_num_batched_tokens=256)
# Gemma 3 (windows), Qwen3-Next (Mamba), gpt-oss (one group of windows), and what nobody has built yet
MODELS = [(80, 80, 80), (0, 0), (128,), (33, 0, 400), (16, 17, 18)]


def tree(dice: random.Random) -> list[array]:
    """Texts that share beginnings of all lengths, at the edges of blocks and between them."""
    texts = [text(n, 560) for n in range(3)]
    for n in range(9):
        at = dice.choice((64, 80, 150, 160, 161, 300, 320))
        texts.append(dice.choice(texts)[:at] + text(100 + n, 560 - at))
    return texts


@pytest.mark.parametrize("retention", ["replay", "all"])
@pytest.mark.parametrize("windows", MODELS)
def test_predicted_is_delivered_while_blocks_are_evicted(windows, retention):
    dice = random.Random(1)
    with Played(replace(PROFILE, windows=windows, retention=retention), every_token=True) as played:
        texts, hits, shorter = tree(dice), 0, 0
        for _ in range(250):
            ids = dice.choice(texts)
            prompt = dice.choice((dice.randrange(20, 480), 16 * dice.randrange(2, 30)))
            predicted, full = played.predicted(ids[:prompt]), played.map._gpu.blocks
            (reach,) = full.reach(full.prefix(named(ids[:prompt])), 1)
            number = played.finish(ids[: prompt + dice.randrange(1, 60)], prompt)
            assert played.cached[number] == predicted
            hits += predicted > 0
            shorter += predicted < min(reach, (prompt - 1) // SIZE) * SIZE
        assert hits > 50 and shorter > 5 and played.removed > 161 and not played.applier.orphans


ASKS = st.tuples(st.integers(0, 11), st.integers(17, 480), st.integers(1, 60))


@settings(max_examples=40, deadline=None)
@given(
    windows=st.lists(st.sampled_from([0, *range(2, 300)]), min_size=1, max_size=3).map(tuple),
    retention=st.sampled_from(["replay", "all"]),
    happenings=st.lists(st.one_of(ASKS, st.just("abort"), st.just("reset"), st.integers(1, 6)), max_size=40),
)
def test_the_map_has_what_a_prompt_would_find_at_any_moment(windows, retention, happenings):
    """With several requests at once, chunks of prompts, preemptions, aborts and resets."""
    with Played(replace(PROFILE, windows=windows, retention=retention), every_token=True) as played:
        texts = tree(random.Random(2))
        for happening in [*happenings, 500]:
            if happening == "abort":
                played.engine.abort(played.number)
            elif happening == "reset":
                played.engine.reset_prefix_cache()
            elif isinstance(happening, tuple):
                which, prompt, more = happening
                played.ask(texts[which][: prompt + more], prompt)
            else:
                for _ in range(happening):
                    played.step()
                    if not played.engine._pending:
                        for ids in texts:
                            assert played.predicted(ids) == played.found(ids)
                    if not played.engine.running and not played.engine.waiting:
                        break
        assert not played.applier.orphans

"""An engine with several cache groups, simulated, and a map that is told of its events as they go over the wire: what
the map predicts is what the engine delivers, by its own statement of the rule."""

import random
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.events.apply import EventApplier
from replicas.simulated.engine import Engine, EngineRequest, Removed
from replicas.simulated.keys import chain, root
from replicas.simulated.profile import load_profile
from replicas.simulated.publisher import Publisher

from ..publisher import decode

SIZE = 16
PROFILE = replace(load_profile("gpu-8b"), num_blocks=161, max_num_seqs=8, max_num_batched_tokens=256)
# Gemma 3 (windows), Qwen3-Next (Mamba), gpt-oss (one group of windows), and what nobody has built yet
MODELS = [(80, 80, 80), (0, 0), (128,), (33, 0, 400), (16, 17, 18)]


class Played:
    def __init__(self, **profile):
        self.engine = Engine(replace(PROFILE, **profile), every_token=True)
        self.publisher = Publisher("127.0.0.1", 0, 0, self.engine.profile)
        self.map = CacheMap(1 << 22)
        self.applier = EventApplier(self.map, self.map.attach("r", None, True), "m", SIZE)
        self.removed = self.number = 0
        self.cached: dict[int, int] = {}  # tokens, as answers tell

    def ask(self, ids: array, prompt: int) -> int:
        """A prompt of the first so many of these tokens; the rest is what is answered. Gives its number."""
        keys = chain(ids, SIZE, root(1))
        self.number += 1
        self.engine.add(
            EngineRequest(
                self.number,
                keys[: prompt // SIZE],
                prompt,
                len(ids) - prompt,
                output_blocks=keys.__getitem__,
                owner=(ids, None, None, None),
            )
        )
        return self.number

    def step(self):
        step = self.engine.step()
        if step is None:
            return None
        self.cached |= {output.id: output.cached_tokens for output in step.outputs}
        if step.events:
            self.publisher.publish(step.events, lambda owner: owner)
            batch = decode(self.publisher._kept[-1][1])
            assert not batch.passed_over
            self.applier.apply(batch.events)
            self.applier.flush()
            assert self.applier.fault is None and not self.applier.orphans
        self.removed += sum(len(event.keys) for event in step.events if type(event) is Removed)
        return step

    def predicted(self, ids: array) -> int:
        """Tokens of such a prompt that a gateway would take to be cached."""
        hashes = hash_blocks(ids.tobytes(), SIZE, chain_seed("m", SIZE))
        return self.map.match(hashes, 0.0, (len(ids) - 1) // SIZE).held[0] * SIZE

    def found(self, ids: array) -> int:
        """Tokens of such a prompt that the engine would find."""
        return self.engine.cached(chain(ids, SIZE, root(1)), len(ids)) * SIZE

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.publisher.close()


def text(seed: int, length: int) -> array:
    return array("I", random.Random(seed).choices(range(500), k=length))


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
    with Played(windows=windows, retention=retention) as played:
        texts, hits, shorter = tree(dice), 0, 0
        for _ in range(250):
            ids = dice.choice(texts)
            prompt = dice.choice((dice.randrange(20, 480), 16 * dice.randrange(2, 30)))
            predicted, full = played.predicted(ids[:prompt]), played.map._gpu
            reach = full.blocks.reach(
                full.blocks.prefix(hash_blocks(ids[:prompt].tobytes(), SIZE, chain_seed("m", SIZE))), 1
            )
            number = played.ask(ids[: prompt + dice.randrange(1, 60)], prompt)
            while played.step():
                pass
            assert played.cached[number] == predicted
            hits += predicted > 0
            shorter += predicted < min(reach[0], (prompt - 1) // SIZE) * SIZE
        assert hits > 50 and shorter > 5 and played.removed > 161


ASKS = st.tuples(st.integers(0, 11), st.integers(17, 480), st.integers(1, 60))


@settings(max_examples=40, deadline=None)
@given(
    windows=st.lists(st.sampled_from([0, *range(2, 300)]), min_size=1, max_size=3).map(tuple),
    retention=st.sampled_from(["replay", "all"]),
    happenings=st.lists(st.one_of(ASKS, st.just("abort"), st.just("reset"), st.integers(1, 6)), max_size=40),
)
def test_the_map_has_what_a_prompt_would_find_at_any_moment(windows, retention, happenings):
    """With several requests at once, chunks of prompts, preemptions, aborts and resets."""
    with Played(windows=windows, retention=retention) as played:
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

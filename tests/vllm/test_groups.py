"""A model whose layers have sliding windows but for one: cached tokens as predicted, and as the engine reports.

vLLM keeps a cache group for each layer here, three with a window and one of full attention, and drops their blocks one
by one. From 0.32 on the groups with a window keep only what a later prompt can resume at.
"""

import pytest

from .engines import block_size, gateway, tiny_model
from .traffic import LATE_SECONDS, Talk, caught_up, drive, plain, share_equal, wrong
from .witness import Witness

WINDOWS = (80, 80, 80, 0)  # tokens; 0: full attention. In blocks of 16 the last 5 matter, in blocks of 32 the last 3
REQUESTS = 220
TOKENS = 5120  # that the cache has blocks for, over all groups
LONGEST = 700  # tokens of a talk, before its last turn


@pytest.fixture(scope="module")
def engine(start_engine, tmp_path_factory):
    model = tiny_model(tmp_path_factory.mktemp("models") / "windows", windows=WINDOWS)
    flags = ("--max-model-len", "1024", "--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", "64M")
    return start_engine(*flags, model=model, blocks=TOKENS // block_size()).wait()


@pytest.fixture
def witness(engine):
    follows = Witness(engine)
    yield follows
    follows.close()


def shorter(dice) -> Talk:
    talk = plain(dice)
    talk.longest = LONGEST
    return talk


def report(outcomes) -> str:
    over = sum(one.predicted > one.cached for one in outcomes)
    under = sum(one.predicted < one.cached for one in outcomes)
    return f"of {len(outcomes)} predictions {len(outcomes) - over - under} equal, {over} over, {under} under"


@pytest.mark.exact
async def test_every_prediction_is_exact_once_events_have_come(engine, witness):
    before = len(witness.steps)
    async with gateway(engine) as process:
        outcomes = await drive(process, REQUESTS, shorter, between=lambda _: caught_up(process, witness))
    print(report(outcomes))
    assert share_equal(outcomes) == 1, wrong(outcomes)
    steps = witness.steps[before:]
    assert sum(len(step.removed) for step in steps) > engine.blocks, "hardly anything was evicted"
    kinds = {event["kv_cache_spec_kind"] for event in witness.events if event["type"] == "BlockStored"}
    assert kinds == {"sliding_window", "full_attention"}
    shares = [one.cached / one.prompt for one in outcomes if one.cached]
    assert len(shares) > REQUESTS / 3
    # where full attention alone decided, the map would have promised more
    assert any(promised_by_full_attention(one, witness) > one.cached for one in outcomes)


def promised_by_full_attention(one, witness: Witness) -> int:
    return max(one.held(witness, LATE_SECONDS))

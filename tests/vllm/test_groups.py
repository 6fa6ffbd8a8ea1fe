"""Models whose layers are not all alike: cached tokens as predicted, and as the engine reports.

vLLM keeps a cache group for each layer here, three of another kind and one of full attention, and drops their blocks
one by one. In 0.32 the others keep only what a later prompt can resume at, in 0.28 states do.
"""

import json
from pathlib import Path

import pytest

from .engines import block_size, gateway, tiny_model, version
from .traffic import LATE_SECONDS, Talk, caught_up, drive, plain, share_equal, wrong
from .witness import Witness

WINDOWS = (80, 80, 80, 0)  # tokens; 0: full attention. In blocks of 16 the last 5 matter, in blocks of 32 the last 3
REQUESTS = 220
TOKENS = 5120  # that the cache has blocks for, over all groups
LONGEST = 700  # tokens of a talk, before its last turn


@pytest.fixture(scope="module", params=["sliding_window", "mamba"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(kind, start_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / kind
    flags = ["--max-model-len", "1024", "--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", "64M"]
    if kind == "mamba":
        if version() < (0, 32) and "amx_tile" in Path("/proc/cpuinfo").read_text():
            pytest.skip("before 0.32 vLLM packs an LFM2's convolutions for AMX, and then cannot compute them")
        model = convolutional(tiny_model(folder))
        flags += ["--load-format", "dummy", "--enable-prefix-caching"]
    else:
        model = tiny_model(folder, windows=WINDOWS)
    started = start_engine(*flags, model=model, blocks=TOKENS // block_size())
    yield started.wait()
    started.stop()


def convolutional(model: Path) -> Path:
    """The same as an LFM2 without weights: short convolutions, whose states vLLM keeps as those of Mamba layers."""
    config = json.loads((model / "config.json").read_text())
    (model / "model.safetensors").unlink()
    (model / "config.json").write_text(json.dumps({
        **{name: config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "torch_dtype")},
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 128, "block_dim": 128, "conv_dim": 128,
        "conv_dim_out": 128, "intermediate_size": 256, "block_ff_dim": 256, "block_multiple_of": 32, "conv_bias": False,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 16384, "norm_eps": 1e-5, "rope_theta": 10000.0,
        "conv_L_cache": 3, "layer_types": ["conv", "conv", "full_attention", "conv"], "tie_word_embeddings": True,
    }))  # fmt: skip
    return model


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
async def test_every_prediction_is_exact_once_events_have_come(kind, engine, witness):
    before = len(witness.steps)
    async with gateway(engine) as process:
        outcomes = await drive(process, REQUESTS, shorter, between=lambda _: caught_up(process, witness))
    print(kind, report(outcomes))
    assert share_equal(outcomes) == 1, wrong(outcomes)
    steps = witness.steps[before:]
    assert sum(len(step.removed) for step in steps) > engine.blocks, "hardly anything was evicted"
    kinds = {event["kv_cache_spec_kind"] for event in witness.events if event["type"] == "BlockStored"}
    assert kinds == {kind, "full_attention"}
    shares = [one.cached / one.prompt for one in outcomes if one.cached]
    assert len(shares) > REQUESTS / 3
    # where full attention alone decided, the map would have promised more
    assert any(promised_by_full_attention(one, witness) > one.cached for one in outcomes)


def promised_by_full_attention(one, witness: Witness) -> int:
    return max(one.held(witness, LATE_SECONDS))

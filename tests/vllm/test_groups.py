"""Models whose layers are not all alike, and one with an EAGLE head: cached tokens as predicted, and as the engine
reports.

vLLM keeps a cache group for each layer where they are not alike, three of another kind and one of full attention, and
drops their blocks one by one. In 0.32 the others keep only what a later prompt can resume at, in 0.28 states do.
"""

import json
import shutil
from pathlib import Path

import pytest

from loadgen.demo.tiny_model import tiny_model

from .engines import block_size, gateway, version
from .traffic import LATE_SECONDS, exactly, talking

GROUPED = ("sliding_window", "mamba")
WINDOWS = (80, 80, 80, 0)  # tokens; 0: full attention. In blocks of 16 the last 5 matter, in blocks of 32 the last 3
REQUESTS = 220
TOKENS = 5120  # that the cache has blocks for, over all groups


@pytest.fixture
def engine(kind, start_engine, tmp_path):
    flags = ["--max-model-len", "1024", "--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", "64M"]
    model = tiny_model(tmp_path / kind, windows=WINDOWS if kind == "sliding_window" else ())
    if kind == "mamba":
        if version() < (0, 32) and "amx_tile" in Path("/proc/cpuinfo").read_text():
            pytest.skip("before 0.32 vLLM packs an LFM2's convolutions for AMX, and then cannot compute them")
        flags += ["--load-format", "dummy", "--enable-prefix-caching"]
        convolutional(model)
    if kind == "eagle":
        speculator = {"method": "eagle", "model": str(head_of(model)), "num_speculative_tokens": 2}
        flags += ["--load-format", "dummy", "--speculative-config", json.dumps(speculator)]
    started = start_engine(*flags, model=model, blocks=TOKENS // block_size())
    yield started.wait()
    started.stop()


def convolutional(model: Path) -> None:
    """Make it an LFM2 without weights: short convolutions, whose states vLLM keeps as those of Mamba layers."""
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


def head_of(model: Path) -> Path:
    """An EAGLE head for it, without weights."""
    head = shutil.copytree(model, model.with_name("head"))
    (head / "model.safetensors").unlink()
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return head


@pytest.mark.parametrize("kind", [pytest.param(one, marks=pytest.mark.exact) for one in GROUPED] + ["eagle"])
async def test_every_prediction_is_exact_once_events_have_come(kind, engine, witness_of):
    witness = witness_of(engine)
    async with gateway(engine) as process:
        outcomes = await exactly(process, REQUESTS, talking(longest=700), witnesses=[witness])
    removed = sum(len(step.removed) for step in witness.steps)
    assert removed > engine.blocks or kind not in GROUPED, "hardly anything was evicted"
    assert sum(one.cached > 0 for one in outcomes) > REQUESTS / 3
    if kind in GROUPED:
        kinds = {event["kv_cache_spec_kind"] for event in witness.events if event["type"] == "BlockStored"}
        assert kinds == {kind, "full_attention"}
        # where full attention alone decided, the map would have promised more
        assert any(max(one.held(witness, LATE_SECONDS)) > one.cached for one in outcomes)

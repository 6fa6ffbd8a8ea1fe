"""Random LoRA adapters for the tiny models."""

import json
from pathlib import Path

import numpy as np

from loadgen.demo.tiny_model import HEAD, HEADS, HIDDEN, KV_HEADS, LAYERS, save


def lora(folder: Path, seed: int, rank: int = 8) -> Path:
    """A random adapter for any of these models: it changes queries and values of each layer."""
    folder.mkdir(parents=True, exist_ok=True)
    random, weights = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", HEADS * HEAD), ("v_proj", KV_HEADS * HEAD)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = random.normal(0, 0.15, (rank, HIDDEN))
            weights[f"{place}.lora_B.weight"] = random.normal(0, 0.15, (width, rank))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0,
              "bias": "none", "target_modules": ["q_proj", "v_proj"]}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save(folder / "adapter_model.safetensors", weights)
    return folder

"""A Qwen2-VL of two layers with one of vision, without weights: vLLM fills it with small random ones."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer

from loadgen.demo.tiny_model import HEADS, HIDDEN, KV_HEADS, LAYERS, MAX_POSITION

from .models import PARTS, SPECIAL, folder, write

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor", "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 200, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def tiny_qwen2_vl(where: Path) -> Path:
    shutil.move(folder({}), where)
    tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start", "vision_end", "im_end")}  # fmt: skip
    assert None not in ids.values() and set(SPECIAL)
    text = {
        "model_type": "qwen2_vl_text", "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": 1 + max(tokenizer.get_vocab().values()),
        "max_position_embeddings": MAX_POSITION, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": None, "eos_token_id": ids["im_end"],
    }  # fmt: skip
    vision = {
        "model_type": "qwen2_vl", "depth": 1, "embed_dim": 64, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 2,
        "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "quick_gelu",
    }  # fmt: skip
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "torch_dtype": "bfloat16",
        "text_config": text, "vision_config": vision, "tie_word_embeddings": True, "image_token_id": ids["image_pad"],
        "video_token_id": ids["video_pad"], "vision_start_token_id": ids["vision_start"], "vision_end_token_id": ids["vision_end"],
    }  # fmt: skip
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    return write(where, {"config": config, "tokenizer_config": named, "preprocessor_config": PROCESSOR}, PARTS)

"""A Llama 4 of two layers with one of vision, without weights."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from loadgen.demo.tiny_model import HEADS, HIDDEN, KV_HEADS, LAYERS, MAX_POSITION
from replicas.simulated.model import sim_model_dir

from ....vllm.chat_templates import small_tokenizer
from .models import write

TILE, PATCH, TILES = 56, 14, 16  # a tile has 4 x 4 patches, and a token for each four of them
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|header_start|>{{ message.role }}<|header_end|>\n\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image|>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)
_SPECIAL = (
    "<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|image_start|>", "<|image_end|>", "<|image|>",
    "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>",
)  # fmt: skip


def tiny_llama4(where: Path) -> Path:
    where.mkdir(parents=True)
    (where / "tokenizer.json").write_text(small_tokenizer(sim_model_dir() / "tokenizer.json", _SPECIAL))
    tokenizer = tokenizers.Tokenizer.from_file(str(where / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in _SPECIAL}
    text = {
        "model_type": "llama4_text", "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "intermediate_size_mlp": 2 * HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS,
        "vocab_size": 1 + max(tokenizer.get_vocab().values()), "max_position_embeddings": MAX_POSITION, "num_local_experts": 2,
        "num_experts_per_tok": 1, "bos_token_id": ids["<|begin_of_text|>"], "eos_token_id": ids["<|eot|>"], "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "model_type": "llama4_vision_model", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": TILE, "patch_size": PATCH, "pixel_shuffle_ratio": 0.5, "vision_output_dim": 64,
        "projector_input_dim": 64, "projector_output_dim": 64,
    }  # fmt: skip
    config = {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "torch_dtype": "bfloat16",
        "text_config": text, "vision_config": vision, "boi_token_index": ids["<|image_start|>"],
        "eoi_token_index": ids["<|image_end|>"], "image_token_index": ids["<|patch|>"],
    }  # fmt: skip
    files = {
        "config": config,
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>",
            "pad_token": "<|eot|>",
        },
        "preprocessor_config": {
            "image_processor_type": "Llama4ImageProcessorFast", "processor_class": "Llama4Processor", "do_resize": True,
            "max_patches": TILES, "resize_to_max_canvas": False, "size": {"height": TILE, "width": TILE},
        },
        "processor_config": {"patch_size": PATCH, "processor_class": "Llama4Processor"},
    }  # fmt: skip
    return write(where, files, TEMPLATE)

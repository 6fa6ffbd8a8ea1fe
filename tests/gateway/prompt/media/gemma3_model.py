"""A Gemma 3 of two layers with one of vision, without weights, and a tokenizer of the same kind as Gemma's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadgen.demo.tiny_model import HEADS, HIDDEN, KV_HEADS, LAYERS, MAX_POSITION

from .models import write

TOKENS, TILE, PATCH = 16, 56, 14  # of an image, whose 4 x 4 patches are all kept
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_SPECIAL = (
    "<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>",
)  # fmt: skip
_WORDS = ("word", "rule", "is", "so", "the", "and", "What", "image", "See")


def tokenizer() -> dict[str, Any]:
    """As Gemma's in all that matters for images: one to eight newlines are tokens, blanks are written as U+2581, and a
    character without a token is written as its bytes."""
    characters = [chr(code) for code in range(33, 127)]
    tokens = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\n", "\u2581", *characters]
    merges = [["\n" * length, "\n" * length] for length in (1, 2)] + [["\n\n", "\n"]]
    merges += [["\n" * 4, "\n" * length] for length in (1, 2, 3, 4)]
    for word in _WORDS:
        for start, end in ((word[:length], word[length]) for length in range(1, len(word))):
            merges.append([start, end])
        merges.append(["\u2581", word])
    merges = [list(pair) for pair in dict.fromkeys(map(tuple, merges))]
    vocab = {token: id for id, token in enumerate(dict.fromkeys([*tokens, *("".join(pair) for pair in merges)]))}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": id, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for id, name in enumerate(_SPECIAL)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip


def tiny_gemma3(where: Path) -> Path:
    where.mkdir(parents=True)
    made = tokenizer()
    ids = made["model"]["vocab"]
    text = {
        "model_type": "gemma3_text", "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS, "vocab_size": len(ids),
        "max_position_embeddings": MAX_POSITION, "sliding_window": 64, "layer_types": ["full_attention"] * LAYERS,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": TILE, "patch_size": PATCH, "vision_use_head": False,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": text, "vision_config": vision, "mm_tokens_per_image": TOKENS, "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"], "image_token_index": ids["<image_soft_token>"], "eos_token_id": ids["<end_of_turn>"],
    }  # fmt: skip
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    files = {
        "config": config,
        "tokenizer": made,
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
            "unk_token": "<unk>", "extra_special_tokens": names, **names,
        },
        "preprocessor_config": {
            "image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor", "do_pan_and_scan": None,
            "do_resize": True, "image_seq_length": TOKENS, "size": {"height": TILE, "width": TILE},
        },
        "processor_config": {"image_seq_length": TOKENS, "processor_class": "Gemma3Processor"},
    }  # fmt: skip
    return write(where, files, TEMPLATE)

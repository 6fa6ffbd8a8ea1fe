"""Make tiny models that a real vLLM loads within a second: random weights and a real tokenizer.

The weights are drawn from a normal distribution whose deviation (0.15) is large enough for attention to affect the
output. The output then depends on the whole prompt, so that a wrong KV cache block shows in the text.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD = 128, 2, 4, 2, 32
KV_BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD * 2  # bfloat16 keys and values
MAX_POSITION = 16384
VOCABULARY = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer.model",
)


def tiny_model(folder: Path, tokenizer: Path | None = None, seed: int = 0, windows: tuple[int, ...] = ()) -> Path:
    """Write a Llama model of 2 layers with random weights to `folder`, which is created, and return the folder.

    `tokenizer`: folder of a tokenizer to copy; None trains a small one with a ChatML template, which takes 1 s. `seed`:
    seed of the random weights. `windows`: sliding window of each layer in tokens, 0 for full attention. If it is given,
    the model has one layer per entry instead of 2, and all entries other than 0 must be equal.
    """
    layers = len(windows) or LAYERS
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        _train_tokenizer(folder)
    else:
        for name in COPIED:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)
    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = 1 + max(loaded.get_vocab(with_added_tokens=True).values())
    said = json.loads((folder / "tokenizer_config.json").read_text())
    first, last = (_special_id(loaded, said.get(name)) for name in ("bos_token", "eos_token"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": vocabulary, "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": first, "eos_token_id": last,
    }  # fmt: skip
    if any(windows):
        config["sliding_window"] = max(windows)
        config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": first, "eos_token_id": last}))
    save(folder / "model.safetensors", _weights(vocabulary, layers, np.random.default_rng(seed)))
    return folder


def _weights(vocabulary: int, layers: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32) * np.float32(0.15)

    weights = {"model.embed_tokens.weight": normal(vocabulary, HIDDEN), "model.norm.weight": np.ones(HIDDEN)}
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (2 * HIDDEN, HIDDEN), "mlp.up_proj": (2 * HIDDEN, HIDDEN), "mlp.down_proj": (HIDDEN, 2 * HIDDEN),
    }  # fmt: skip
    for layer in range(layers):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN)
    return weights


def save(path: Path, weights: dict[str, np.ndarray]) -> None:
    """Write arrays by name to a safetensors file: the length of the header, a JSON header, and the arrays as F32."""
    header, arrays, at = {}, [], 0
    for name, weight in weights.items():
        array = np.ascontiguousarray(weight, np.float32)
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        arrays.append(array)
        at += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for array in arrays:
            file.write(array.tobytes())


def _train_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer and write its files to `folder`.

    The texts are the sources of Python's standard library, which are on every machine and close to English.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
    )  # fmt: skip
    tokenizer.train(sorted(map(str, Path(os.__file__).parent.glob("[a-d]*.py"))), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "pad_token": SPECIAL[0],
        "model_max_length": MAX_POSITION, "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE,
    }))  # fmt: skip


def _special_id(tokenizer: Tokenizer, said: str | dict | None) -> int | None:
    """Return the id of a special token, or None if the tokenizer has no such token.

    `said`: the token as tokenizer_config.json has it: a text, an object with the text as its `content`, or None.
    """
    text = said.get("content") if isinstance(said, dict) else said
    return tokenizer.token_to_id(text) if text else None

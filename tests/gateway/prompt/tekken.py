"""A model folder in Mistral's own format: `tekken.json` of a version, and weights that are none."""

import base64
import functools
import json
from pathlib import Path

from replicas.simulated.model import sim_model_dir

from ...vllm.chat_templates import small_tokenizer
from .kimi import bytes_to_symbols

WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
LATER = ("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]")
RESERVED = 40


@functools.cache
def _tokens() -> list[bytes]:
    """All bytes, and what the merges of the simulated engine's tokenizer make."""
    byte_of = {symbol: byte for byte, symbol in bytes_to_symbols().items()}
    whole = json.loads(small_tokenizer(sim_model_dir() / "tokenizer.json", ()))
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in whole["model"]["merges"]]
    tokens = [bytes([byte]) for byte in range(256)] + [bytes(byte_of[one] for one in a + b) for a, b in pairs]
    return list(dict.fromkeys(tokens))


def tekken_json(version: int) -> dict:
    tokens = _tokens()
    told: dict = {
        "config": {
            "pattern": WORDS,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) - 10 + RESERVED,
            "default_num_special_tokens": RESERVED,
            "version": f"v{version}",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
    }
    if version > 3:
        names = SPECIAL + (LATER if version > 7 else ())
        told["special_tokens"] = [{"rank": i, "token_str": one, "is_control": True} for i, one in enumerate(names)]
    if version >= 15:
        effort = {"type": "enum", "values": ["none", "high"], "accepts_none": True, "default": "none"}
        told["model_settings_builder"] = {"reasoning_effort": effort}
    return told


def tekken_folder(folder: Path, config: dict, version: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "consolidated.safetensors").write_bytes(b"")
    (folder / "tekken.json").write_text(json.dumps(tekken_json(version)))
    return folder

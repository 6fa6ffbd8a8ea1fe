"""A model folder in Mistral's own format: `tekken.json` of a version, and weights that are none."""

import base64
import json
from pathlib import Path

from .kimi import tokens_of_bytes

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


def tekken_json(version: int) -> dict:
    tokens = tokens_of_bytes()
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

"""Find a model's tokenizer files and read what the prompt pipeline needs of them."""
from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
          "chat_template.json", "config.json", "params.json", "additional_chat_templates/*.jinja"]
# Architectures whose conversations vLLM writes by a program of its own, whatever template the model has.
_WRITTEN_BY_VLLM = frozenset({
    "GptOssForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration",
    "DeepseekV41ForCausalLM", "KimiK3ForConditionalGeneration", "MoonshotKimiaForCausalLM", "InklingForCausalLM",
    "InklingForConditionalGeneration"})
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelError(Exception):
    """The model's files can't be found or read; the message names the remedy."""


def find_model(name_or_dir: str | Path) -> Path:
    """A directory as given, else a snapshot in the Hugging Face cache, else a download of the small
    tokenizer files (never weights). Raises ModelError."""
    path = Path(name_or_dir).expanduser()
    if path.is_dir():
        return path
    name = str(name_or_dir)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"no directory {name}: give the folder that holds tokenizer.json")
    from huggingface_hub import snapshot_download       # a slow import, needed only here
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a directory nor a model name: {error}") from error
    except LocalEntryNotFoundError:
        pass
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise ModelError(f"{name} is not in the Hugging Face cache and HF_HUB_OFFLINE is set: "
                         "unset it, or give --model a directory with tokenizer.json")
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"can't fetch the tokenizer of {name} ({type(error).__name__}: {error}): set HF_TOKEN if "
                         "the model is gated, or give --model a directory with tokenizer.json") from error


@dataclass(frozen=True)
class ModelFiles:
    """What a model directory says about prompts."""

    directory: Path
    templates: dict[str, str]             # "default", "tool_use", ...
    special_tokens: dict[str, str]        # named tokens a template may print
    max_model_len: int | None             # context length in tokens, from config.json
    no_template: str = ""                 # why the engine does not use the template
    no_tokenizer: str = ""                # why the engine does not use tokenizer.json

    def template(self, has_tools: bool) -> str | None:
        """The template for a request, as transformers chooses it."""
        if has_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        return self.templates.get("default")


def load_model(directory: Path, chat_template: str | Path | None = None) -> ModelFiles:
    """Read a model directory; `chat_template` (a file) replaces the model's own. Raises ModelError."""
    config = _json(directory / "tokenizer_config.json")
    if chat_template is not None:
        try:
            templates = {"default": Path(chat_template).read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"can't read the chat template {chat_template}: {error}") from error
    else:
        templates = _templates(directory, config)
    names = {**_json(directory / "special_tokens_map.json"), **config}
    tokens = {name: text for name in _NAMED_TOKENS if (text := _token_text(names.get(name)))}
    settings = _json(directory / "config.json")
    mistral = _mistral_format(directory)
    if mistral or any(name in _WRITTEN_BY_VLLM for name in settings.get("architectures") or ()):
        return ModelFiles(directory, {}, tokens, _context_length(settings),
                          mistral or "vLLM writes this model's conversations without its chat template", mistral)
    return ModelFiles(directory, templates, tokens, _context_length(settings))


def _mistral_format(directory: Path) -> str:
    """Why vLLM takes mistral-common for this model, or "": the same folder holds the model in Mistral's own format.

    A folder without weights is one that `find_model` fetched; Mistral's format is then known by its params.json.
    """
    def has(*patterns: str) -> bool:
        return any(next(directory.glob(pattern), None) for pattern in patterns)

    if has("consolidated*.safetensors") and has("tekken.json", "tokenizer.model.v*") \
            or has("params.json") and not has("*.safetensors", "*.bin", "*.gguf"):
        return "vLLM makes this model's tokens with mistral-common (--tokenizer-mode hf would make it use tokenizer.json)"
    return ""


def _templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files win over tokenizer_config.json, as in transformers."""
    found: dict[str, str] = {}
    named = config.get("chat_template")
    if isinstance(named, str):
        found["default"] = named
    elif isinstance(named, list):
        found.update({entry["name"]: entry["template"] for entry in named})
    legacy = _json(directory / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    files = {"default": directory / "chat_template.jinja"}
    files.update({path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))})
    for name, path in files.items():
        if path.is_file():
            found[name] = path.read_text(encoding="utf-8")
    return found


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _context_length(config: dict[str, Any]) -> int | None:
    inner = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    value = inner.get("max_position_embeddings")
    return value if isinstance(value, int) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read {path}: {error}") from error
    return value if isinstance(value, dict) else {}

"""Read a model's config.json and the size of its weights, from a folder, the Hugging Face hub or its local cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from policies.kv_space import BadModel, Layers, Shape, read
from replicas.hub import cannot_fetch

_INDEX = "model.safetensors.index.json"
_CONTEXT = 131_072  # tokens; the longest request of a model that is given without its files


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What capacity planning needs to know of a model: the shape of its KV cache and the size of its weights."""

    name: str
    shape: Shape
    weights: int | None  # bytes of all tensors; None where unknown
    parameters: int | None = None  # number of them; None where the size of the files does not show it


def find(name: str) -> Checkpoint:
    """Return the model `name`: a folder, a config.json, or a name on the hub. Raises BadModel."""
    path = Path(name).expanduser()
    if not path.exists():
        path = _fetched(name)
    file = path / "config.json" if path.is_dir() else path
    try:
        config, weights = _json(file), _weights(file.parent)
        return Checkpoint(name, read(config), weights, _parameters(config, weights))
    except BadModel as error:
        raise BadModel(f"--model {name}: {error}") from None


def of_numbers(layers: int, kv_heads: int, head_size: int, context: int | None, parameters: int | None) -> Checkpoint:
    """Return a model that is described by numbers instead of files: equal layers, with a KV cache of 16-bit values.

    `head_size`: values per head; `context`: tokens of the longest request, or None for a default of 131,072;
    `parameters`: number of parameters, or None where unknown.
    """
    notes = () if context else (f"the longest request is taken as {_CONTEXT:,} tokens: --max-model-len says otherwise",)
    shape = Shape((Layers(layers),), kv_heads, head_size, latent=0, index=0, dtype="float16", context=context or _CONTEXT,
                  notes=notes)  # fmt: skip
    return Checkpoint(f"{layers} layers with {kv_heads} KV heads of {head_size}", shape, None, parameters)


def _parameters(config: dict[str, object], weights: int | None) -> int | None:
    """Return the number of parameters, computed from the size of the weights; None where it cannot be computed.

    This is the case if the size is unknown, or if the weights are quantized and so do not all have 16 or 32 bits.
    `config`: content of config.json; `weights`: bytes of all tensors, or None where unknown.
    """
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    if weights is None or config.get("quantization_config") or text.get("quantization_config"):
        return None
    named = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype"))
    return weights // (4 if named.removeprefix("torch.") in ("float32", "float") else 2)


def _json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadModel(f"can't read {path.name}: {error.strerror}") from None
    except ValueError as error:
        raise BadModel(f"{path.name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadModel(f"{path.name} is not a JSON object")
    return found


def _weights(folder: Path) -> int | None:
    """Return the bytes of the weights, or None where they are unknown.

    They are read from the index of the safetensors files or, if there is no index, from the sizes of these files.
    """
    if (folder / _INDEX).is_file():
        about = _json(folder / _INDEX).get("metadata")
        total = about.get("total_size") if isinstance(about, dict) else None
        return int(total) if isinstance(total, int | float) else None  # some indexes have a float, as 16060522496.0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def _fetched(name: str) -> Path:
    """Return the folder with config and weight index from the hub, or from its cache when offline. Raises BadModel."""
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise BadModel(
            f"--model {name}: there is no such folder; give the one with config.json, or a name like Qwen/Qwen3-8B"
        )
    from huggingface_hub import snapshot_download  # a slow import, needed only here
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", _INDEX]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise BadModel(cannot_fetch(f"--model {name}", error, "give the folder with its config.json")) from None

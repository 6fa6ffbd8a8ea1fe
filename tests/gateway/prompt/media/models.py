"""Folders of small models that take images, and requests with images for them."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gateway.prompt.media.families import Family
from gateway.prompt.media.filling import family_of
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.tokens.tokenizer import Tokenizer
from replicas.simulated.model import sim_model_dir

from ....vllm.chat_templates import small_tokenizer

_PART = (
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
)
_CONTENT = (
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}" + _PART + "{% endfor %}{% endif %}"
)
_AROUND = """{% for message in messages %}<|im_start|>{{ message.role }}
CONTENT<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PARTS = _AROUND.replace("CONTENT", _CONTENT)
TEXTS = _AROUND.replace("CONTENT", "{{ message.content }}")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
QWEN2_VL = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}


def write(where: Path, files: Mapping[str, Any], template: str) -> Path:
    """`files`: by name without .json."""
    for name, content in files.items():
        (where / f"{name}.json").write_text(json.dumps(content))
    (where / "chat_template.jinja").write_text(template)
    return where


_KEPT: list[TemporaryDirectory] = []  # until the process ends


def folder(config: dict[str, Any], template: str = PARTS, **files: dict[str, Any]) -> Path:
    """`files`: further ones, by name without .json."""
    _KEPT.append(TemporaryDirectory(prefix="hitherto-media-"))
    made, base = Path(_KEPT[-1].name), sim_model_dir()
    (made / "tokenizer.json").write_text(small_tokenizer(base / "tokenizer.json", SPECIAL))
    return write(
        made, {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"}, "config": config, **files}, template
    )


@cache
def pipeline(template: str = PARTS, model_type: str = "of_nobody") -> Pipeline:
    return Pipeline(folder({**QWEN2_VL, "model_type": model_type}, template), "m", 16)


def family_with(directory: Path, **changes: dict[str, Any]) -> Family | None:
    """The family that is found in a model's folder whose files are changed, by name without .json."""
    files = {}
    for name in ("config", "tokenizer_config", "preprocessor_config", "processor_config"):
        files[name] = {**json.loads((directory / f"{name}.json").read_text()), **changes.get(name, {})}
        (directory / f"{name}.json").write_text(json.dumps(files[name]))
    return family_of(directory, files["config"], files["tokenizer_config"], Tokenizer(directory))


def png(width: int = 64, height: int = 48, shade: int = 0, colour: int = 2) -> bytes:
    """An image of one colour; `colour` is PNG's type, 2 for RGB."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    row = b"\0" + bytes([shade]) * (channels * width)
    return b"".join(
        (b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)),
         chunk(b"IDAT", zlib.compress(row * height)), chunk(b"IEND", b""))
    )  # fmt: skip


def blank(width: int, height: int) -> bytes:
    """A black image of one bit per pixel, of some 1 kB per megapixel. It is written without zlib, whose versions
    compress in different ways, so that its bytes and its name are the same on every machine."""
    size = height * (1 + -(-width // 8))
    matches, rest = divmod(size - 1, 258)
    # Deflate with its fixed codes: a zero, then copies of the last byte, 258 at a time, then single zeros.
    bits = "110" + "00110000" + "1100010100000" * matches + "00110000" * rest + "0000000"
    deflated = int(bits[::-1], 2).to_bytes(-(-len(bits) // 8), "little")
    checksum = struct.pack(">HH", size % 65521, 1)  # Adler-32 of so many zeros
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    data = b"\x78\x01" + deflated + checksum
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def data_url(image: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def assistant(said: str) -> dict[str, Any]:
    return {"role": "assistant", "content": said}


def system(words: int = 100) -> dict[str, Any]:
    return {"role": "system", "content": " ".join(f"rule {i}" for i in range(words))}

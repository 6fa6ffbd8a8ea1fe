"""Families of models that engines read in a way of their own, and what a real vLLM made of request bodies for each.

A family's folder has the files that its models have, with a small vocabulary: no real one can be had here. Its bodies
are the named ones of `tests.vllm.bodies` and random mixtures of them. `families.jsonl` has digests of the ids of
vLLM's own renderers; `python -m tests.vllm.record_families` writes it, `tests/vllm/test_families.py` asks the installed
vLLM again.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from xxhash import xxh3_64_hexdigest

from gateway.errors import ApiError
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.render.programs import deepseek, mistral
from gateway.prompt.tokens.agreement import Differences
from replicas.engines.vllm.versions import version_quirks
from replicas.simulated.model import sim_model_dir

from ...vllm.bodies import CORPUS, Body
from ...vllm.chat_templates import small_tokenizer
from ...vllm.mixed_bodies import random_bodies, random_tools
from .kimi import bytes_to_symbols, kimi_folder
from .recordings import Compared, Recording, read
from .reference import model_dir
from .tekken import tekken_folder

RECORDED = Path(__file__).with_name("families.jsonl")
CONTEXT = 131_072
RANDOM, RANDOM_TOOLS = 250, 150
TODAY = "2026-11-23"  # on the engine's clock
_CONFIG = {"torch_dtype": "bfloat16", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
           "num_attention_heads": 4, "vocab_size": 40_000, "max_position_embeddings": CONTEXT}  # fmt: skip
_DEEPSEEK = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
             "n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
             "index_topk": 16, "index_head_dim": 16, "index_n_heads": 2}  # fmt: skip


def bodies(family: str) -> Mapping[str, tuple[str, Body]]:
    """What is asked of a family, by name. Mistral's own format takes functions with plain names only."""
    return _bodies("tekken" in family)


@cache
def _bodies(plain_names: bool) -> Mapping[str, tuple[str, Body]]:
    if plain_names:
        return MappingProxyType({name: (path, plainly_named(body)) for name, (path, body) in _bodies(False).items()})
    mixed = {f"random {i}": case for i, case in enumerate(random_bodies(7, RANDOM))}
    tools = {f"random tools {i}": case for i, case in enumerate(random_tools(7, RANDOM_TOOLS))}
    return MappingProxyType({**CORPUS, **mixed, **tools})


def plainly_named(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: re.sub(r"[^a-zA-Z0-9_-]", "_", one) if key == "name" and isinstance(one, str) else plainly_named(one)
            for key, one in value.items()
        }
    return [plainly_named(one) for one in value] if isinstance(value, list) else value


def _folder(folder: Path, config: dict, special: tuple[str, ...]) -> Path:
    base = sim_model_dir()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **config}))
    (folder / "tokenizer.json").write_text(small_tokenizer(base / "tokenizer.json", special))
    (folder / "tokenizer_config.json").write_text((base / "tokenizer_config.json").read_text())
    return folder


_DEEPSEEK_TOKENS = (
    *(deepseek.BEGIN, deepseek.END, deepseek.USER, deepseek.ASSISTANT),
    *(deepseek.THINK, deepseek.NO_THINK, deepseek.DSML),
)


def _deepseek(version: str, *special: str) -> Callable[[Path], Path]:
    config = {"architectures": [f"DeepseekV{version}ForCausalLM"], "model_type": f"deepseek_v{version}", **_DEEPSEEK}
    tokens = (*_DEEPSEEK_TOKENS, *(f"<\uff5c{one}\uff5c>" for one in special))
    return lambda folder: _folder(folder, config, tokens)


def _gpt_oss(folder: Path) -> Path:
    """With the real vocabulary: Harmony has it built in."""
    real = model_dir("gptoss")
    folder.mkdir(parents=True)
    config = {**_CONFIG, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201_088}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(real / name)
    return folder


_KIMI_K2 = {**_CONFIG, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", **_DEEPSEEK}
_MISTRAL = {**_CONFIG, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "DeepSeek-V3.2": _deepseek("32"),
    "DeepSeek-V4": _deepseek("4", "latest_reminder", "action", "title"),
    "DeepSeek-V4.1": _deepseek("41", "System", "latest_reminder", "action", "title"),
    "gpt-oss": _gpt_oss,
    "Kimi K2": partial(kimi_folder, config=_KIMI_K2),
    **{
        f"Mistral (tekken v{version})": partial(tekken_folder, config=_MISTRAL, version=version)
        for version in mistral.VERSIONS
    },
}
_SINCE = {"DeepSeek-V4.1": (0, 32)}  # the first vLLM that has the model


def families_of(vllm: tuple[int, ...]) -> list[str]:
    """The families that this release of vLLM has."""
    return [name for name in FAMILIES if vllm >= _SINCE.get(name, ())]


def harmony_vocabulary(folder: Path) -> Path:
    """The vocabulary of gpt-oss in the file that openai-harmony downloads otherwise."""
    alphabet = {symbol: byte for byte, symbol in bytes_to_symbols().items()}
    vocabulary = json.loads((model_dir("gptoss") / "tokenizer.json").read_text())["model"]["vocab"]
    lines = (
        base64.b64encode(bytes(alphabet[symbol] for symbol in token)) + b" %d\n" % id
        for token, id in sorted(vocabulary.items(), key=lambda one: one[1])
    )
    folder.mkdir(parents=True)
    (folder / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    return folder


def digest(ids: Iterable[int]) -> str:
    packed = b"".join(one.to_bytes(4, "little") for one in ids)
    return f"{len(packed) // 4}:{xxh3_64_hexdigest(packed)}"


def compare(family: str, folder: Path, version: str, theirs: dict[str, str | None]) -> Compared:
    """`theirs`: of each body's name the digest of the engine's ids, None where it refuses."""
    pipeline = Pipeline(folder, "tiny", 16, max_model_len=CONTEXT)
    pipeline.clock.now = datetime.fromisoformat(TODAY).timestamp
    pipeline.follow(version_quirks(version))
    pipeline.adopt(pipeline.likeliest(), True, Differences(shown=True))  # as after an engine was compared
    found, asked = Compared(), bodies(family)
    for name, ids in theirs.items():
        if ids is None:
            continue
        path, body = asked[name]
        for turn in range(2):  # the second time its prefixes are known
            try:
                prompt = pipeline.prepare(path, json.dumps(body).encode())
            except ApiError as error:
                found.wrong[name] = f"refused: {error}"
                break
            if prompt.mode != "exact":
                found.declined[name] = prompt.note
                break
            if digest(memoryview(prompt.token_ids).cast("I").tolist()) != ids:
                found.wrong[name] = f"other ids in round {turn}"
                break
        else:
            found.equal.append(name)
    return found


def recordings() -> list[Recording]:
    """All that was recorded. Raises ValueError where bodies have changed since."""
    return read(RECORDED, bodies, "tests.vllm.record_families")

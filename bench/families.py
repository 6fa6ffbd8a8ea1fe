"""The table of truth: for each family of models or caches, how many requests were equal, declined and wrong.

What real engines made of request bodies is recorded (`tests/gateway/prompt/families.jsonl` and `vllm_0_32.jsonl`), so
that this needs no engine; `tests/vllm` asks the installed one again. A request is equal if the gateway has the engine's
own token ids, declined if the gateway says that it does not know them (and routes by load or by text), and wrong
otherwise. Bodies that the engine refuses are not counted.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from xxhash import xxh3_64_hexdigest

from gateway.prompt.pipeline import Pipeline
from replicas.engines.vllm.versions import version_quirks
from tests.gateway.prompt import families as known
from tests.gateway.prompt.media import bodies as images
from tests.gateway.prompt.reference import CACHED, HERE, model_dir

# Real tokenizers and templates of which random bodies were rendered by vLLM 0.32: how the table calls them.
REAL = {"qwen3": "Qwen3", "mistral_nemo": "Mistral Nemo (HF format)"}


class Row(TypedDict):
    family: str
    engine: str
    requests: int
    equal: int
    declined: int
    wrong: int
    why: dict[str, int]  # why requests were declined, and how many


def of_cache(family: str, equal: Sequence[bool]) -> Row:
    """Of requests to simulated engines, whether the predicted cached tokens were the delivered ones."""
    return _row(family, "simulated", len(equal), sum(equal), {})


def not_fetched() -> list[str]:
    """Models whose tokenizer is not on this machine, so that `recorded` has no row of them."""
    return [model for model in (*REAL, "gptoss") if not _is_here(model)]


def recorded() -> list[Row]:
    families = [one for one in known.recordings() if one.family != "gpt-oss" or _is_here("gptoss")]
    real = (_real(model, name) for model, name in REAL.items() if _is_here(model))
    return [*real, *map(_family, families), *map(_images, images.recordings())]


def _row(family: str, engine: str, requests: int, equal: int, why: dict[str, int]) -> Row:
    declined = sum(why.values())
    return {
        "family": family,
        "engine": engine,
        "requests": requests,
        "equal": equal,
        "declined": declined,
        "wrong": requests - equal - declined,
        "why": why,
    }


def _is_here(model: str) -> bool:
    """Whether the tokenizer has been fetched: a benchmark downloads nothing."""
    return (CACHED / model / "package" / "models" / "tokenizer.json").is_file()


def _real(model: str, family: str) -> Row:
    pipeline = Pipeline(model_dir(model), "m", 16, max_model_len=known.CONTEXT)
    pipeline.follow(version_quirks("0.32.0"))
    cases = [json.loads(line) for line in (HERE / "vllm_0_32.jsonl").read_text().splitlines()]
    cases = [case for case in cases if case["model"] == model]
    equal, why = 0, Counter[str]()
    for case in cases:
        prompt = pipeline.prepare(case["path"], json.dumps(case["body"]).encode())
        if prompt.mode != "exact":
            why[prompt.note] += 1
        else:
            equal += xxh3_64_hexdigest(prompt.token_ids) == case["ids"]
    return _row(family, "vLLM 0.32.0", len(cases), equal, dict(why))


def _family(one: known.Recording) -> Row:
    with tempfile.TemporaryDirectory() as store:
        folder = known.FAMILIES[one.family](Path(store) / "model")
        found = known.compare(one.family, folder, one.version, one.answers)
    return _row(one.family, f"vLLM {one.version}", found.requests, len(found.equal), found.reasons)


def _images(one: images.Recording) -> Row:
    """Of requests with images the names of blocks, in place of the ids."""
    with tempfile.TemporaryDirectory() as store:
        folder = images.FAMILIES[one.family].folder(Path(store) / "model")
        found = images.compare(one.family, folder, one.version, one.answers)
    return _row(one.family, f"vLLM {one.version}", found.requests, len(found.equal), found.reasons)


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'family':44} {'engine':13} {'requests':>8} {'equal':>6} {'declined':>8} {'wrong':>5}"]
    for row in rows:
        lines.append(f"{row['family']:44} {row['engine']:13} {row['requests']:8} {row['equal']:6} "
                     f"{row['declined']:8} {row['wrong']:5}")  # fmt: skip
        lines += [f"    {count} declined: {why}" for why, count in row["why"].items()]
    return "\n".join(lines)

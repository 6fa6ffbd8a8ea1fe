"""What a real vLLM made of 300 request bodies, recorded, is what the pipeline makes of them.

`vllm_0_32.jsonl` was written by vLLM 0.32.0 (transformers 5.19) through its /render endpoints:
random bodies of four endpoints with tools, tool calls, reasoning, parts, template variables,
truncation, continued messages. `ids` is the xxh3 of the longest prompt's ids as uint32. Its "sim" had all merges of its
tokenizer, of which the demo model has a part by now.
"""

import json
import shutil

import pytest
from xxhash import xxh3_64_hexdigest

from gateway.prompt.pipeline import Pipeline
from replicas.engines.vllm.versions import version_quirks
from replicas.simulated.model import tokenizer_file

from .reference import HERE, model_dir

CASES = [json.loads(line) for line in (HERE / "vllm_0_32.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", sorted({case["model"] for case in CASES}))
def test_same_ids_as_vllm(name, tmp_path):
    template = HERE / "parts.jinja" if name == "parts" else None
    folder = model_dir("qwen3" if name == "parts" else name)
    if name == "sim":
        folder = shutil.copytree(folder, tmp_path / name)
        shutil.copyfile(tokenizer_file(), folder / "tokenizer.json")
    pipeline = Pipeline(folder, "m", 16, chat_template=template, max_model_len=131072)
    pipeline.follow(version_quirks("0.32.0"))
    cases = [case for case in CASES if case["model"] == name]
    assert len(cases) >= 60
    for case in cases:
        for time in range(7):  # by Jinja, compiled the fifth time, then by plan
            prompt = pipeline.prepare(case["path"], json.dumps(case["body"]).encode())
            assert prompt.mode == "exact", (time, prompt.note, case["body"])
            assert prompt.tokens == case["tokens"], (time, case["body"])
            assert xxh3_64_hexdigest(prompt.token_ids) == case["ids"], (time, case["body"])
    assert pipeline.renderers["default"].by_plan > len(cases) / 2

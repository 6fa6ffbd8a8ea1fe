"""DeepSeek-V4.1's chats as the encoder in vLLM 0.32's sources writes them (`tests/vllm/record_encoder.py`)."""

import copy
import json
from pathlib import Path

import pytest
from xxhash import xxh3_64_hexdigest

from gateway.prompt.api.conversation import tool_schemas
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.quirks import NEWEST
from gateway.prompt.render.programs.deepseek_v41 import write
from replicas.engines.vllm.versions import version_quirks

from ...vllm.bodies import CORPUS
from ...vllm.mixed_bodies import random_bodies, random_tools
from .families import deepseek_v41

RECORDED = Path(__file__).with_name("deepseek_v41.json")
HI = b'{"messages": [{"role": "user", "content": "hi"}]}'


def asked() -> dict[str, tuple[list, list | None, dict]]:
    """Messages, tools and variables of all chats, by name."""
    bodies = {**CORPUS, **{f"random {i}": one for i, one in enumerate(random_bodies(7, 600))},
              **{f"random tools {i}": one for i, one in enumerate(random_tools(7, 150))}}  # fmt: skip
    found = {}
    for name, (path, body) in bodies.items():
        if path == "/v1/chat/completions":
            variables = dict(body.get("chat_template_kwargs") or {})
            if body.get("reasoning_effort") is not None:
                variables["reasoning_effort"] = body["reasoning_effort"]
            found[name] = (body["messages"], tool_schemas(body.get("tools")), variables)
    return found


def test_chats_are_the_encoders_or_declined():
    recorded, chats = json.loads(RECORDED.read_text()), asked()
    assert recorded.keys() == chats.keys(), "run python -m tests.vllm.record_encoder"
    equal, declined = 0, []
    for name, (messages, tools, variables) in chats.items():
        if recorded[name] is None:
            continue
        try:
            text = write(copy.deepcopy(messages), tools, variables, NEWEST)
        except Exception as error:
            declined.append(str(error))
            continue
        assert xxh3_64_hexdigest(text.encode()) == recorded[name], name
        equal += 1
    assert equal > 500 and len(declined) < 5, declined


@pytest.mark.parametrize("version, mode", [("0.28.0", "load"), ("0.31.0", "load"), ("0.32.0", "exact")])
def test_a_version_that_may_not_know_it_is_not_guessed(version, mode, tmp_path):
    pipeline = Pipeline(deepseek_v41(tmp_path / "model"), "m", 16)
    pipeline.follow(version_quirks(version))
    assert pipeline.shows_chats
    assert pipeline.prepare("/v1/chat/completions", HI).mode == mode

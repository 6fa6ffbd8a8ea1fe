"""Record what the encoder in vLLM's sources makes of chats for DeepSeek-V4.1, without starting vLLM.

    HITHERTO_VLLM=FOLDER python -m tests.vllm.record_encoder

writes digests of its texts into `tests/gateway/prompt/deepseek_v41.json`. Around the encoder vLLM prepares messages and
variables; that is done here by its rules.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from typing import Any

from xxhash import xxh3_64_hexdigest

from ..gateway.prompt.test_deepseek_v41 import RECORDED, asked
from .engines import folder

_PARTS = ("text", "input_text", "output_text")


def normalized(messages: list[dict]) -> list[dict]:
    made = [dict(one) for one in copy.deepcopy(messages)]
    for message in made:
        if message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
            raise ValueError(message.get("role"))
        if "reasoning" in message:
            message["reasoning_content"] = message["reasoning"]
        for call in message.get("tool_calls") or ():
            given = call["function"].get("arguments")
            try:
                given = json.loads(given) if isinstance(given, str) and given else given
            except ValueError:
                given = {}
            call["function"]["arguments"] = given if isinstance(given, dict) else {}
        if isinstance(message.get("content"), list):
            if any(part.get("type") not in _PARTS for part in message["content"]):
                raise ValueError("a part that is no text")
            message["content"] = "\n\n".join(part.get("text", "") for part in message["content"])
    return made


def encoded(encoder: Any, messages: list[dict], tools: list[dict] | None, variables: dict) -> str:
    talk = normalized(messages)
    if tools:
        system = next((one for one in talk if one["role"] == "system"), None)
        if system is None:
            system = {"role": "system", "content": ""}
            talk.insert(0, system)
        system["tools"] = tools
    thinks = bool(variables.get("thinking") or variables.get("enable_thinking"))
    thinks = thinks or ("thinking" not in variables and "enable_thinking" not in variables)
    effort = variables.get("reasoning_effort")
    if effort == "none":
        thinks, effort = False, None
    return encoder.encode_messages(
        talk,
        "thinking" if thinks else "chat",
        drop_thinking=variables.get("drop_thinking", True),
        reasoning_effort="high" if effort is None else effort,
    )


def main() -> None:
    (path,) = folder().glob("lib/python3*/site-packages/vllm/tokenizers/deepseek_v41_encoding.py")
    spec = importlib.util.spec_from_file_location("encoder", path)
    encoder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(encoder)
    found = {}
    for name, (messages, tools, variables) in asked().items():
        try:
            found[name] = xxh3_64_hexdigest(encoded(encoder, messages, tools, variables).encode())
        except (AssertionError, KeyError, NotImplementedError, TypeError, ValueError):  # it refuses such a chat
            found[name] = None
    RECORDED.write_text(json.dumps(found, indent=0) + "\n")
    print(f"{sum(one is not None for one in found.values())} of {len(found)} chats taken")


if __name__ == "__main__":
    main()

"""What DeepSeek's conversations have in common from V3.2 on: special tokens, tool calls in DSML, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

BEGIN, END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER, ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
THINK, NO_THINK = "<think>", "</think>"
DSML = "\uff5cDSML\uff5c"


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def schemas(tools: Iterable[Mapping[str, Any]]) -> str:
    """One line of JSON for each tool's function."""
    return "\n".join(as_json(tool["function"]) for tool in tools)


def calls(given: Iterable[Mapping[str, Any]], block: str) -> str:
    """An assistant's tool calls, in a block of that name."""
    written = "\n".join(_call(one["function"]) for one in given)
    return f"\n\n<{DSML}{block}>\n{written}\n</{DSML}{block}>"


def _call(function: Mapping[str, Any]) -> str:
    parameters = "\n".join(_parameter(name, value) for name, value in function["arguments"].items())
    return f'<{DSML}invoke name="{function["name"]}">\n{parameters}\n</{DSML}invoke>'


def _parameter(name: str, value: Any) -> str:
    is_text = isinstance(value, str)
    told = "true" if is_text else "false"
    return f'<{DSML}parameter name="{name}" string="{told}">{value if is_text else as_json(value)}</{DSML}parameter>'


def last_said_by_user(talk: list[dict[str, Any]]) -> int:
    """The index of the last message of a user or developer, -1 where there is none."""
    return next((i for i in reversed(range(len(talk))) if talk[i]["role"] in ("user", "developer")), -1)

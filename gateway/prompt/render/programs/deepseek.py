"""Parts of the DeepSeek conversation formats that V3.2 and later share: special tokens, tool calls in DSML, JSON."""

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
    """Return the functions of these tools as JSON, one in each line."""
    return "\n".join(as_json(tool["function"]) for tool in tools)


def calls(given: Iterable[Mapping[str, Any]], block: str, gap: str = "") -> str:
    """Return the text of an assistant's tool calls, between an opening and a closing tag of the name `block`.

    `gap`: the text between the mark DSML, which begins each tag, and the tag's name.
    """
    mark = DSML + gap
    written = "\n".join(_call(one["function"], mark) for one in given)
    return f"\n\n<{mark}{block}>\n{written}\n</{mark}{block}>"


def _call(function: Mapping[str, Any], mark: str) -> str:
    parameters = "\n".join(_parameter(name, value, mark) for name, value in function["arguments"].items())
    return f'<{mark}invoke name="{function["name"]}">\n{parameters}\n</{mark}invoke>'


def _parameter(name: str, value: Any, mark: str) -> str:
    is_text = isinstance(value, str)
    told = "true" if is_text else "false"
    return f'<{mark}parameter name="{name}" string="{told}">{value if is_text else as_json(value)}</{mark}parameter>'


def last_said_by_user(talk: list[dict[str, Any]]) -> int:
    """Return the index of the last message with the role user or developer, or -1 if there is none."""
    return next((i for i in reversed(range(len(talk))) if talk[i]["role"] in ("user", "developer")), -1)

"""Harmony, the conversation format of gpt-oss, as vLLM 0.28 and 0.32 write it.

Harmony tokenizes the parts of a message one by one, and never finds a special token in a text. So a text that spells a
special token is cut after its `<|`, where a token of the vocabulary ends in any case, and the pieces are tokenized
separately. Refused is raised for tools whose schemas need other rules than those implemented here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...api.conversation import reasoning_of
from ...quirks import VersionQuirks
from ..program import BOUNDARY, Message, Program, Refused

_SPECIAL = re.compile(r"<\|[a-z][a-z0-9_]*\|>")
_IDENTITY = """You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: {date}

Reasoning: {effort}

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
_CALLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
_EFFORTS = ("low", "medium", "high")
_LARGEST = 2**63
_NUMBERS = ("number", "integer")


class _Said(NamedTuple):
    """One message in Harmony's form.

    `author`: its role or the name of a tool; `to`: the recipient that its header names, or "".
    """

    author: str
    text: str
    channel: str = ""
    to: str = ""


def write(talk: list[Message], tools: list[Message] | None, variables: Mapping[str, Any], quirks: VersionQuirks) -> str:
    """Return the text that engines make of a conversation with gpt-oss. Raises Refused.

    `talk`: the messages as received; `tools`: the tools as a template gets them; `variables`: the reasoning effort and
    the function `strftime_now`; `quirks`: how the engine's version differs from the newest one.
    """
    # A system or developer message at the front holds the instructions.
    is_told = talk[0].get("role") in ("system", "developer")
    instructions, rest = (_flat(talk[0].get("content")), talk[1:]) if is_told else (None, talk)
    today = variables["strftime_now"]("%Y-%m-%d")
    said = [*_preamble(instructions, tools, variables.get("reasoning_effort"), today), *_messages(rest)]
    final = max((i for i, one in enumerate(said) if (one.author, one.channel) == ("assistant", "final")), default=-1)
    kept = (one for i, one in enumerate(said) if i > final or one.channel != "analysis")
    newer = quirks.harmony_recipient_last
    return "".join(_written(one, newer) for one in kept) + "<|start|>assistant"


def _written(one: _Said, newer: bool | None) -> str:
    """Return the text of one message in Harmony, the conversation format of gpt-oss. Raises Refused.

    `newer`: whether the header of a tool result names the recipient after the channel (True) or before it (False). If
    it is None, the order is not known, and Refused is raised for tool results.
    """
    author, channel, end = one.author, one.channel, "<|end|>"
    if _SPECIAL.search(author + one.to):
        raise Refused("a name that spells a special token")
    text = _SPECIAL.sub(lambda found: f"<|{BOUNDARY}{found[0][2:]}", one.text)
    if one.to and author == "assistant":
        author, channel, end = f"assistant to={one.to}", f"{channel} json", "<|call|>"
    elif one.to:
        if newer is None:
            raise Refused("this release may write the results of tools in another way")
        author, channel = (author, f"{channel} to={one.to}") if newer else (f"{author} to={one.to}", channel)
    header = f"{author}<|channel|>{channel}" if channel else author
    return f"<|start|>{header}<|message|>{text}{end}"


def _preamble(instructions: str | None, tools: list[Message] | None, effort: Any, today: str) -> Iterator[_Said]:
    if effort is not None and effort not in _EFFORTS:
        raise Refused(f"there is no effort {effort}")
    identity = _IDENTITY.format(date=today, effort=effort or "medium")
    yield _Said("system", identity + _CALLS if tools else identity)
    if instructions or tools:
        told = [f"# Instructions\n\n{instructions}"] if instructions is not None else []
        yield _Said("developer", "\n\n".join((*told, *([_tools(tools)] if tools else []))))


# --- the conversation of a chat request


def _messages(talk: list[Message]) -> Iterator[_Said]:
    names = {call.get("id"): _function(call).get("name") for one in talk for call in one.get("tool_calls") or ()}
    for message in talk:
        role, content = message.get("role"), message.get("content")
        if role in ("system", "developer"):
            text = _flat(content)
            if text is not None:
                yield _Said("developer", f"# Instructions\n\n{text}")
        elif role == "tool":
            name = names.get(message.get("tool_call_id", ""), "")
            yield _Said(f"functions.{name}", _flat(content) or "", "commentary", "assistant")
        elif role == "assistant":
            yield from _answer(message)
        elif role == "user":
            yield _Said("user", _joined(_texts(content)))
        else:
            raise Refused(f"there is no role {role}")


def _answer(message: Message) -> Iterator[_Said]:
    content, calls = message.get("content"), message.get("tool_calls")
    reasoning, texts = reasoning_of(message), _texts(content)
    if calls and any(texts):
        yield _Said("assistant", "".join(texts), "commentary")
    if reasoning:
        yield _Said("assistant", _text(reasoning), "analysis")
    if not calls and texts[0]:
        yield _Said("assistant", _joined(texts), "final")
    for call in calls or ():
        function = _function(call)
        name, arguments = _text(function.get("name", "")), _text(function.get("arguments") or "")
        yield _Said("assistant", arguments, "commentary", f"functions.{name}")


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise Refused("a tool call without a function")
    return function


def _texts(content: Any) -> list[str]:
    if isinstance(content, list) and content:
        if not all(isinstance(part, dict) and part.get("type", "text") == "text" for part in content):
            raise Refused("a part that is no text")
        return [_text(part.get("text", "")) for part in content]
    return [_text(content or "")]


def _joined(texts: Sequence[str]) -> str:
    """Return texts joined by a character that makes the tokenizer encode them separately."""
    return BOUNDARY.join(filter(None, texts))


def _flat(content: Any) -> str | None:
    """Return a message's content as one text, or None if there is none. Raises Refused for parts that are not text."""
    return "".join(_texts(content)) if content is not None and content != [] else None


def _text(value: Any) -> str:
    if not isinstance(value, str) or BOUNDARY in value:
        raise Refused("a text that is none, or has Unicode non-characters")
    return value


# --- tools, as types of TypeScript


_OTHER_FORM = "a tool's schema of another form"


def _tools(tools: list[Message]) -> str:
    written = "".join(_tool(tool["function"]) for tool in tools)
    return f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{written}}} // namespace functions"


def _tool(function: Mapping[str, Any]) -> str:
    described = function.get("description") or ""
    lines = described.removesuffix("\n").split("\n") if described else []
    comment = "".join(["// " + line.removesuffix("\r") + "\n" for line in lines])
    parameters = function.get("parameters")
    taken = "" if parameters is None else f"_: {_type(parameters, '')}"
    return f"{comment}type {_text(function['name'])} = ({taken}) => any;\n\n"


def _type(schema: Any, indent: str) -> str:
    if not isinstance(schema, dict) or "oneOf" in schema:
        raise Refused(_OTHER_FORM)
    kind = schema.get("type")
    if isinstance(kind, list):
        if not kind or not all(isinstance(one, str) for one in kind):
            raise Refused(_OTHER_FORM)
        return " | ".join("number" if one in _NUMBERS else one for one in kind)
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if kind == "string":
        choices = schema.get("enum", [])
        if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
            raise Refused(_OTHER_FORM)
        return " | ".join(f'"{one}"' for one in choices) or "string"
    return "number" if kind in _NUMBERS else "boolean" if kind == "boolean" else "any"


def _object(schema: Mapping[str, Any], indent: str) -> str:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise Refused(_OTHER_FORM)
    lines = [_property(name, one, name in required, indent) for name, one in properties.items()]
    told = schema.get("description")  # a property's description is also printed before the property
    return (f"{indent}// {told}\n{{\n" if isinstance(told, str) else "{\n") + "".join(lines) + indent + "}"


def _property(name: str, schema: Any, required: bool, indent: str) -> str:
    kind = _type(schema, indent + "    ")
    if schema.get("nullable") is True and "null" not in kind:
        kind += " | null"
    default = f" // default: {_default(schema)}" if "default" in schema else ""
    title, told, examples = schema.get("title"), schema.get("description"), schema.get("examples")
    comments = [f" {title}", ""] if isinstance(title, str) else []
    comments += [f" {told}"] if isinstance(told, str) else []
    if isinstance(examples, list) and examples:
        comments += [" Examples:", *(f' - "{one}"' for one in examples if isinstance(one, str))]
    commented = "".join(f"{indent}//{line}\n" for line in comments)
    return f"{commented}{indent}{name}{'' if required else '?'}: {kind},{default}\n"


def _default(schema: Mapping[str, Any]) -> str:
    value = schema["default"]
    if isinstance(value, str):
        return value if schema.get("enum") else f'"{value}"'
    _must_be_plain(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _must_be_plain(value: Any) -> None:
    """Raise Refused if a JSON value holds a number that Harmony may write differently from Python."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _must_be_plain(one)
    elif (isinstance(value, float) and "." not in repr(value)) or (isinstance(value, int) and abs(value) >= _LARGEST):
        raise Refused("a number that may be written in another way")


PROGRAM = Program(
    "gpt-oss",
    "<|start|><|end|><|message|><|channel|><|call|>",
    takes_parts=lambda quirks: False,
    write=write,
    as_received=True,
    prints_date=True,
)

"""Mistral's own conversation format, as mistral-common 1.13 writes it for a `tekken.json` of version 3 to 15.

mistral-common tokenizes texts one by one and puts special tokens between them, and never finds a special token in a
text. So the tokenizer that the gateway makes from `tekken.json` gives special tokens names that no text contains
(`spelled`). Consecutive messages of one role become one message, and each version has its own rules for the places of
tools, tool results and system messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ...api.conversation import call_arguments, reasoning_of
from ...quirks import VersionQuirks
from ..program import BOUNDARY, UNSPOKEN, Message, Program, Refused

VERSIONS = (3, 7, 11, 13, 15)
_ID_LENGTH = 9  # vLLM keeps only the last characters of a tool call's id
_NO_ID = "null"


def spelled(token: str) -> str:
    """Return the name that a special token has in the tokenizer that the gateway makes from `tekken.json`."""
    return UNSPOKEN + token


@dataclass(frozen=True)
class Thought:
    """A part of a message that is reasoning; `closed`: the token that ends the reasoning follows."""

    text: str
    closed: bool = True


@dataclass(frozen=True)
class Turn:
    """One message of a conversation, or several consecutive messages of one role that were merged.

    `calls`: the tool calls of an assistant; `call_id`: the id of the call that a tool result answers; `unfinished`: the
    message is to be continued, so no end token follows.
    """

    role: str
    content: str | tuple[str | Thought, ...]
    calls: tuple[Mapping[str, Any], ...] = ()
    call_id: str | None = None
    unfinished: bool = False


@dataclass(frozen=True)
class Rules:
    """The rules of one version of Mistral's conversation format.

    `efforts`: the reasoning efforts that a model of version 15 lets a request choose from, the default first; (): none.
    """

    version: int
    efforts: tuple[str, ...] = ()

    def write(
        self, talk: list[Message], tools: list[Message] | None, variables: Mapping[str, Any], quirks: VersionQuirks
    ) -> str:
        """Return the text that engines make of a conversation with this version of the format. Raises Refused.

        `talk`: the messages as received; `tools`: the tools as a template gets them; `variables`: the template
        variables; `quirks`: how the engine's version differs from the newest one.
        """
        turns = [_turn(message, quirks) for message in talk]
        if variables.get("continue_final_message"):
            turns[-1] = replace(turns[-1], unfinished=True)
        system = ""
        if self.version < 7:
            system = "\n\n".join(self._whole(one) for one in turns if one.role == "system" and one.content)
        merged = list(self._merged(turns))
        if self.version < 7 and (not merged or merged[0].role != "user"):
            merged.insert(0, Turn("user", ""))
        users = [i for i, one in enumerate(merged) if one.role == "user"]
        at = (users[-1] if self.version < 13 else users[0]) if users else -1
        head = self._tools(tools) + self._settings(variables.get("reasoning_effort"))
        text = spelled("<s>")
        for i, one in enumerate(merged):
            text += (head if i == at else "") + self._written(one, system if users and i == users[-1] else "")
        return text

    # --- sequences of messages

    def _merged(self, turns: Sequence[Turn]) -> Iterator[Turn]:
        asked: list[str] = []  # the ids of the tool calls whose results have not come yet
        for role, group in groupby(turns, key=lambda one: one.role):
            run = list(group)
            if role == "tool":
                yield from self._results(run, asked)
                asked.clear()
            elif role == "system":
                if self.version >= 7:
                    yield from (replace(one, content=self._joined([one])) for one in run)
            else:
                calls = tuple(call for one in run for call in one.calls)
                asked += [call["id"] for call in calls]
                yield Turn(role, self._joined(run), calls, unfinished=any(one.unfinished for one in run))

    def _results(self, run: list[Turn], asked: Sequence[str]) -> list[Turn]:
        told = [replace(one, content=self._whole(one)) for one in run]
        if self.version < 11:
            return told
        order = {id: i for i, id in enumerate(asked)}
        given = {one.call_id: i for i, one in enumerate(told)}
        return sorted(told, key=lambda one: (order.get(one.call_id or _NO_ID, len(order)), given[one.call_id]))

    def _joined(self, run: Iterable[Turn]) -> str | tuple[str | Thought, ...]:
        """Return the contents of several messages merged into one; adjacent texts become one text."""
        parts: list[str | Thought] = []
        text: list[str] = []
        for one in run:
            between = "\n\n"
            for part in (one.content,) if isinstance(one.content, str) else one.content:
                if isinstance(part, Thought):
                    parts += ["".join(text)] if text else []
                    parts.append(part)
                    text.clear()
                elif part:
                    text += [between, part] if text else [part]
                    between = "" if self.version >= 15 else "\n\n"
        if not parts:
            return "".join(text)
        return (*parts, "".join(text)) if text else tuple(parts)

    def _whole(self, one: Turn) -> str:
        text = self._joined([one])
        if not isinstance(text, str):
            raise Refused("reasoning where a text belongs")
        return text

    # --- one message

    def _written(self, one: Turn, system: str) -> str:
        content = one.content
        if one.role == "user":
            if not isinstance(content, str):
                raise Refused("reasoning in a user's message")
            return spelled("[INST]") + (f"{system}\n\n{content}" if system else content) + spelled("[/INST]")
        if one.role == "system":
            return spelled("[SYSTEM_PROMPT]") + self._content(content) + spelled("[/SYSTEM_PROMPT]")
        if one.role == "tool":
            return spelled("[TOOL_RESULTS]") + self._result(str(content), one.call_id) + spelled("[/TOOL_RESULTS]")
        if not content and not one.calls:
            raise Refused("an assistant's message that says nothing")
        if self.version < 7 and content and one.calls:
            raise Refused("an assistant's message with text and tool calls")
        said = content.rstrip(" ") if isinstance(content, str) else self._content(content)
        return said + self._calls(one.calls) + ("" if one.unfinished else spelled("</s>"))

    def _content(self, content: str | tuple[str | Thought, ...]) -> str:
        if isinstance(content, str):
            return content
        if self.version < 13:
            raise Refused("reasoning, of which this version has no token")
        return "".join(
            part
            if isinstance(part, str)
            else spelled("[THINK]") + part.text + (spelled("[/THINK]") if part.closed else BOUNDARY)
            for part in content
        )

    def _result(self, content: str, id: str | None) -> str:
        if self.version >= 13:
            return content
        if self.version >= 7:
            return f"{id}{spelled('[TOOL_CONTENT]')}{content}"
        try:
            told = json.loads(content or "{}")
        except json.JSONDecodeError:
            told = content
        return _dumped({"content": told, "call_id": id})

    def _calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        if calls and self.version < 11:
            if any(call["id"] in ("", _NO_ID) for call in calls):
                raise Refused("a tool call without an id")
            return spelled("[TOOL_CALLS]") + _dumped(calls)
        return "".join(
            spelled("[TOOL_CALLS]")
            + call["name"]
            + (spelled("[CALL_ID]") + call["id"] if self.version == 11 else "")
            + spelled("[ARGS]")
            + _dumped(call["arguments"])
            for call in calls
        )

    def _tools(self, tools: list[Message] | None) -> str:
        if not tools:
            return ""
        functions = [
            {
                "name": one["name"],
                "description": one.get("description") or "",
                "parameters": one.get("parameters") or {},
            }
            for one in (tool["function"] for tool in tools)
        ]
        told = _dumped([{"type": "function", "function": function} for function in functions])
        return spelled("[AVAILABLE_TOOLS]") + _text(told) + spelled("[/AVAILABLE_TOOLS]")

    def _settings(self, effort: Any) -> str:
        if not self.efforts:
            return ""
        if effort is not None and effort not in self.efforts:
            raise Refused(f"there is no effort {effort}")
        told = _dumped({"reasoning_effort": effort or self.efforts[0]})
        return spelled("[MODEL_SETTINGS]") + told + spelled("[/MODEL_SETTINGS]")


def program(version: int, efforts: tuple[str, ...] = ()) -> Program:
    """Return the rules that write conversations for a model whose `tekken.json` has this version.

    `efforts`: the reasoning efforts that a request may choose from, the default first; (): none.
    """
    rules = Rules(version, efforts)
    named = ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
             "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]",
             "[CALL_ID]", "[THINK]", "[/THINK]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"]  # fmt: skip
    return Program(
        f"Mistral (tekken v{version})",
        "".join(map(spelled, named)),
        takes_parts=lambda quirks: False,
        write=rules.write,
        raw_messages=True,
        makes_tokens=True,
        to_be_shown=True,
    )


# --- a request's messages


def _turn(message: Message, quirks: VersionQuirks) -> Turn:
    role, content = message.get("role"), _parts(message.get("content"))
    if role not in ("system", "developer", "user", "tool", "assistant"):
        raise Refused(f"there is no role {role}")
    if role != "assistant":
        if content is None:
            raise Refused("a message without content")
        call_id = _text(message["tool_call_id"])[-_ID_LENGTH:] if role == "tool" else None
        return Turn("system" if role == "developer" else role, content, call_id=call_id)
    reasoning, content = reasoning_of(message), content or ""
    if reasoning is not None:
        said = (content,) if isinstance(content, str) else content
        if any(isinstance(part, Thought) for part in said):
            raise Refused("reasoning in two places")
        content = (Thought(_text(reasoning)), *said)
    return Turn("assistant", content, tuple(_call(call, quirks) for call in message.get("tool_calls") or ()))


def _parts(content: Any) -> str | tuple[str | Thought, ...] | None:
    if content is None or isinstance(content, str):
        return None if content is None else _text(content)
    parts: list[str | Thought] = []
    for part in content:
        kind, closed = part.get("type"), part.get("closed", True)
        if kind == "text":
            parts.append(_text(part["text"]))
        elif kind == "thinking":
            if not isinstance(closed, bool):
                raise Refused("a part that is neither closed nor open")
            parts.append(Thought(_text(part["thinking"]), closed))
        elif kind:
            raise Refused("a part that is no text")
    return tuple(parts)


def _call(call: Mapping[str, Any], quirks: VersionQuirks) -> dict[str, Any]:
    function = call["function"]
    arguments = call_arguments(function.get("arguments"), quirks)
    if not isinstance(arguments, dict):
        raise Refused("a tool call's arguments that are no object")
    _text(_dumped(arguments))
    return {"name": _text(function["name"]), "arguments": arguments, "id": _text(call["id"])[-_ID_LENGTH:]}


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    if not isinstance(value, str) or BOUNDARY in value or UNSPOKEN in value:
        raise Refused("a text that is none, or has Unicode non-characters")
    return value

"""Conversion of Anthropic's `/v1/messages` bodies to chat requests, content block by content block, as vLLM does it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2.ext

from ...errors import bad
from ..render.bounds import Bounds
from ..render.program import ProgramTemplate
from ..render.template import ChatTemplate, TemplateError
from .conversation import Multimodal, Unknown, Unroutable, is_plain, require_exact, tool_schemas
from .openai import Chat, template_variables

# By rendering test conversations, vLLM finds out which reasoning effort "thinking disabled" stands for, and whether the
# template allows system messages inside a conversation.
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_CHANGES = ("tool_addition", "tool_removal")  # block types in system messages that change the tools
_HELLO = [{"role": "user", "content": "Hi"}]
_INLINE_SYSTEM = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


@dataclass(frozen=True, slots=True)
class Habits:
    """The two choices in vLLM's conversion of `/v1/messages` requests that depend on the model's chat template."""

    system_first: bool  # system messages inside the conversation are moved to the front
    disabled_effort: str | None  # the reasoning_effort for thinking "disabled"; None: vLLM does not read `thinking`


def habits(
    template: ChatTemplate | ProgramTemplate | None, others: Sequence[str] = (), replaces_own: bool = False
) -> Habits:
    """Return how vLLM converts the `/v1/messages` requests of a model with these chat templates.

    vLLM decides this when it starts, by rendering test conversations with the templates.

    `template`: the template for requests without tools, or None if there is none. Without one, system messages come
    first.
    `others`: the sources of the model's other templates. Only these are tested if `template` is a ProgramTemplate,
        which means that the engine writes conversations by rules in its own code.
    `replaces_own`: the template was given with --chat-template. Releases before 0.31 test only such a template.
    """
    if template is None or (not template.quirks.asks_template and not replaces_own):
        return Habits(True, None)
    sources = others if isinstance(template, ProgramTemplate) else (template.source, *others)
    system_first = not sources or any(map(_wants_system_first, sources))
    if not template.quirks.asks_template:
        return Habits(system_first, None)

    def says(effort: str) -> str | None:
        try:
            return template.render(_HELLO, None, template_variables({}, True, False, effort))
        except TemplateError:
            return None

    none = says("none")
    ignored = none is None or any(says(effort) == none for effort in _EFFORTS)
    return Habits(system_first, "low" if ignored else "none")


def _wants_system_first(source: str) -> bool:
    """Return whether vLLM concludes that a template refuses system messages inside a conversation.

    vLLM renders such a conversation in a bare sandbox: without special tokens, `raise_exception`, `strftime_now` and
    the `generation` tag, and with `tools` undefined. A template that merely needs one of these fails there too, and is
    treated like one that refuses the system message.
    """
    env = Bounds(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    try:
        env.from_string(source).render({"messages": _INLINE_SYSTEM, "add_generation_prompt": False})
    except Exception:  # vLLM catches Jinja's errors only; after any other error it does not start
        return True
    return False


def from_messages(request: dict[str, Any], habits: Habits, rules_are_known: bool = True) -> Chat:
    """Return the conversation that vLLM makes of a `/v1/messages` body. Raises ApiError or Unroutable.

    `habits`: the choices that depend on the model's chat template. `rules_are_known`: if False, the engine may show the
    model more of a tool result than its texts and images, and the conversation is known only up to the first result
    that has other parts.
    """
    given = request.get("messages")
    if not isinstance(given, list) or not given:
        raise bad("'messages' must be a non-empty list", "messages")
    messages: list[dict[str, Any]] = []
    unknown: Unknown | None = None
    rest: list[Any] = []
    changes: list[dict[str, Any]] = []
    system = _texts(request.get("system") or [], "system", keep_header=isinstance(request.get("system"), str))
    for i, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad(f"messages[{i}] must be an object with a role", f"messages[{i}]")
        if message["role"] == "system":
            content = message.get("content")
            text = "".join(_texts(content, f"messages[{i}]"))
            changes += [block for block in content if block.get("type") in _CHANGES] if type(content) is list else []
            if text and habits.system_first:
                system.append(text)
            elif text and unknown is None:
                messages.append({"role": "system", "content": text})
        elif unknown is None:
            before = len(messages)
            try:
                _add(messages, message, f"messages[{i}]", rules_are_known)
            except Unknown as error:
                del messages[before:]
                unknown, rest = error.with_traceback(None), given[i:]
    if not messages and not system and unknown is None:
        raise Unroutable("there is nothing that the model is shown")
    if system:
        messages.insert(0, {"role": "system", "content": "".join(system)})
    return Chat(messages, _tools(request, changes), _template_variables(request, habits), unknown=unknown, rest=rest)


def _texts(content: Any, where: str, keep_header: bool = False) -> list[str]:
    """Return the non-empty texts of a system prompt, which is a string or a list of content blocks.

    Texts that begin with Claude Code's attribution line, which changes in each request, are left out unless
    `keep_header` is set. `where`: the name of the field in errors. Raises ApiError.
    """
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise bad(f"{where} must be a string or a list of text blocks", where)
    texts = [block.get("text") for block in blocks if block.get("type") == "text"]
    return [text for text in texts if isinstance(text, str) and text and (keep_header or is_plain(text))]


def _add(messages: list[dict[str, Any]], message: dict[str, Any], where: str, rules_are_known: bool) -> None:
    role, content = message["role"], message.get("content")
    result: dict[str, Any] = {"role": role}
    if isinstance(content, str):
        result["content"] = content
    elif isinstance(content, list) and all(isinstance(block, dict) for block in content):
        parts, calls, thoughts = [], [], []
        for block in content:
            kind = block.get("type")
            if kind == "tool_use":
                calls.append(_tool_use(block))
            elif kind == "tool_result":
                _tool_result(block, role, messages, parts, rules_are_known)
            elif kind == "text":
                parts += [{"type": "text", "text": block["text"]}] if block.get("text") else []
            elif kind == "thinking":
                thoughts += [block["thinking"]] if block.get("thinking") is not None else []
            elif kind == "image":
                parts += [_image(block)] if block.get("source") else []
            elif kind not in ("redacted_thinking", "tool_reference"):
                raise Multimodal(str(kind))
        if thoughts:
            result["reasoning"] = "".join(thoughts)
        if calls:
            result["tool_calls"] = calls
        if parts:
            only = parts[0] if len(parts) == 1 else {}
            result["content"] = only["text"] if only.get("type") == "text" else parts
    else:
        raise bad(f"{where}.content must be a string or a list of blocks", f"{where}.content")
    if role != "user" or "content" in result:
        messages.append(result)


def _image(block: dict[str, Any]) -> dict[str, Any]:
    source = block.get("source", {})
    if not isinstance(source, dict):
        raise Multimodal("image")
    url = source.get("url", "")
    if source.get("type") != "url":
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_use(block: dict[str, Any]) -> dict[str, Any]:
    given = block.get("input") or {}
    arguments = json.dumps(given)
    if "e+" in arguments:
        require_exact(given)
    function = {"name": block.get("name") or "", "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool_result(
    block: dict[str, Any], role: str, messages: list[dict[str, Any]], parts: list[Any], rules_are_known: bool
) -> None:
    content = block.get("content")
    if role != "user":
        parts.append({"type": "text", "text": f"Tool result: {str(content) if content else ''}"})
        return
    images, references = [], []
    if isinstance(content, list):
        texts = []
        for item in content:  # items of other types (search results, documents) are not shown to the model
            kind = item.get("type") if isinstance(item, dict) else None
            if kind == "text":
                texts.append(item.get("text", ""))
            elif kind == "image":
                image = _image(item)
                if image["image_url"]["url"]:
                    images.append(image)
            elif kind is not None and not rules_are_known:
                raise Multimodal(str(kind))
            elif kind == "tool_reference" and (name := item.get("tool_name") or item.get("name")):
                references.append({"type": "tool_reference", "name": name})
        content = "\n".join(texts)
    answer = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    messages.append({**answer, "content": content if isinstance(content, str) else ""})
    if images:
        messages.append({"role": "user", "content": images})
    if references:
        messages.append({**answer, "content": references})


def _changed(tools: Sequence[dict[str, Any]], changes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools that remain after applying a conversation's `tool_addition` and `tool_removal` blocks.

    `tools`: the request's tools; `changes`: these blocks in order. Raises Unroutable for a change of an unknown tool.
    """
    present = {tool.get("name"): tool for tool in tools}
    removed = set()
    for block in changes:
        change = block.get("tool")
        if not isinstance(change, dict):
            raise Unroutable(f"a {block['type']} without a tool")
        defined = change.get("definition")
        name = (defined if isinstance(defined, dict) else change).get("name")
        if isinstance(defined, dict):
            present[name] = defined
        elif name not in present:
            raise Unroutable(f"a {block['type']} of a tool that is not there")
        elif block["type"] == "tool_addition":
            present[name] = {**present[name], "defer_loading": None}
        (removed.add if block["type"] == "tool_removal" else removed.discard)(name)
    return [tool for name, tool in present.items() if name not in removed]


def _tools(request: dict[str, Any], changes: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    tools = request.get("tools")
    if tools is None and not changes:
        return None
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise bad("'tools' must be a list of objects", "tools")
    if changes:
        tools = _changed(tools or [], changes)
    if not all(isinstance(tool.get("input_schema"), dict) for tool in tools):
        raise Unroutable("a tool without a schema")
    functions = []
    for tool in tools:
        schema = tool["input_schema"]
        kept = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
        functions.append({"function": {**kept, "parameters": {**schema, "type": schema.get("type", "object")}}})
    return tool_schemas(functions) if functions else []


def _template_variables(request: dict[str, Any], habits: Habits) -> dict[str, Any]:
    config = request.get("output_config")
    effort = config.get("effort") if isinstance(config, dict) else None
    thinking = request.get("thinking")
    if habits.disabled_effort and isinstance(thinking, dict) and thinking.get("type") == "disabled":
        effort = habits.disabled_effort
    return template_variables(request, True, False, effort)

"""Conversion of request messages to the conversation that a chat template gets.

vLLM does not pass messages to the template as they came. Content parts become text (or stay parts, when the template
loops over them), tool-call arguments become objects, unknown keys are dropped, and tools get the defaults of their
schema. Each of these changes the tokens, so each is done here as in vLLM 0.32 (`renderers/chat_utils.py`) and
transformers 5.16 to 5.23. `quirks.VersionQuirks` holds the differences of other versions.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from ...errors import bad
from ..quirks import NEWEST, VersionQuirks
from .structure import arguments_of, levels

_BEYOND_64_BITS = 2.0**63
# The most levels of nested JSON in a tool call's arguments. Python 3.11 reads some 990, 3.12 some 1,500, 3.13 some
# 10,000. How many an engine reads depends on its own Python.
_MOST_LEVELS = 900
# Claude Code's attribution line changes on every request; vLLM drops it from system text.
BILLING_HEADER = "x-anthropic-billing-header"
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_MEDIA_KEYS = frozenset(
    """
    image_url image_pil image_embeds input_image audio_url audio_embeds input_audio video_url video_embeds prompt_embeds
    """.split()
)
# Keys of a content part that mean something to vLLM. Any other key is passed on to a template that takes parts.
_PART_KEYS = (_MEDIA_KEYS - {"input_image", "prompt_embeds"}) | frozenset(
    "type text refusal thinking closed name uuid data file prompt_cache_breakpoint".split()
)


class Rounded(Exception):
    """Raised for a parsed float that may have been an integer of more than 64 bits in the request's JSON.

    `openai.parse_exactly` reads such integers exactly.
    """


class Unknown(Exception):
    """Raised for a message that engines may render in a way that the gateway does not know.

    `known`: the number of messages before this one.
    """

    known = 0


class Multimodal(Unknown):
    """Raised for a message with images, sound or video, for which engines insert tokens that its text does not show."""


class MediaPlacing(Protocol):
    """An object that decides what a chat template gets in place of images, sound and video."""

    def place(self, part: dict[str, Any], more: dict[str, Any], as_parts: bool) -> Any:
        """Return what the template gets in place of a content part that is not text, or None to leave the part out.

        `part`: the content part, as the request has it. `more`: the fields of the part that mean nothing to vLLM, which
        it passes on to a template that loops over parts. `as_parts`: whether the template loops over parts. If so, it
        gets a part, else a text.
        """


class Placeholder(str):
    """A text in place of an image, sound or video.

    Where the parts of a message are joined to one text, placeholders are moved before the message's own texts.
    """


class Unroutable(Unknown):
    """Raised for a request whose prompt depends on something that only the engine knows; the text says what."""


# Keys of a message that only some releases of transformers pass to the template: `thinking`, which is a copy of the
# reasoning, and the others if their value is null.
MAY_BE_UNLIKE = ("thinking", "tools", "tool_call_id")

# Roles whose messages reach the template unchanged if they hold only a text.
PLAIN_ROLES = frozenset({"system", "user", "assistant"})

# By role: the keys of most messages. A message with exactly these keys needs no conversion but a copy.
_PLAIN_KEYS = {
    "user": {"role", "content"},
    "assistant": {"role", "content"},
    "tool": {"role", "content", "tool_call_id"},
}


def is_plain(system_text: str) -> bool:
    """Return whether vLLM leaves a system text unchanged: False if it begins with Claude Code's attribution line."""
    return not system_text.startswith(BILLING_HEADER)


def has_media(messages: Any) -> bool:
    """Return whether vLLM finds images, sound, video or other parts that are not text in these messages."""
    given = messages if isinstance(messages, list) else ()
    contents = [message.get("content") for message in given if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    texts = _TEXT_PARTS | {"tool_reference"}
    return any(not _MEDIA_KEYS.isdisjoint(part) or part.get("type", "text") not in texts for part in parts)


def messages_of(given: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat request unchanged. Raises ApiError unless they are a non-empty list of objects."""
    if not isinstance(given, list) or not given:
        raise bad("'messages' must be a non-empty list", "messages")
    for i, message in enumerate(given):
        if not isinstance(message, dict):
            raise bad(f"messages[{i}] must be an object", f"messages[{i}]")
    return given


def conversation(
    messages: Any,
    as_parts: bool,
    knows_developer: bool = True,
    by_schema: bool = True,
    quirks: VersionQuirks = NEWEST,
    reads: Collection[str] = (),
    media: MediaPlacing | None = None,
) -> list[dict[str, Any]]:
    """Convert the messages of a chat request to what the chat template gets as `messages`.

    `as_parts`: the template loops over content parts (vLLM's content format "openai"), so it gets a text as a list with
        one part of the type "text".
    `knows_developer`: whether the template knows the role "developer". If not, developer and system messages are merged
        into one system message at the front, provided there are developer messages.
    `by_schema`: whether the API parses tool calls with vLLM's schema, as all APIs but Responses do. That changes the
        order of their keys, which is visible if a template dumps them as JSON.
    `quirks`: how the engine's version differs from the newest one.
    `reads`: which of the keys `thinking`, `tools` and `tool_call_id` of messages the template may read. Whether it gets
        these keys may depend on the engine's release of transformers.
    `media`: decides what replaces parts that are not text.

    Raises ApiError if `messages` is no valid conversation, Multimodal for a part that is not text if `media` is None,
    and Unroutable if the result depends on the engine's release of transformers.
    """
    talk: list[dict[str, Any]] = []
    try:
        for message in messages_of(messages):
            talk.append(_message(message, as_parts, by_schema, quirks, len(talk), media))
    except Unknown as unknown:
        unknown.known = len(talk)
        raise
    if not knows_developer and any(message["role"] == "developer" for message in talk):
        talk = _one_system(
            [{**message, "role": "system"} if message["role"] == "developer" else message for message in talk]
        )
    return _as_transformers_hands_on(talk, quirks, reads)


def _as_transformers_hands_on(
    talk: list[dict[str, Any]], quirks: VersionQuirks, reads: Collection[str]
) -> list[dict[str, Any]]:
    """Return the messages as transformers passes them to the template.

    Since 5.20 transformers drops keys whose value is None, and since 5.21 it copies `reasoning` to `thinking`. `reads`:
    which of the keys `thinking`, `tools` and `tool_call_id` the template may read. Raises Unroutable if the template
    reads a key that some of the engine's possible releases pass on and others do not.
    """
    if quirks.drops_none is not False and any(None in message.values() for message in talk):
        if quirks.drops_none is None:
            for known, message in enumerate(talk):
                if any(value is None and key in reads for key, value in message.items()):
                    raise _unlike("whether a null in a message reaches the template", known)
        talk = [{key: value for key, value in message.items() if value is not None} for message in talk]
    if quirks.copies_reasoning is not False and any("reasoning" in message for message in talk):
        if quirks.copies_reasoning:
            return [
                {"thinking": message["reasoning"], **message} if "reasoning" in message else message for message in talk
            ]
        if "thinking" in reads:
            known = next(i for i, message in enumerate(talk) if "reasoning" in message)
            raise _unlike("whether reasoning reaches the template as `thinking`", known)
    return talk


def _unlike(what: str, known: int) -> Unroutable:
    unknown = Unroutable(f"{what} depends on the engine's transformers")
    unknown.known = known
    return unknown


def _one_system(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge all system messages into one at the front, unless none or only the first message is a system message."""
    for message in talk:
        if message["role"] == "system":
            message.pop("tools", None)
    if not any(message["role"] == "system" for message in talk[1:]):
        return talk
    contents = [message["content"] for message in talk if message["role"] == "system"]
    texts = [
        content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)
        for content in contents
    ]
    joined = "\n\n".join(filter(None, texts))
    return [{"role": "system", "content": joined}, *(m for m in talk if m["role"] != "system")]


def _message(
    message: dict[str, Any],
    as_parts: bool,
    by_schema: bool,
    quirks: VersionQuirks,
    index: int,
    media: MediaPlacing | None,
) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str):
        raise bad(f"{where} must have a string 'role'", f"{where}.role")
    content = message.get("content")
    if type(content) is str and not as_parts and _PLAIN_KEYS.get(role) == message.keys():
        if role != "tool":
            return {"role": role, "content": content}
        if message["tool_call_id"] is not None:
            return {"role": role, "content": content, "tool_call_id": message["tool_call_id"]}
    if isinstance(content, str):
        parts: list[Any] = [content]
    elif content is None:
        parts = []
    elif isinstance(content, list):
        parts = content
    else:
        raise bad(f"{where}.content must be a string or a list of parts", f"{where}.content")
    if role == "system" and quirks.drops_attribution:
        parts = _drop_billing_header(parts)
    # Besides None, an empty text is dropped; a text part with an empty text stays, because it is an object.
    parts = [p for p in (_part(part, as_parts, where, media) for part in parts) if p]
    if media is not None and not as_parts:
        parts.sort(key=lambda part: not isinstance(part, Placeholder))
    result: dict[str, Any] = {"role": role, "content": parts if as_parts else quirks.between_parts.join(parts)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise bad(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
            result["tool_calls"] = [_tool_call(call, by_schema, quirks, where) for call in calls]
        if (reasoning := reasoning_of(message)) is not None:
            require_exact(reasoning)
            result["reasoning"] = result["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        if as_parts and all(p["type"] == "text" for p in parts):
            result["content"] = quirks.between_parts.join(p["text"] for p in parts)
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    if role == "developer":
        require_exact(message.get("tools"))
        result["tools"] = message.get("tools")
    return result


def _part(part: Any, as_parts: bool, where: str, media: MediaPlacing | None) -> Any:
    """Return what the template gets in place of one content part: a text, or a part with `as_parts`; None: nothing.

    `where`: the place of the message in the request, for errors. `media`: decides what replaces a part that is not
    text; if it is None, such a part raises Multimodal.
    """
    if isinstance(part, str):
        return {"type": "text", "text": part} if as_parts else part
    if not isinstance(part, dict):
        raise bad(f"{where}.content holds something that is neither text nor an object", f"{where}.content")
    kind = part.get("type")
    if kind == "tool_reference":
        name = part.get("name") or part.get("tool_reference")
        return {"type": "tool_reference", "name": name} if as_parts else name
    if kind not in _TEXT_PARTS:
        if media is None:
            raise Multimodal(str(kind))
        return media.place(part, _unknown_fields(part), as_parts)
    text = part.get(kind if kind in ("refusal", "thinking") else "text")
    if text is None:
        return None
    if not isinstance(text, str):
        raise bad(f"{where}: the text of a content part must be a string", f"{where}.content")
    if not as_parts:
        return text
    return {"type": "text", "text": text, **_unknown_fields(part)}


def _unknown_fields(part: dict[str, Any]) -> dict[str, Any]:
    more = {key: value for key, value in part.items() if key not in _PART_KEYS}
    require_exact(more)
    return more


def _drop_billing_header(parts: list[Any]) -> list[Any]:
    kept = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str) or is_plain(text):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def reasoning_of(message: Mapping[str, Any]) -> Any:
    """Return a message's `reasoning`, or its `reasoning_content` if `reasoning` is missing or null (but not if "")."""
    reasoning = message.get("reasoning")
    return message.get("reasoning_content") if reasoning is None else reasoning


def _tool_call(call: Any, by_schema: bool, quirks: VersionQuirks, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments parsed, and with `by_schema` its keys in the order of vLLM's schema.

    `where`: the place of the message in the request, for errors. Raises ApiError.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise bad(
            f"{where}.tool_calls: every entry must be of type 'function' with a 'function' object",
            f"{where}.tool_calls",
        )
    seen = {**function, "arguments": call_arguments(function.get("arguments"), quirks)}
    if not by_schema:
        return {**call, "function": seen}
    return _ordered(
        {**call, "function": _ordered(seen, ("arguments", "name")), "type": "function"}, ("id", "function", "type")
    )


def call_arguments(given: Any, quirks: VersionQuirks) -> Any:
    """Return a tool call's arguments as an object, parsed if they are given as JSON text.

    Arguments that are missing, null or not valid JSON become `{}`. JSON text of another value than an object becomes
    `{}` for engines since vLLM 0.29 and is returned as parsed for older ones. Raises ApiError for arguments that are
    nested too deeply.
    """
    if isinstance(given, str) and given:
        try:
            _refuse_deep(given)
            given = json.loads(given)
        except ValueError:
            return {}
        if given is not None and not quirks.arguments_are_objects:
            return given
    else:
        require_exact(given)
    return given if isinstance(given, dict) else {}


def refuse_deep_arguments(request: dict[str, Any]) -> None:
    """Raise ApiError if a tool call of the request has arguments nested more than 900 levels deep.

    It is called for requests that are not rendered here; rendering checks the arguments itself.
    """
    for text in arguments_of(request):
        _refuse_deep(text)


def _refuse_deep(arguments: str) -> None:
    many = arguments.count("[") + arguments.count("{") > _MOST_LEVELS
    if many and levels(arguments.encode("utf-8", "replace")) > _MOST_LEVELS:
        raise bad(f"the arguments of a tool call are nested too deeply: more than {_MOST_LEVELS} levels")


def _ordered(given: dict[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    return {**{key: given[key] for key in first if key in given}, **given}


def tool_schemas(tools: Any, as_given: bool = False) -> list[dict[str, Any]] | None:
    """Return a chat request's `tools` as the chat template gets them, or None if the request has none.

    vLLM drops the keys that its schema does not have, and puts the others in the schema's order. `as_given`: do as
    SGLang does instead, which keeps a function's keys in the client's order, and adds `defer_loading` with the value
    null to tools that lack it. Raises ApiError.
    """
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise bad("'tools' must be a non-empty list", "tools")
    return [_tool(tool, f"tools[{i}]", as_given) for i, tool in enumerate(tools)]


def _tool(tool: Any, where: str, as_given: bool) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(f"{where} must be {{'type': 'function', 'function': {{'name': ...}}}}", where)
    loading, inner = tool.get("defer_loading"), function.get("defer_loading")
    optional = {"strict": function.get("strict"), "defer_loading": loading if inner is None else inner}
    seen = {name: function.get(name) for name in ("name", "description", "parameters")}
    seen.update({name: value for name, value in optional.items() if value is not None})
    if as_given:
        seen = {key: seen[key] for key in (*function, *seen) if key in seen}
    result = {"type": "function", "function": seen}
    if loading is not None or as_given:
        result["defer_loading"] = loading
    return result


def require_exact(value: Any) -> None:
    """Raise Rounded if a value holds a float that may have been an integer of more than 64 bits in the JSON.

    orjson parses such an integer as a float. A template would print all its digits, so every value that a template may
    print has to be checked.
    """
    if isinstance(value, dict):
        for item in value.values():
            require_exact(item)
    elif isinstance(value, list):
        for item in value:
            require_exact(item)
    elif type(value) is float and abs(value) >= _BEYOND_64_BITS:
        raise Rounded

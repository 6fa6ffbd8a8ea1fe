"""Token-id forwarding: writes the token ids that were computed for routing into the body sent to the engine.

Engines accept token ids in place of a completion's text. Some also accept them next to a chat's messages, in a
field that the engine's dialect names, and then neither render nor tokenize the messages. The rest of the client's body
is sent byte for byte. `proxy.exactness` learns which engines accept ids and for which bodies.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import numpy as np
import orjson

from .prompt import Prompt

# Prompts of at least this many tokens are forwarded as ids: at 520 tokens an engine saves 1.5 to 4 ms of CPU time, and
# the gateway spends 3 to 10 us. Shorter prompts are sent as received. The token count in their answer's `usage` keeps
# confirming that the engine and the gateway make the same tokens.
LEAST_TOKENS = 512
# Fields that mean the same whether the engine gets the text or its ids. Any other field may need the text (echo, token
# offsets, truncation, media), so a request that has one is sent as received.
ANYWHERE = frozenset({
    "model", "stream", "stream_options", "max_tokens", "n", "seed", "user", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "bad_words", "allowed_token_ids", "logprobs", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "response_format", "structured_outputs", "cache_salt", "priority", "request_id",
    "return_token_ids", "add_special_tokens", "session_id",
})  # fmt: skip
_FIELDS = {
    "/v1/chat/completions": ANYWHERE | {
        "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
        "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort", "documents",
        "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier",
    },
    "/v1/completions": ANYWHERE | {"prompt", "best_of"},
}  # fmt: skip
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_MESSAGE_FIELDS = frozenset(
    {"name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal", "annotations", "task", "tools"}
)
_PART_TYPES = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_PART_FIELDS = _PART_TYPES | {"type", "cache_control"}
_SAID = ("add_generation_prompt", "continue_final_message", "reasoning_effort", "add_special_tokens")
# The fields besides the messages that `kind_of` writes into its result.
_TOLD = frozenset((*_SAID, "chat_template_kwargs", "documents", "tools"))
_STEERED = "; "  # precedes the request's own rendering options in the result of `kind_of`, and occurs in no other
# By path: the fields that a body may have and still be rendered with the template's default options, provided that its
# messages have only the roles of ROLES.
PLAIN_FIELDS = {path: fields - _TOLD | {"tools"} for path, fields in _FIELDS.items()}
# The most characters of a result of `kind_of`, and of the value of one template variable in it.
_LONGEST, _LONGEST_VALUE = 600, 40
_PROMPT_KEY = re.compile(rb'"prompt"[ \t\r\n]*:[ \t\r\n]*"')


def kind_of(path: str, request: dict[str, Any], template: str, roles: Collection[str] | None = None) -> str:
    """Return the body's kind, a text that says how an engine renders the body, or "" if ids cannot replace its text.

    A kind lists everything but the message texts that determines the rendered prompt: the template's name, whether
    there are tools, the roles and fields of the messages, and the template variables. The gateway compares its tokens
    with the engine's for some bodies of a kind and applies the result to all bodies of that kind (`proxy.exactness`).
    Bodies with unknown fields or values, and those whose kind would exceed 600 characters, get "".

    `template`: the template's name, "default" or "tool_use". `roles`: the roles of the messages if every message
    consists of a role and a text only, else None.
    """
    fields = _FIELDS.get(path)
    if fields is None or not request.keys() <= fields:
        return ""
    if path == "/v1/completions":
        said = (
            "" if request.get("add_special_tokens", True) is True else f"{_STEERED}special tokens as the request says"
        )
        return f"text{said}" if type(request.get("prompt")) is str else ""
    if roles is not None and _TOLD.isdisjoint(request):
        return f"{template} template, no tools, " + ", ".join(sorted(set(roles)))
    shapes = {_shape(message) for message in request["messages"]}
    variables = [f"{name}={request[name]!r}" for name in _SAID if request.get(name) is not None]
    given = {name: value for name, value in (request.get("chat_template_kwargs") or {}).items() if value is not None}
    if None in shapes or not all(
        type(value) in (bool, int, float, str) and len(str(value)) <= _LONGEST_VALUE for value in given.values()
    ):
        return ""
    variables += [f"{name}={given[name]!r}" for name in sorted(given)]
    variables += ["documents"] if request.get("documents") else []
    tools = "tools" if request.get("tools") else "no tools"
    kind = ", ".join((f"{template} template", tools, *sorted(shapes)))
    kind += _STEERED + ", ".join(variables) if variables else ""
    return kind if len(kind) <= _LONGEST else ""


def is_steered(kind: str) -> bool:
    """Return whether bodies of this kind (the result of `kind_of`) set rendering options; True for the kind ""."""
    return not kind or _STEERED in kind


def _shape(message: dict[str, Any]) -> str | None:
    """Return a text that names a message's role, the form of its content and its other fields.

    Returns None if the message has a role, content part or field that is not known here.
    """
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        return None
    if len(message) == 2 and type(content) is str:
        return role
    more = sorted(name for name, value in message.items() if name not in ("role", "content") and value is not None)
    if not _MESSAGE_FIELDS.issuperset(more):
        return None
    if not isinstance(content, list):
        form = "no content" if content is None else "text"
    else:
        parts = {_part(part) for part in content}
        if None in parts:
            return None
        form = " and ".join(("parts", *sorted(parts)))
    return f"{role} ({', '.join((form, *more))})"


def _part(part: Any) -> str | None:
    if isinstance(part, str):
        return "text"
    if part.get("type") not in _PART_TYPES or not part.keys() <= _PART_FIELDS:
        return None
    return f"{part['type']} with cache_control" if "cache_control" in part else part["type"]


def with_ids(body: bytes, prompt: Prompt, around: tuple[bytes, bytes] | None) -> bytes | None:
    """Return the client's body with the prompt's token ids in it, or None if there is no safe place for them.

    A completion's text is replaced by the ids. In a chat's body the ids become an additional first member. `around`:
    the JSON text before and after the ids in a chat's body, which names the field in which the engine takes them; None:
    the engine accepts no ids for chats.
    """
    ids = written(prompt.token_ids)
    if prompt.path == "/v1/completions":
        start, end = _text(body, prompt.rendered_chars)
        return b"".join((body[:start], ids, body[end:])) if start else None
    if around is None:
        return None
    # The new member comes first: of two members with one name the last is used, so if the client's body has this member
    # after all, in another spelling, the client's value is used.
    at = body.index(b"{") + 1
    return b"".join((body[:at], around[0], ids, around[1], b",", body[at:]))


def written(ids: bytes) -> bytes:
    """Return token ids (uint32, little endian) as a JSON list without blanks."""
    return orjson.dumps(np.frombuffer(ids, "<u4"), option=orjson.OPT_SERIALIZE_NUMPY)


def _text(body: bytes, chars: int) -> tuple[int, int]:
    """Return the positions where the `prompt` string of a completion's body starts and ends, quotes included.

    `chars`: the expected length of the string in characters. Returns (0, 0) if the positions are not certain. A quote
    within a JSON string is escaped, so `"prompt"` followed by a colon is a key of some object. If a nested object has
    this key too, it occurs twice, and the result is (0, 0).
    """
    at = body.find(b'"prompt"')
    key = _PROMPT_KEY.match(body, at) if at >= 0 and body.find(b'"prompt"', at + 1) < 0 else None
    if key is None:
        return 0, 0
    start, end = key.end() - 1, _string_end(body, key.end())
    return (start, end) if len(orjson.loads(body[start:end])) == chars else (0, 0)


def _string_end(body: bytes, at: int) -> int:
    """Return the position after the closing quote of the JSON string that the position `at` lies in.

    Searching from quote to quote takes 10 to 25 us in 36 kB of prose or code; a regular expression takes 180 us.
    """
    while True:
        at = body.index(b'"', at)
        before = at - 1
        while body[before] == 0x5C:  # an odd number of backslashes escapes the quote
            before -= 1
        at += 1
        if (at - before) % 2 == 0:
            return at

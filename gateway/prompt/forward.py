"""Token-id forwarding: the ids found for routing, written into the body that the engine gets.

Engines take ids in place of a completion's text, and some take them next to a chat's messages, in a field that the
engine's dialect names; such an engine then neither renders nor tokenizes. The rest of the client's body keeps its
bytes. `proxy.exactness` learns what an engine accepts.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import numpy as np
import orjson

from .prompt import Prompt

# Prompts of at least this length are worth it: at 520 tokens an engine saves 1.5 to 4 ms of CPU time, the gateway
# spends 3 to 10 us. Shorter prompts go as received, and their `usage` keeps confirming that both make the same tokens.
LEAST_TOKENS = 512
# Fields that mean the same whether the engine has the text or its ids. Any other, known or not yet,
# may need the text (echo, token offsets, truncation, media): such a request is sent as received.
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
_TOLD = frozenset((*_SAID, "chat_template_kwargs", "documents", "tools"))  # what a kind names besides the messages
_STEERED = "; "  # precedes, in a kind's text, the request's own options of rendering; occurs in no other kind
# By path: the fields of a body that is rendered by the template's defaults, if its messages have only these ROLES.
PLAIN_FIELDS = {path: fields - _TOLD | {"tools"} for path, fields in _FIELDS.items()}
_LONGEST, _LONGEST_VALUE = 600, 40  # characters of a kind, of a template variable in it
_PROMPT_KEY = re.compile(rb'"prompt"[ \t\r\n]*:[ \t\r\n]*"')


def kind_of(path: str, request: dict[str, Any], template: str, roles: Collection[str] | None = None) -> str:
    """Return the kind of this body, a text that says how an engine renders it; "" if ids cannot replace its text.

    A kind lists what determines the rendering besides the texts: the template (by its name), tools or none, the roles
    and fields of the messages, and the template's variables. Some bodies of a kind are compared with the engine's own
    tokens, and the result holds for the kind (`proxy.exactness`). Bodies with unknown content have no kind, which
    keeps kinds within _LONGEST characters. `roles`: those of the messages if each is a role and a text, else None.
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
    """Return whether a request's own options influence the rendering of bodies of this kind; True for no kind ("")."""
    return not kind or _STEERED in kind


def _shape(message: dict[str, Any]) -> str | None:
    """Return a text of a message's role, form of content and other fields; None if any of them is unknown."""
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
    """Return the body with the prompt's token ids in it, or None when there is no safe place for them.

    `around`: the bytes before and after the ids in a chat's body; None: the engine takes no ids there.
    """
    ids = written(prompt.token_ids)
    if prompt.path == "/v1/completions":
        start, end = _text(body, prompt.rendered_chars)
        return b"".join((body[:start], ids, body[end:])) if start else None
    if around is None:
        return None
    # First in the object: if the client's body has that name after all, in another spelling, the client's value counts.
    at = body.index(b"{") + 1
    return b"".join((body[:at], around[0], ids, around[1], b",", body[at:]))


def written(ids: bytes) -> bytes:
    """Return ids (uint32 LE) as a JSON list without blanks."""
    return orjson.dumps(np.frombuffer(ids, "<u4"), option=orjson.OPT_SERIALIZE_NUMPY)


def _text(body: bytes, chars: int) -> tuple[int, int]:
    """Return the start and end of the completion's text, quotes included; (0, 0) when that is not certain.

    A quote within a string is escaped, so `"prompt"` with a colon is a key of some object, and a nested one of that
    name makes two of them. `chars`: the text's expected length in characters.
    """
    at = body.find(b'"prompt"')
    key = _PROMPT_KEY.match(body, at) if at >= 0 and body.find(b'"prompt"', at + 1) < 0 else None
    if key is None:
        return 0, 0
    start, end = key.end() - 1, _string_end(body, key.end())
    return (start, end) if len(orjson.loads(body[start:end])) == chars else (0, 0)


def _string_end(body: bytes, at: int) -> int:
    """Return the position after the quote that ends the JSON string in which `at` lies.

    Going from quote to quote takes 10 to 25 us in 36 kB of prose or code, a regular expression 180.
    """
    while True:
        at = body.index(b'"', at)
        before = at - 1
        while body[before] == 0x5C:  # an odd number of backslashes escapes it
            before -= 1
        at += 1
        if (at - before) % 2 == 0:
            return at

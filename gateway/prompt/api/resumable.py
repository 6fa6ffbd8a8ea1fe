"""Resumption of an interrupted answer on another replica: whether a request allows it, and the request for the rest.

The other replica gets one of two bodies. One is made here and holds the prompt and the answer so far as token ids; the
other is the client's own body again. A body made here can hold only fields that mean the same for the rest of an answer
as for the whole, so a request that has any other field can only be repeated.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import orjson

from cachemap import hash_blocks
from cachemap.hashing import named_ahead

from ..forward import written as as_json
from ..prompt import CHAT, COMPLETIONS, Prompt

# Fields that mean the same for the rest of an answer as for the whole.
_KEPT = frozenset({
    "model", "stream", "stream_options", "user", "metadata", "priority", "cache_salt", "session_id", "prompt_cache_key",
    "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "logit_bias", "allowed_token_ids", "stop_token_ids",
    "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "safety_identifier", "service_tier", "store", "n",
})  # fmt: skip
# Fields whose effect is contained in the prompt's ids.
_IN_PROMPT = frozenset({
    "messages", "prompt", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template_kwargs", "documents",
})  # fmt: skip
# Fields that are read here. They are then rewritten, or have no effect on the rest of the answer.
_READ = frozenset({
    "max_tokens", "max_completion_tokens", "min_tokens", "return_token_ids", "logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "response_format", "stop", "presence_penalty", "frequency_penalty",
})  # fmt: skip
# The fields of _STORED show that a request concerns a stored response. Those of _REPEATED are read even if the request
# can only be repeated.
_STORED = ("previous_response_id", "conversation", "background")
_REPEATED = frozenset({"temperature", "return_token_ids", "tools", "tool_choice", *_STORED})
# Why an answer cannot be resumed from its token ids. TOOLS: a tool call may begin in the text so far. FIELD: a stop
# string may begin there, penalties apply only to what the engine itself wrote, and unknown fields may mean anything.
TOOLS, FIELD = "tools", "field"


def _reader(names: frozenset[str], **settings: Any) -> msgspec.json.Decoder[Any]:
    """Return a JSON decoder that keeps the fields of these names as raw bytes and skips all others.

    `settings`: options of `msgspec.defstruct`. The decoder builds no objects from the fields. For a body of 180,000
    members, building them would take ten times as long.
    """
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in sorted(names)]
    return msgspec.json.Decoder(msgspec.defstruct("_Fields", fields, **settings))


_NO_OTHERS = _reader(_KEPT | _IN_PROMPT | _READ, forbid_unknown_fields=True)
_WITH_OTHERS = _reader(_REPEATED)
_MOST_READ = 4096  # bytes; larger values of fields are not parsed
_LARGE = object()  # stands for a larger value; it is true, so the field counts as set


@dataclass(slots=True)
class Terms:
    """The conditions under which an interrupted answer to a request can be resumed on another replica.

    `kept`: the members of the request's JSON body that a request for the rest of the answer repeats unchanged, as raw
        JSON joined by commas.
    `no_ids`: why the rest cannot be requested with the answer's token ids: TOOLS if a tool call may have begun, FIELD
        if another field of the request forbids it, "" if it can.
    `greedy`: the temperature is 0, so repeating the request gives the same answer.
    `tells_ids`: the client asks for token ids (`return_token_ids`).
    `least`: the answer's minimum length in tokens, or 0.
    `stored`: the request concerns a response that the engine stores, because it has `previous_response_id`,
        `conversation` or `background`.
    """

    kept: bytes = b""
    no_ids: str = ""
    greedy: bool = False
    tells_ids: bool = False
    least: int = 0
    stored: bool = False

    @property
    def why_strange(self) -> str:
        """The reason that is reported if a stream is not resumed because it had an event of an unknown type.

        It is TOOLS ("tools") if the event may belong to a tool call, else "events".
        """
        return TOOLS if self.no_ids == TOOLS else "events"

    def rest(self, path: str, ids: bytes, written: int, limit: int | None, around: tuple[bytes, bytes]) -> bytes:
        """Return the body of a request for the rest of an answer.

        `ids`: the token ids of the prompt and of the answer so far (uint32, little endian). `written`: the number of
        tokens of the answer so far. `limit`: the most tokens that the whole answer may have, or None. `around`: the
        JSON text before and after the ids in a chat's body, which names the field in which the engine takes them.
        """
        fields: dict[str, Any] = {"return_token_ids": True}
        if limit is not None:
            fields["max_tokens"] = limit - written
        if self.least > written:
            fields["min_tokens"] = self.least - written
        if path == COMPLETIONS:
            inner = b'"prompt":' + as_json(ids)
        else:
            fields["messages"] = [{"role": "user", "content": "-"}]
            inner = b"".join((around[0], as_json(ids), around[1]))
        parts = (inner, self.kept, orjson.dumps(fields)[1:-1])  # of two members with one name, engines use the last
        return b"{%b}" % b",".join(filter(None, parts))


def terms_of(prompt: Prompt, body: bytes) -> Terms | None:
    """Return the conditions for resuming the answer to a request, or None if the body cannot be read.

    The engine may refuse such a body. `body`: the client's request body.
    """
    others = prompt.path not in (CHAT, COMPLETIONS)
    try:
        try:
            given = _given(_WITH_OTHERS if others else _NO_OTHERS, body)
        except msgspec.ValidationError:
            given, others = _given(_WITH_OTHERS, body), True
        fields = {name: orjson.loads(raw) if len(raw) <= _MOST_READ else _LARGE for name, raw in given.items()}
    except (ValueError, msgspec.DecodeError, RecursionError):
        return None
    get = fields.get
    terms = Terms(
        greedy=get("temperature") == 0,
        tells_ids=get("return_token_ids") is True,
        stored=any(get(name) for name in _STORED),
        no_ids=_no_ids(fields, others),
    )
    if not terms.no_ids:
        terms.kept = b",".join([b'"%b":%b' % (name.encode(), raw) for name, raw in given.items() if name in _KEPT])
        terms.least = least if type(least := get("min_tokens")) is int else 0
    return terms


def _given(reader: msgspec.json.Decoder[Any], body: bytes) -> dict[str, bytes]:
    """Return the fields of a request body that `reader` keeps, as raw JSON by name.

    Fields such as `messages`, `prompt` and `documents` are left out (`_IN_PROMPT`), because the prompt's token ids
    already contain their effect.
    """
    found = reader.decode(body)
    raw = {name: bytes(getattr(found, name)) for name in found.__struct_fields__ if name not in _IN_PROMPT}
    return {name: value for name, value in raw.items() if value}


def _no_ids(fields: dict[str, Any], others: bool) -> str:
    get, form = fields.get, fields.get("response_format") or {}
    if get("tools") and get("tool_choice") != "none":
        return TOOLS
    is_text = isinstance(form, dict) and form.get("type", "text") == "text"
    has_logprobs = get("logprobs") is not None and get("logprobs") is not False
    steers = any(get(name) for name in ("stop", "presence_penalty", "frequency_penalty")) or has_logprobs or not is_text
    return FIELD if others or steers or get("return_token_ids") is False else ""


def with_answer(prompt: Prompt, ids: bytes, limit: int | None) -> Prompt:
    """Return the prompt for the rest of an answer: the original prompt followed by the answer so far.

    `ids`: the token ids of both (uint32, little endian), from which the block hashes are computed. `limit`: the most
    tokens that the rest of the answer may have, or None.
    """
    hashes = array("Q", hash_blocks(ids, prompt.block_size, prompt.seed))
    if prompt.looks_ahead:
        hashes = named_ahead(hashes, ids, prompt.block_size, prompt.looks_ahead)
    return replace(repeated(prompt), tokens=len(ids) // 4, hashes=hashes, max_tokens=limit, rendered_chars=0)


def repeated(prompt: Prompt) -> Prompt:
    """Return a copy of the prompt without token ids, so that the engine gets the client's text again."""
    return replace(prompt, token_ids=b"", kind="", also=None)

"""What a request says about going on with its answer on another replica, once part of it is written.

The other replica gets the prompt and what was written as token ids, in a body of its own, or the same body once more,
where what it writes is compared with what the client has. A body of its own is made of the fields that are known to
mean the same there; a request with any other field can only be repeated.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from ..prompt import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Prompt

# Fields that mean the same for the rest of an answer as for the whole.
_KEPT = frozenset({
    "model", "stream", "stream_options", "user", "metadata", "priority", "cache_salt", "session_id", "prompt_cache_key",
    "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "logit_bias", "allowed_token_ids", "stop_token_ids",
    "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "safety_identifier", "service_tier", "store", "n", "best_of",
})  # fmt: skip
# What was in the prompt is in its ids.
_IN_PROMPT = frozenset({
    "messages", "prompt", "input", "system", "instructions", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "chat_template_kwargs", "documents",
})  # fmt: skip
# Read here, and written anew or without effect.
_READ = frozenset({
    "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "return_token_ids", "logprobs", "top_logprobs",
    "tools", "tool_choice", "parallel_tool_calls", "response_format", "text", "stop", "stop_sequences", "presence_penalty",
    "frequency_penalty",
})  # fmt: skip
_KNOWN = _KEPT | _IN_PROMPT | _READ
_GUIDED = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_DEFAULT_LIMIT = {
    COMPLETIONS: 16
}  # tokens of an answer where the request says nothing; elsewhere all there is room for
# Why an answer cannot be gone on with, however it is done.
SEVERAL, LOGPROBS, GUIDED, STORED = "n", "logprobs", "guided", "stored"
# Why it cannot be gone on with by its ids: a call of a tool may begin in what was written, and so may a stop string;
# penalties count only what the engine itself wrote, and other fields may mean anything.
TOOLS, STOP, PENALTIES, FIELD = "tools", "stop", "penalties", "field"
# Fields outside of _KNOWN that say that an answer cannot be gone on with at all.
_REFUSING = frozenset({
    *_GUIDED, "output_config", "prompt_logprobs", "previous_response_id", "conversation", "background", "include",
})  # fmt: skip


def _reader(names: Set[str], **settings: Any) -> msgspec.json.Decoder[Any]:
    """Reads fields of these names as they are written, and makes no objects of what is in them or beside them: a body
    of 180,000 members takes a tenth of the time."""
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in sorted(names)]
    return msgspec.json.Decoder(msgspec.defstruct("_Fields", fields, **settings))


_NO_OTHERS = _reader(_KNOWN, forbid_unknown_fields=True)
# Of a request that can only be repeated nothing is kept, and each name takes time at each of a body's members.
_WITH_OTHERS = _reader(_READ | _REFUSING | {"temperature", "best_of"})
_MOST_READ = 4096  # bytes of a value
_LARGE = object()  # stands for a larger one, which is taken to ask for what its field may ask for


@dataclass(slots=True)
class Terms:
    """`refused`: why the answer cannot be gone on with at all, or ""; `no_ids`: why not by its ids, or "". `greedy`:
    the same prompt gets the same answer. `tells_ids`: the client itself asks for token ids."""

    path: str
    kept: bytes  # members of a JSON object, as they came: those that mean the same for the rest
    refused: str = ""
    no_ids: str = ""
    greedy: bool = False
    tells_ids: bool = False
    limit: int | None = None  # tokens of the whole answer
    least: int = 0

    def limit_of(self, prompt: Prompt) -> int | None:
        return prompt.max_tokens if prompt.max_tokens is not None else _DEFAULT_LIMIT.get(self.path)

    def left(self, written: int) -> int | None:
        """How many tokens the rest may have. An engine takes no less than 1, also where a text has as many as all of
        the answer may have."""
        return None if self.limit is None else max(1, self.limit - written)

    def rest(self, ids: bytes, written: int, around: tuple[bytes, bytes]) -> bytes:
        """The body that asks for what follows `ids`, of which the last `written` are of the answer. `around`: as of
        `forward.with_ids`."""
        from ..forward import written as as_json

        fields: dict[str, Any] = {}
        if self.limit is not None:
            fields["max_output_tokens" if self.path == RESPONSES else "max_tokens"] = self.left(written)
        if self.least > written and (self.limit is None or self.least <= self.limit):
            fields["min_tokens"] = self.least - written
        if self.path in (CHAT, COMPLETIONS):
            fields["return_token_ids"] = True
        if self.path == COMPLETIONS:
            inner = b'"prompt":' + as_json(ids)
        else:
            inner = b"".join((around[0], as_json(ids), around[1]))
            if self.path == RESPONSES:
                fields["input"], fields["store"] = "-", False  # its client knows it by another id
            else:
                fields["messages"] = [{"role": "user", "content": "-"}]
        written = [inner, self.kept, orjson.dumps(fields)[1:-1]]  # of two with one name the last counts
        return b"{%b}" % b",".join([one for one in written if one])


def terms_of(prompt: Prompt, body: bytes) -> Terms | None:
    """None where the body is not read: the engine may refuse it."""
    try:
        given, others = _given(body)
        fields = {name: _value(value) for name, value in given.items()}
    except (ValueError, msgspec.DecodeError, RecursionError):
        return None
    get, path = fields.get, prompt.path
    terms = Terms(path, b",".join([b'"%b":%b' % (name.encode(), given[name]) for name in given if name in _KEPT]))
    terms.refused = _refused(prompt, fields)
    terms.greedy = get("temperature") == 0
    terms.tells_ids = get("return_token_ids") is True
    terms.limit = terms.limit_of(prompt)
    least = get("min_tokens")
    terms.least = least if type(least) is int else 0
    if get("tools") and get("tool_choice") != "none":
        terms.no_ids = TOOLS
    elif get("stop") or get("stop_sequences"):
        terms.no_ids = STOP
    elif get("presence_penalty") or get("frequency_penalty"):
        terms.no_ids = PENALTIES
    elif others or get("return_token_ids") is False:
        terms.no_ids = FIELD
    return terms


def _given(body: bytes) -> tuple[dict[str, bytes], bool]:
    """A body's fields that are known, other than the prompt, as they are written; and whether it has others."""
    try:
        found, others = _NO_OTHERS.decode(body), False
    except msgspec.ValidationError:
        found, others = _WITH_OTHERS.decode(body), True
    names = found.__struct_fields__
    written = {name: bytes(getattr(found, name)) for name in names if name not in _IN_PROMPT}
    return {name: value for name, value in written.items() if value}, others


def _value(written: bytes) -> Any:
    return orjson.loads(written) if len(written) <= _MOST_READ else _LARGE


def exact(data: dict[str, Any]) -> bytes:
    """As JSON, to be kept: what orjson 3.13 returns holds 4 KiB at least."""
    return bytes(memoryview(orjson.dumps(data)))


def _refused(prompt: Prompt, fields: dict[str, Any]) -> str:
    get = fields.get
    forms = [get("response_format"), *(_format_in(get(name)) for name in ("text", "output_config"))]
    if prompt.several or (type(get("best_of")) is int and get("best_of") > 1):
        return SEVERAL
    if any(get(name) not in (None, False, 0) for name in ("top_logprobs", "prompt_logprobs")) or _wants_logprobs(
        fields
    ):
        return LOGPROBS
    if any(get(name) for name in _GUIDED) or any(
        form is _LARGE or (isinstance(form, dict) and form.get("type", "text") != "text") for form in forms
    ):
        return GUIDED
    if prompt.path == RESPONSES and any(get(name) for name in ("previous_response_id", "conversation", "background")):
        return STORED
    return ""


def _format_in(given: Any) -> Any:
    return given.get("format") if isinstance(given, dict) else given


def _wants_logprobs(fields: dict[str, Any]) -> bool:
    """0 of them is a number of completions' `logprobs`; a chat's is true or false."""
    given = fields.get("logprobs")
    included = fields.get("include")
    return (given is not None and given is not False) or (
        included is _LARGE or (isinstance(included, list) and "message.output_text.logprobs" in included)
    )


PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)

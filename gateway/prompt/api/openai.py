"""Parsing of OpenAI request bodies: JSON, options, prompts that need no rendering, and conversations to render.

The options are model, streaming, output limit, session and number of choices. Conversations of all APIs are converted
to one form, `Chat`.

vLLM reads JSON as Python does (NaN, lone surrogates, UTF-16) and fields as pydantic does ("true", 1.0, "16"). A gateway
that refused what the engine behind it accepts would break clients that work without the gateway.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any

import orjson
from jinja2.defaults import DEFAULT_NAMESPACE

from ...errors import ApiError, bad
from ..offload import TakesLong, event_loop
from ..prompt import CHAT, COMPLETIONS, EMBEDDINGS, LONGEST_RESPONSE_ID, MESSAGES, RESPONSES, Prompt
from ..quirks import NEWEST, VersionQuirks
from .conversation import Unknown, Unroutable, has_media, tool_schemas
from .structure import MOST_OBJECTS, MOST_STRINGS, MOST_VALUES, arguments_too_much, too_much

_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
_WHOLE = re.compile(r"\s*[+-]?\d+(?:_\d+)*(?:\.0*)?\s*", re.ASCII)
# Fields whose strings also go to metrics, logs and other requests, and so must be encodable as UTF-8.
_NAMES = ("model", "cache_salt")
# Headers in which clients name the session of a request; the first one that is not empty is used. The headers of
# routers come first (vllm-router, smg, Dynamo), then those of agents and proxies (OpenCode, Claude Code, Qwen Code,
# Codex in two spellings, LiteLLM).
SESSION_HEADERS = (
    "x-session-id", "x-smg-routing-key", "x-dynamo-session-id", "x-session-affinity", "x-opencode-session",
    "x-claude-code-session-id", "x-qwen-code-session-id", "session-id", "session_id", "thread-id",
    "x-litellm-session-id",
)  # fmt: skip
# Members of the body that name the session where no header does; Claude Code puts the session into `user_id`.
_SESSION_MEMBERS = (
    ("session_id",), ("prompt_cache_key",), ("session_params", "session_id"),
    ("nvext", "agent_context", "trajectory_id"), ("metadata", "session_id"), ("metadata", "user_id"),
    ("safety_identifier",), ("user",),
)  # fmt: skip
_MAX_TOKEN_ID = 0xFFFFFFFF
# vLLM refuses integers outside this range; older releases answer them with a 5xx status.
_LEAST, _MOST = -(2**63), 2**64 - 1
_BRIEF_IDS = 4096  # the most ids or prompts that are checked on the event loop: 0.6 us each
_LONGEST_NUMBER = 100  # characters of an integer that is written as a string; 64 bits take 20
# vLLM's default limit on `n` (VLLM_MAX_N_SEQUENCES). The gateway applies the limit to the sequences of all prompts of a
# request together, while vLLM checks `n` alone and accepts 1,024 prompts. vLLM ignores `best_of` (0.28 and 0.32 tried).
MOST_SEQUENCES = 16_384
UNKNOWN_CONTEXT = 1_000_000  # tokens; used in place of a context length that is not known
# The most characters of a session name; a longer name is replaced by its SHA-256.
_LONG_SESSION = 256
# Fields that engines read as integers and the gateway only forwards.
_INTEGERS = frozenset({
    "best_of", "logprobs", "max_logprobs", "max_tool_calls", "min_tokens", "priority", "prompt_logprobs", "seed",
    "stream_interval", "thinking_token_budget", "top_k", "top_logprobs", "truncate_prompt_tokens",
})  # fmt: skip
_INTEGERS_OF = {
    RESPONSES: frozenset({"max_tool_calls", "priority", "seed", "stream_interval", "top_k", "top_logprobs"}),
    MESSAGES: frozenset({"top_k"}),
    EMBEDDINGS: frozenset({"dimensions", "priority", "truncate_prompt_tokens"}),
}
# Fields that most requests lack; where all are absent, `_seldom_given` is skipped.
_SELDOM = _INTEGERS.union(*_INTEGERS_OF.values()) | {
    "stream_options", "n", "echo", "cache_salt", *[path[0] for path in _SESSION_MEMBERS],
}  # fmt: skip


class ExactFloat(float):
    """A float that a request's JSON writes with a decimal point or an exponent, so engines read the same value.

    Any other float may be a long integer that the faster parser has rounded.
    """


def parse(body: bytes, context: int = 0) -> tuple[dict[str, Any], str]:
    """Parse a body that must hold a JSON object. Raises ApiError.

    Returns the object, and a note that says what is unusual about the JSON, "" for ordinary JSON. `context`: the
    model's context length in tokens, which is added to the limit on the number of values, so that a prompt of token ids
    is not refused.
    """
    large = len(body) > MOST_OBJECTS
    if large:
        _bounded(too_much(body, context), context)
    note = ""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            request = _as_python_reads(body, context)
        except UnicodeDecodeError as wrong:
            raise bad(f"the body is not valid JSON: byte {wrong.start} is not {wrong.encoding}") from None
        except (ValueError, RecursionError):
            raise bad(f"the body is not valid JSON: {error}") from None
        note = f"JSON that only Python reads ({error})"
    if type(request) is not dict:
        raise bad("the body must be a JSON object")
    if large:
        _bounded(arguments_too_much(request, context), context)
    if note:
        for name in _NAMES:
            if isinstance(request.get(name), str):
                request[name] = request[name].encode("utf-8", "replace").decode()
    return request, note


def _as_python_reads(body: bytes, context: int) -> Any:
    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):
        body = body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
        _bounded(too_much(body, context), context)
    return json.loads(body)


def _bounded(too_much: bool, context: int) -> None:
    if too_much:
        raise bad(
            f"the body holds more than {MOST_OBJECTS:,} objects, lists and members, {MOST_STRINGS:,} strings or {MOST_VALUES + context:,} values "
            "in all: send fewer of them in a request"
        )


def parse_exactly(body: bytes) -> dict[str, Any]:
    """Parse a body as Python does: integers of any length, and an ExactFloat for any other number.

    Takes several times as long as `parse`. It is used only for the few bodies in which `conversation.require_exact`
    finds a number that `parse` may have rounded.
    """
    return json.loads(body, parse_float=ExactFloat)


def read_options(
    path: str,
    request: dict[str, Any],
    headers: Mapping[str, str] | None,
    adapters: Collection[str],
    context: int | None,
) -> Prompt:
    """Return a Prompt with the options of a request (model, streaming, output limit, session, choices) but no tokens.

    `path`: the API path; `request`: the parsed body; `adapters`: the names of the LoRA adapters. `context`: the model's
    context length in tokens, which the output limit must not exceed, or None where that is not to be checked. Raises
    ApiError for invalid options.
    """
    get = request.get
    model = get("model")
    if model is not None and type(model) is not str:
        raise bad("'model' must be a string", "model")
    prompt = Prompt(path, model or "")
    if model in adapters:
        prompt.adapter = model
    stream = get("stream")
    if stream is not None:
        prompt.stream = stream if type(stream) is bool else boolean(stream, "stream")
    if path in (RESPONSES, MESSAGES):
        prompt.include_usage = True  # streams of these APIs always end with the usage
        prompt.background = path == RESPONSES and bool(get("background"))
        previous = get("previous_response_id")
        if type(previous) is str and 0 < len(previous) <= LONGEST_RESPONSE_ID:
            prompt.previous_response = previous
    key = "max_completion_tokens"
    limit = get(key) if path == CHAT else None
    if limit is None:
        key = "max_output_tokens" if path == RESPONSES else "max_tokens"
        limit = get(key) if path != EMBEDDINGS else None
    prompt.max_tokens = wanted = count(limit, "max_tokens")
    session = next(filter(None, map(headers.get, SESSION_HEADERS)), None) if headers else None
    if not _SELDOM.isdisjoint(request):
        session = _seldom_given(prompt, request, session)
    if session is not None:
        encoded = session.encode("utf-8", "replace")
        prompt.session = sha256(encoded).hexdigest() if len(session) > _LONG_SESSION else encoded.decode()
    prompts = get("prompt" if path == COMPLETIONS else "input") if path in (COMPLETIONS, EMBEDDINGS) else None
    listed = prompts is not None and _is_list(prompts)
    if listed or prompt.n > 1:
        prompt.several = True
        prompt.copies = 0 if listed else prompt.n
        prompt.sequences = prompt.n * (len(prompts) if listed else 1)
    if listed or prompt.n > 1 or "best_of" in request:
        refuse_sequences(path, request, prompt.n)
    if context is not None and wanted is not None and wanted > context:
        raise ApiError(
            400,
            f"{key}={wanted} cannot be greater than max_model_len={context}. Please request fewer output tokens.",
            param=key,
        )
    return prompt


def _is_list(prompts: Any) -> bool:
    """Return whether `prompts` is a list of two or more prompts, not one prompt given as a list of token ids."""
    if type(prompts) is not list or len(prompts) < 2 or type(prompts[0]) is int:
        return False
    return type(prompts[0]) is list or all(type(one) is str for one in prompts)


def _seldom_given(prompt: Prompt, request: dict[str, Any], session: str | None) -> str | None:
    """Read fields that most requests lack, such as `n`, into the prompt; return the session or None.

    `session`: the session that the request headers name, or None. It takes precedence over one in the body. Raises
    ApiError.
    """
    get = request.get
    if prompt.path in (CHAT, COMPLETIONS):  # vLLM ignores these fields in the other APIs
        options = get("stream_options")
        if options is not None:
            if type(options) is not dict:
                raise bad("'stream_options' must be an object", "stream_options")
            prompt.include_usage = boolean(options.get("include_usage") or False, "stream_options.include_usage")
        prompt.n = count(get("n"), "n") or 1
        prompt.reads_cache = not _wants_prompt_logprobs(request)
    _refuse_long_integers(request, _INTEGERS_OF.get(prompt.path, _INTEGERS))
    salt = get("cache_salt")
    if salt is not None and type(salt) is not str:
        raise bad("'cache_salt' must be a string", "cache_salt")
    if not session:
        for key, *inner in _SESSION_MEMBERS:
            value = get(key)
            for name in inner:
                value = value.get(name) if type(value) is dict else None
            if type(value) is str and value:
                return value
    return session


def refuse_sequences(path: str, request: Mapping[str, Any], n: int) -> None:
    """Raise ApiError if a request asks for more than 16,384 sequences (MOST_SEQUENCES), which may harm a replica.

    A request asks for `n` sequences, or `best_of` if that is more, for each of its prompts.
    """
    if path not in (CHAT, COMPLETIONS):
        return
    times, key = max((n, "n"), (integer(request.get("best_of")) or 1, "best_of"), key=lambda one: one[0])
    if times > MOST_SEQUENCES:
        raise ApiError(400, f"{key} must be at most {MOST_SEQUENCES}, got {times}", param=key)
    prompts = _count_prompts(request) if path == COMPLETIONS else 1
    if prompts * times > MOST_SEQUENCES:
        raise ApiError(
            400,
            f"{prompts:,} prompts with {key}={times} are {prompts * times:,} sequences: more than the {MOST_SEQUENCES:,} that a "
            f"request may ask for. Send at most {MOST_SEQUENCES // times:,} prompts in a request",
            param="prompt" if times == 1 or prompts > MOST_SEQUENCES else key,
        )


def refuse_invocation(body: bytes) -> None:
    """Raise ApiError if a SageMaker invocation asks for more than 16,384 sequences (MOST_SEQUENCES).

    The body may be a completion or a chat. A body that cannot be parsed is left to the engine to refuse.
    """
    try:
        request, _ = parse(body, UNKNOWN_CONTEXT)
    except ApiError:
        return
    refuse_sequences(COMPLETIONS, request, integer(request.get("n")) or 1)


def _count_prompts(request: Mapping[str, Any]) -> int:
    given, embeds = request.get("prompt"), request.get("prompt_embeds")
    prompts = len(given) if _is_list(given) else given is not None
    return max(1, prompts + (len(embeds) if type(embeds) is list else 0))


def _wants_prompt_logprobs(request: dict[str, Any]) -> bool:
    """Return whether the request asks for logprobs of its prompt's tokens.

    Cached KV blocks hold no logprobs, so vLLM computes the whole prompt for such a request, and then caches it.
    """
    if request.get("prompt_logprobs") is not None:
        return True
    # With `echo` the prompt gets as many logprobs as the answer: by default none in completions and 0 in chat. With 0
    # the logprobs of the prompt's own tokens are still computed. vLLM 0.32 reads null as 0, vLLM 0.28 as none.
    return bool(request.get("echo")) and ("messages" in request or request.get("logprobs") is not None)


def boolean(value: Any, key: str) -> bool:
    """Return `value` as a boolean, in all spellings that pydantic accepts ("yes", 1). Raises ApiError."""
    if type(value) is bool:
        return value
    if isinstance(value, str) and (said := value.lower()) in _TRUE | _FALSE:
        return said in _TRUE
    if type(value) in (int, float) and value in (0, 1):
        return bool(value)
    raise bad(f"'{key}' must be true or false", key)


def integer(value: Any) -> int | None:
    """Return `value` as an integer, in all spellings that pydantic accepts ("16", 1.0).

    Returns None for any other value, and for an integer that exceeds 64 bits.
    """
    if isinstance(value, str):
        value = int(value.partition(".")[0]) if len(value) <= _LONGEST_NUMBER and _WHOLE.fullmatch(value) else None
    elif isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return int(value) if isinstance(value, int) and _LEAST <= value <= _MOST else None


def count(value: Any, key: str) -> int | None:
    """Return `value` as an integer of at least 0, or None for null. Raises ApiError, naming the field `key`."""
    if value is None or (type(value) is int and 0 <= value <= _MOST):
        return value
    number = integer(value)
    if number is None or number < 0:
        raise bad(f"'{key}' must be an integer of at least 0 and at most 64 bits", key)
    return number


def _refuse_long_integers(request: dict[str, Any], fields: frozenset[str]) -> None:
    """Raise ApiError if one of these fields holds a number of more than 64 bits, which no engine's integer can hold.

    Other faults in the fields are left to the engine to refuse.
    """
    for key in fields & request.keys():
        value = request[key]
        if isinstance(value, str):
            beyond = len(value) > _LONGEST_NUMBER or (_WHOLE.fullmatch(value) is not None and integer(value) is None)
        else:
            beyond = isinstance(value, int | float) and not _LEAST <= value <= _MOST
        if beyond:
            raise bad(f"'{key}' must be an integer of at most 64 bits", key)


def prompts_of(given: Any, key: str) -> list[str | bytes]:
    """Return the prompts that a request's field holds, each as a text or as token ids (uint32 bytes).

    `given`: the field's value, which is a text, a list of texts, a list of token ids, or a list of such lists. As in
    vLLM, a list that mixes strings and other values is a list of token ids: ["5", 6] is two ids. `key`: the field's
    name, for errors. Raises ApiError, and TakesLong on the event loop for a list that takes long to check.
    """
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if len(given) > _BRIEF_IDS and event_loop.holds:
            raise TakesLong
        if not isinstance(given[0], (str, list)):
            return [packed(given, key)]
        if all(isinstance(one, str) for one in given):
            return given
        if all(isinstance(one, list) and one for one in given):
            return [packed(one, key) for one in given]
        if isinstance(given[0], str):
            return [packed(given, key)]
    raise bad(f"'{key}' must be a string, a list of strings, a list of token ids or a list of such lists", key)


def packed(ids: list[Any], key: str) -> bytes:
    """Return token ids as uint32 bytes in native byte order. Raises ApiError, naming the field `key`."""
    if not all(type(one) is int for one in ids):
        ids = [integer(one) for one in ids]
    if not all(one is not None and 0 <= one <= _MAX_TOKEN_ID for one in ids):
        raise bad(f"'{key}': token ids must be integers of at least 0", key)
    return array("I", ids).tobytes()


@dataclass(slots=True)
class Chat:
    """A conversation to render, in the form to which the request bodies of all APIs are converted.

    `messages`: the messages of a chat request; `tools`: the tools as the template gets them; `variables`: the template
    variables, or None if the request leaves all of them at their defaults.
    """

    messages: Any
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any] | None
    special: bool = False  # the tokenizer adds its special tokens to the rendered text
    # The API passes tool calls through vLLM's schema, which puts their keys in its own order.
    by_schema: bool = True
    # The roles of the messages, if each message consists of a known role and a text only; set when it is rendered.
    roles: tuple[str, ...] | None = None
    body: bytes = b""  # the request body
    unknown: Unknown | None = None  # why what comes after `messages` in the request cannot be converted
    rest: Sequence[Any] = ()  # if `unknown` is set: the request's messages or items after `messages`, as received
    at: datetime | None = None  # the time that the template prints; None: the time by the engines' clock


_ABOUT_RENDERING = frozenset(
    """
    add_generation_prompt continue_final_message documents reasoning_effort chat_template_kwargs chat_template
    add_special_tokens
    """.split()
)


def from_chat(request: dict[str, Any], quirks: VersionQuirks = NEWEST) -> Chat:
    """Return the conversation of a `/v1/chat/completions` body. Raises ApiError or Unroutable.

    `quirks`: how the engine's version differs from the newest one.
    """
    tools = request.get("tools")
    if tools is not None:
        tools = tool_schemas(tools, quirks.tools_as_given) if tools or quirks.refuses_alike else None
    if _ABOUT_RENDERING.isdisjoint(request):
        return Chat(request.get("messages"), tools, None)
    return _steered(request, tools, True, request.get("reasoning_effort"), request.get("documents"))


def from_embeddings(request: dict[str, Any]) -> Chat:
    """Return the conversation of a `/v1/embeddings` body that has messages. Raises ApiError or Unroutable.

    The defaults differ from those of a chat request: no generation prompt, and neither tools nor documents.
    """
    return _steered(request, None, False)


def _steered(request: dict[str, Any], tools: Any, add_prompt: bool, effort: Any = None, documents: Any = None) -> Chat:
    """Return a request's conversation with the rendering options from its fields. Raises ApiError or Unroutable.

    `tools`: the tools as the template gets them; `add_prompt`: the default of `add_generation_prompt`; `effort` and
    `documents`: the values of the template variables `reasoning_effort` and `documents`.
    """
    if request.get("chat_template") is not None:
        raise Unroutable("the request brings its own chat template")
    add_prompt, go_on, special = (
        boolean(request.get(key, default), key)
        for key, default in (
            ("add_generation_prompt", add_prompt),
            ("continue_final_message", False),
            ("add_special_tokens", False),
        )
    )
    variables = template_variables(request, add_prompt, go_on, effort, documents)
    return Chat(request.get("messages"), variables.pop("tools", tools), variables, special)


def template_variables(
    request: dict[str, Any], add_prompt: bool, go_on: bool, effort: Any, documents: Any = None
) -> dict[str, Any]:
    """Return the variables for a chat template: those in `chat_template_kwargs`, overridden by the arguments.

    `add_prompt`, `go_on`, `effort` and `documents`: the values of `add_generation_prompt`, `continue_final_message`,
    `reasoning_effort` and `documents`. An `effort` also sets `enable_thinking`, unless `chat_template_kwargs` sets it.
    Variables whose value is None or "auto" are left out, and so are those with the name of a Jinja global. Raises
    ApiError, or Unroutable if the request brings a chat template.
    """
    own = request.get("chat_template_kwargs")
    if own is not None and not isinstance(own, dict):
        raise bad("'chat_template_kwargs' must be an object", "chat_template_kwargs")
    own = own or {}
    if own.get("chat_template") is not None:
        raise Unroutable("the request brings its own chat template")
    said = {"reasoning_effort": effort, "documents": documents}
    if effort is not None and "enable_thinking" not in own:
        said["enable_thinking"] = effort != "none"
    variables = {
        key: value
        for key, value in {**own, **{k: v for k, v in said.items() if v is not None}}.items()
        if value is not None and value != "auto" and key not in DEFAULT_NAMESPACE
    }
    return {**variables, "add_generation_prompt": add_prompt, "continue_final_message": go_on}


def may_cut(request: Mapping[str, Any]) -> bool:
    """Return whether the request asks the engine to truncate its prompt."""
    return request.get("truncate_prompt_tokens") is not None or request.get("truncation", "disabled") != "disabled"


def most_ids(given: Any) -> int:
    """Return the length in tokens of the longest prompt that is given as token ids, or 0 if none is.

    `given`: the value of a request's `prompt` or `input`, not yet checked.
    """
    if type(given) is not list or not given or type(given[0]) is str:
        return 0
    return len(given) if type(given[0]) is not list else max(len(one) for one in given if type(one) is list)


def forwarded_ids(request: dict[str, Any], past_media: bool) -> bytes | None:
    """Return the prompt's token ids in `kv_transfer_params`, which engines use in place of the messages, or None.

    The ids are returned as uint32 bytes. `past_media`: the engine uses the ids even if the request has images, sound,
    video or `echo`, as vLLM up to 0.31 does. If False, the result is None for such requests. Raises ApiError for
    invalid ids.
    """
    if not past_media and (request.get("echo") or has_media(request.get("messages"))):
        return None
    transfer = request.get("kv_transfer_params")
    ids = transfer.get("prompt_token_ids") if isinstance(transfer, dict) else None
    return packed(ids, "kv_transfer_params.prompt_token_ids") if isinstance(ids, list) and ids else None

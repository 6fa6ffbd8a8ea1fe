"""OpenAI request bodies: JSON, options, prompts that need no rendering, and conversations to render.

The options are model, streaming, output limits, session and number of choices. Bodies of other APIs are converted to
this form.

vLLM reads JSON as Python does (NaN, lone surrogates, UTF-16) and fields as pydantic does ("true", 1.0, "16"). A gateway
that refused what the engine behind it accepts would break clients that work without it.
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
# Strings that also go to metrics, logs and other requests, where they must be encodable.
_NAMES = ("model", "cache_salt")
# Headers in which clients name the session of a request; the first that is not empty counts. Routers' first: those of
# vllm-router, smg and Dynamo, then those of agents and proxies: OpenCode, Claude Code, Codex (two spellings), LiteLLM.
SESSION_HEADERS = (
    "x-session-id", "x-smg-routing-key", "x-dynamo-session-id", "x-session-affinity", "x-opencode-session",
    "x-claude-code-session-id", "x-qwen-code-session-id", "session-id", "session_id", "thread-id",
    "x-litellm-session-id",
)  # fmt: skip
# Then members of the body; Claude Code puts the session into `user_id`.
_SESSION_MEMBERS = (
    ("session_id",), ("prompt_cache_key",), ("session_params", "session_id"),
    ("nvext", "agent_context", "trajectory_id"), ("metadata", "session_id"), ("metadata", "user_id"),
    ("safety_identifier",), ("user",),
)  # fmt: skip
_MAX_TOKEN_ID = 0xFFFFFFFF
_LEAST, _MOST = -(2**63), 2**64 - 1  # vLLM refuses integers beyond; older releases answer 5xx
_BRIEF_IDS = 4096  # ids or prompts: 0.6 us each
_LONGEST_NUMBER = 100  # characters; 64 bits take 20
# vLLM's default limit on `n` (VLLM_MAX_N_SEQUENCES). The gateway applies it to all prompts of a request together, while
# vLLM checks `n` alone and accepts 1,024 prompts. vLLM ignores `best_of` (0.28 and 0.32 tried).
MOST_SEQUENCES = 16_384
UNKNOWN_CONTEXT = 1_000_000  # tokens; stands for a context length that is unknown
# Characters of a session name that are kept; a longer one is replaced by its SHA-256.
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
    """A number that was written with a decimal point or an exponent, so that an engine reads it as the same float."""


def parse(body: bytes, context: int = 0) -> tuple[dict[str, Any], str]:
    """Parse a body that must hold a JSON object. Raises ApiError.

    Returns the object and a note on what is unusual about the JSON, "" for ordinary JSON. `context`: the most tokens
    that a prompt may have, as far as is known; it raises the limit on the number of values.
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

    Takes several times as long as `parse`, so it serves only the few bodies in which `require_exact` finds a number
    that may have been rounded.
    """
    return json.loads(body, parse_float=ExactFloat)


def read_options(
    path: str,
    request: dict[str, Any],
    headers: Mapping[str, str] | None,
    adapters: Collection[str],
    context: int | None,
) -> Prompt:
    """Read everything of a request but its tokens into a Prompt. Raises ApiError.

    `path`: the API path; `adapters`: names of the LoRA adapters; `context`: the model's context length in tokens, or
    None where it is not known.
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
        prompt.include_usage = True  # their streams always end with it
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
    """Return whether `prompts` is a list of two or more prompts, as opposed to one prompt."""
    if type(prompts) is not list or len(prompts) < 2 or type(prompts[0]) is int:
        return False
    return type(prompts[0]) is list or all(type(one) is str for one in prompts)


def _seldom_given(prompt: Prompt, request: dict[str, Any], session: str | None) -> str | None:
    """Read the fields of `_SELDOM` into the prompt and return the session. Raises ApiError.

    `session`: the session that the headers name, if any, which takes precedence over one in the body.
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
    """Raise ApiError if a request asks for more sequences than MOST_SEQUENCES.

    Each prompt counts `n` times, or `best_of` times if that is more. Such a request reaches no replica, because it may
    harm one.
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
    """Apply `refuse_sequences` to a SageMaker invocation, whose body may be a completion or a chat.

    A body that cannot be parsed is left to the engine to refuse.
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
    """Return whether the request needs logprobs of its prompt.

    Cached KV blocks carry no logprobs, so vLLM computes the whole prompt for such a request (and stores it).
    """
    if request.get("prompt_logprobs") is not None:
        return True
    # With `echo` the prompt gets as many logprobs as the answer: by default none in completions and 0 in chat, and 0
    # also counts as asking for them. vLLM 0.32 reads null as 0, vLLM 0.28 as none.
    return bool(request.get("echo")) and ("messages" in request or request.get("logprobs") is not None)


def boolean(value: Any, key: str) -> bool:
    """Return `value` as pydantic reads a boolean. Raises ApiError, which names `key`."""
    if type(value) is bool:
        return value
    if isinstance(value, str) and (said := value.lower()) in _TRUE | _FALSE:
        return said in _TRUE
    if type(value) in (int, float) and value in (0, 1):
        return bool(value)
    raise bad(f"'{key}' must be true or false", key)


def integer(value: Any) -> int | None:
    """Return `value` as an integer, as pydantic reads it, or None if it is none or exceeds 64 bits."""
    if isinstance(value, str):
        value = int(value.partition(".")[0]) if len(value) <= _LONGEST_NUMBER and _WHOLE.fullmatch(value) else None
    elif isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return int(value) if isinstance(value, int) and _LEAST <= value <= _MOST else None


def count(value: Any, key: str) -> int | None:
    """Return `value` as an integer of at least 0, or None for null. Raises ApiError."""
    if value is None or (type(value) is int and 0 <= value <= _MOST):
        return value
    number = integer(value)
    if number is None or number < 0:
        raise bad(f"'{key}' must be an integer of at least 0 and at most 64 bits", key)
    return number


def _refuse_long_integers(request: dict[str, Any], fields: frozenset[str]) -> None:
    """Raise ApiError for numbers that no engine's integer can hold; any other fault is left to the engine."""
    for key in fields & request.keys():
        value = request[key]
        if isinstance(value, str):
            beyond = len(value) > _LONGEST_NUMBER or (_WHOLE.fullmatch(value) is not None and integer(value) is None)
        else:
            beyond = isinstance(value, int | float) and not _LEAST <= value <= _MOST
        if beyond:
            raise bad(f"'{key}' must be an integer of at most 64 bits", key)


def prompts_of(given: Any, key: str) -> list[str | bytes]:
    """Return prompts given as text, texts, token ids or lists of ids, each as a text or as packed ids.

    Like vLLM, read a list of strings and other values as token ids: ["5", 6] is two ids. `key` names the field in
    errors. Raises ApiError, and TakesLong on the event loop for a list that takes long to check.
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
    """Return token ids as uint32 in native byte order. Raises ApiError, which names `key`."""
    if not all(type(one) is int for one in ids):
        ids = [integer(one) for one in ids]
    if not all(one is not None and 0 <= one <= _MAX_TOKEN_ID for one in ids):
        raise bad(f"'{key}': token ids must be integers of at least 0", key)
    return array("I", ids).tobytes()


@dataclass(slots=True)
class Chat:
    """A conversation to render.

    `tools`: as the template gets them; `variables`: the template's, or None if the request leaves them at the defaults.
    """

    messages: Any
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any] | None
    special: bool = False  # the tokenizer adds its special tokens to the rendered text
    by_schema: bool = True  # tool calls went through vLLM's schema, see `conversation.conversation`
    roles: tuple[str, ...] | None = None  # set where each message consists of a known role and a text
    body: bytes = b""  # the request body
    unknown: Unknown | None = None  # why the conversation after `messages` cannot be converted
    rest: Sequence[Any] = ()  # where `unknown` is set: the messages or items after `messages`, as received
    at: datetime | None = None  # the time that the template prints; None: the engines' clock


_ABOUT_RENDERING = frozenset(
    """
    add_generation_prompt continue_final_message documents reasoning_effort chat_template_kwargs chat_template
    add_special_tokens
    """.split()
)


def from_chat(request: dict[str, Any], quirks: VersionQuirks = NEWEST) -> Chat:
    """Return the chat of a body of `/v1/chat/completions`."""
    tools = request.get("tools")
    if tools is not None:
        tools = tool_schemas(tools, quirks.tools_as_given) if tools or quirks.refuses_alike else None
    if _ABOUT_RENDERING.isdisjoint(request):
        return Chat(request.get("messages"), tools, None)
    return _steered(request, tools, True, request.get("reasoning_effort"), request.get("documents"))


def from_embeddings(request: dict[str, Any]) -> Chat:
    """Return the chat of a body of `/v1/embeddings` that has messages.

    Its defaults differ from a chat's: no generation prompt, and neither tools nor documents.
    """
    return _steered(request, None, False)


def _steered(request: dict[str, Any], tools: Any, add_prompt: bool, effort: Any = None, documents: Any = None) -> Chat:
    """Return the chat of a request with fields that steer the rendering; `add_prompt`: a default."""
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
    """Return the template's variables: `chat_template_kwargs`, overridden by what the request's fields set.

    Values of None and "auto" count as unset, and names of Jinja's globals do not reach the template. `add_prompt`,
    `go_on` and `effort` are the fields `add_generation_prompt`, `continue_final_message` and `reasoning_effort`. Raises
    ApiError or Unroutable.
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
    """Return the length in tokens of the longest prompt given as token ids, 0 if there is none."""
    if type(given) is not list or not given or type(given[0]) is str:
        return 0
    return len(given) if type(given[0]) is not list else max(len(one) for one in given if type(one) is list)


def forwarded_ids(request: dict[str, Any], past_media: bool) -> bytes | None:
    """Return the packed prompt ids in `kv_transfer_params`, which engines use in place of the messages, or None.

    `past_media`: the engine uses them even if the request has media or `echo`, as vLLM up to 0.31 does; if False, the
    result is None for such requests.
    """
    if not past_media and (request.get("echo") or has_media(request.get("messages"))):
        return None
    transfer = request.get("kv_transfer_params")
    ids = transfer.get("prompt_token_ids") if isinstance(transfer, dict) else None
    return packed(ids, "kv_transfer_params.prompt_token_ids") if isinstance(ids, list) and ids else None

"""From a request's JSON to prompts and limits, per endpoint, with vLLM's checks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from . import translate
from .tokens import RequestError, Tokens, flag

# vLLM's VLLM_MAX_N_SEQUENCES and VLLM_MAX_COMPLETION_PROMPTS, and its words when they are passed (0.32 asked). It
# ignores `best_of`.
MOST_SEQUENCES, MOST_PROMPTS = 16_384, 1024
MOST_LOGPROBS = 20  # of --max-logprobs
SAMPLING: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: value >= 0, "non-negative"),
    ("top_p", lambda value: 0 < value <= 1, "in (0, 1]"),
    ("presence_penalty", lambda value: -2 <= value <= 2, "in [-2, 2]"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "in [-2, 2]"),
)
TYPED = (("model", str, "a string"), ("chat_template", str, "a string"), ("kv_transfer_params", dict, "an object"))


@dataclass(slots=True)
class Asked:
    """What the engine is asked for: each prompt `n` times, at most `max_tokens` (None: as many as fit) each."""

    prompts: list[list[int]]
    max_tokens: int | None
    n: int = 1
    stream: bool = False
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: int = 0
    salt: str | None = None
    clip: bool = False  # a max_tokens beyond the context is cut, not refused
    text: bool = True  # the prompts came as text, not as token ids
    reads_cache: bool = True  # what is cached has no logprobs: where the prompt's are wanted, all of it is computed
    priority: int = 0
    limit: str = "max_tokens"  # what `max_tokens` was called


def parse(raw: bytes) -> dict:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    for name, type_, called in TYPED:
        if not isinstance(body.get(name), type_ | None):
            raise RequestError(f"`{name}` must be {called}", param=name)
    return body


def _whole_number(body: dict, name: str, least: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < least:
        raise RequestError(f"`{name}` must be a whole number of at least {least}, got {value!r}", param=name)
    return value


def _check_sampling(body: dict) -> None:
    """What vLLM's pydantic model and its SamplingParams refuse. A text that reads as a number passes for one."""
    for name, fits, must in SAMPLING:
        value = body.get(name)
        if value is None:
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise RequestError(f"`{name}` must be a number, got {value!r}", param=name) from None
        if not fits(number):
            raise RequestError(f"{name} must be {must}, got {number}.", param=name)


def _common(body: dict, prompts: list[list[int]], max_tokens: int | None, stop: Any) -> Asked:
    _check_sampling(body)
    if not all(prompts):
        raise RequestError("the prompt is empty: it must have at least one token", param="prompt")
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list | None) or not all(isinstance(word, str) for word in stop or ()):
        raise RequestError("`stop` must be a string or a list of strings", param="stop")
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError("Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
    count = _whole_number(body, "n", 1) or 1
    if count > MOST_SEQUENCES:
        raise RequestError(
            f"n must be at most {MOST_SEQUENCES}, got {count}. To increase this limit, set the "
            "VLLM_MAX_N_SEQUENCES environment variable."
        )
    priority = body.get("priority")
    if type(priority) not in (int, type(None)):
        raise RequestError(f"`priority` must be a whole number, got {priority!r}", param="priority")
    return Asked(
        prompts,
        max_tokens,
        count,
        bool(body.get("stream")),
        [word for word in stop or () if word],
        bool(body.get("ignore_eos")),
        _whole_number(body, "min_tokens", 0) or 0,
        salt,
        priority=priority or 0,
    )


def _check_logprobs(body: dict, wanted: str, prompt_wanted: Any, sampled: bool, tokens: Tokens) -> None:
    """What vLLM checks of logprobs. `wanted`: the field that says how many; `prompt_wanted`: how many of the prompt
    where `prompt_logprobs` does not say; `sampled`: whether those of the answer are asked for."""
    for name in ("prompt_logprobs", wanted):
        count = body.get(name)
        if count is None:
            continue
        if type(count) is not int:
            raise RequestError(f"`{name}` must be an integer.", param=name)
        if name == "prompt_logprobs" and body.get("stream") and (count > 0 or count == -1):
            raise RequestError("`prompt_logprobs` are not available when `stream=True`.", param=name)
        if count < -1:
            raise RequestError(f"`{name}` must be a positive value or -1.", param=name)
    count = body.get(wanted)
    if wanted == "top_logprobs" and count and not body.get("logprobs"):
        raise RequestError("when using `top_logprobs`, `logprobs` must be set to true.", param=wanted)
    prompt = body.get("prompt_logprobs")
    for of, param, asked in (
        ("sample", "logprobs", count if sampled else None),
        ("prompt", "prompt_logprobs", prompt if prompt is not None else prompt_wanted),
    ):
        number = tokens.vocab_size if asked == -1 else asked or 0
        if number > MOST_LOGPROBS:
            raise RequestError(
                f"Requested {of} logprobs of {number}, which is greater than max allowed: {MOST_LOGPROBS}", param=param
            )


def chat(body: dict, tokens: Tokens) -> Asked:
    _check_logprobs(
        body, "top_logprobs", body.get("top_logprobs") if body.get("echo") else None, bool(body.get("logprobs")), tokens
    )
    _check_template(body)
    ids = _ids_beside(body)
    most = _whole_number(body, "max_completion_tokens", 1)
    wanted = most if most is not None else _whole_number(body, "max_tokens", 1)
    prompt = ids if ids is not None else _chat(body, tokens, bool(wanted))
    asked = _common(body, [prompt], wanted, body.get("stop"))
    asked.text = ids is None
    # with `echo`, 0 of them by default
    asked.reads_cache = body.get("prompt_logprobs") is None and not body.get("echo")
    if most is not None:
        asked.limit = "max_completion_tokens"
    return asked


def _check_template(body: dict) -> None:
    """An engine without --trust-request-chat-template takes no template from a request, be it empty."""
    own = body.get("chat_template_kwargs")
    if body.get("chat_template") is not None or (isinstance(own, dict) and own.get("chat_template") is not None):
        raise RequestError(
            "Chat template is passed with request, but --trust-request-chat-template is not set. Refused request with "
            "untrusted chat template."
        )


def _chat(body: dict, tokens: Tokens, outputs: bool, side: str = "left") -> list[int]:
    special = flag(body, "add_special_tokens", False)
    return tokens.truncated(tokens.chat(body), body, special, outputs, side)


def completion(body: dict, tokens: Tokens) -> Asked:
    _check_logprobs(body, "logprobs", body.get("logprobs") if body.get("echo") else None, True, tokens)
    # a prompt alone may be asked for with `echo`: vLLM makes one token then, and does not show it
    least, given = 0 if body.get("echo") else 1, body.get("prompt")
    most = _whole_number(body, "max_tokens", least)
    if isinstance(given, list) and len(given) > MOST_PROMPTS and (_is_text(given) or isinstance(given[0], list)):
        raise RequestError(
            f"prompt list length {len(given)} exceeds the maximum allowed count of {MOST_PROMPTS}. To increase "
            "this limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
            param="prompt",
        )
    special = flag(body, "add_special_tokens", True)
    prompts = texts(body.get("prompt"), tokens, special)
    prompts = _truncated(body["prompt"], prompts, body, tokens, special, most != 0)
    asked = _common(body, prompts, 16 if most is None else max(1, most), body.get("stop"))
    asked.reads_cache = body.get("prompt_logprobs") is None and not (
        body.get("echo") and body.get("logprobs") is not None
    )
    asked.text = _is_text(body["prompt"])
    return asked


def texts(prompt: Any, tokens: Tokens, add_special_tokens: bool, param: str = "prompt") -> list[list[int]]:
    """A prompt is text, ids, or a list of either. Strings are ids where not all are strings: ["5", 6] has two."""
    if isinstance(prompt, str):
        return [tokens.encode(prompt, add_special_tokens)]
    if isinstance(prompt, list) and prompt:
        if _is_text(prompt):
            return [tokens.encode(part, add_special_tokens) for part in prompt]
        if all(isinstance(part, list) for part in prompt):
            return [_ids(part, param) for part in prompt]
        return [_ids(prompt, param)]
    raise RequestError(f"`{param}` must be text, a list of texts, a list of token ids or a list of these", param=param)


def _truncated(
    given: Any, prompts: list[list[int]], body: dict, tokens: Tokens, special: bool, outputs: bool, side: str = "left"
) -> list[list[int]]:
    text = _is_text(given)
    return [tokens.truncated(ids, body, special and text, outputs, side) for ids in prompts]


def _is_text(prompt: Any) -> bool:
    """Whether it is a text, or nothing but texts."""
    return isinstance(prompt, str) or all(isinstance(part, str) for part in prompt)


def _ids(given: Any, param: str) -> list[int]:
    ids = [one if type(one) is int else _lax(one) for one in given] if isinstance(given, list) else [None]
    if not all(id is not None and 0 <= id < 1 << 32 for id in ids):
        raise RequestError(f"`{param}` holds something that is not a token id", param=param)
    return ids


def _lax(value: Any) -> int | None:
    """What reads as a whole number, as pydantic takes it for one; None for anything else."""
    try:
        number = int(value) if isinstance(value, str) else value
        return int(number) if isinstance(number, int) or number.is_integer() else None
    except (AttributeError, ValueError):
        return None


def _ids_beside(body: dict) -> list[int] | None:
    """The prompt's ids that a conversation was sent with: they count, and the messages do not."""
    given = body.get("kv_transfer_params")
    ids = given.get("prompt_token_ids") if isinstance(given, dict) else None
    return _ids(ids, "kv_transfer_params") if ids is not None else None


def embeddings(body: dict, tokens: Tokens) -> Asked:
    if body.get("messages") is not None:
        _check_template(body)
        prompts = [_chat({"add_generation_prompt": False, **body}, tokens, False, "right")]
    else:
        special = flag(body, "add_special_tokens", True)
        prompts = texts(body.get("input"), tokens, special, "input")
        prompts = _truncated(body["input"], prompts, body, tokens, special, False, "right")
    return _common({"cache_salt": body.get("cache_salt")}, prompts, 1, None)


def responses(body: dict, tokens: Tokens) -> Asked:
    if (
        before := body.get("previous_response_id")
    ) is not None:  # none is stored, as by vLLM without VLLM_ENABLE_RESPONSES_API_STORE=1
        raise RequestError(
            f"Response with id '{before}' not found.", 404, "invalid_request_error", "previous_response_id"
        )
    ids = _ids_beside(body)
    most = _whole_number(body, "max_output_tokens", 1)
    _check_template({"chat_template_kwargs": body.get("chat_template_kwargs")})
    prompt = ids if ids is not None else _chat(translate.responses(body), tokens, bool(most))
    asked = _common(body, [prompt], most, None)
    asked.clip, asked.limit, asked.text = True, "max_output_tokens", ids is None
    return asked


def anthropic(body: dict, tokens: Tokens) -> Asked:
    most = _whole_number(body, "max_tokens", 1)
    if most is None:
        raise RequestError("`max_tokens` is required", param="max_tokens")
    # Not of this API: vLLM ignores them
    body = {name: value for name, value in body.items() if name not in ("n", "priority")}
    ids = _ids_beside(body)
    _check_template({"chat_template_kwargs": body.get("chat_template_kwargs")})
    prompt = ids if ids is not None else tokens.chat(translate.anthropic(body))
    asked = _common(body, [prompt], most, body.get("stop_sequences"))
    asked.text = ids is None
    asked.limit = "max_completion_tokens"  # it becomes a chat
    return asked

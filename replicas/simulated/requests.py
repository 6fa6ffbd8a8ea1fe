"""The reading of requests: prompts and limits from a body's JSON, with those checks of vLLM that clients encounter."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError

from . import translate
from .tokens import RequestError, Tokens

Checked = TypeVar("Checked", bound=BaseModel)
Limit = Annotated[StrictInt, Field(ge=0)] | None


class Fields(BaseModel):
    """The fields of a request whose types and ranges are checked at all endpoints."""

    model: StrictStr | None = None
    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    max_output_tokens: Limit = None
    min_tokens: Limit = None
    n: Annotated[StrictInt, Field(ge=1, le=16_384)] | None = None  # vLLM's VLLM_MAX_N_SEQUENCES
    priority: StrictInt | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_sequences: list[StrictStr] | None = None
    cache_salt: Annotated[StrictStr, Field(min_length=1)] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Adapter(BaseModel):
    """A LoRA adapter to load or unload."""

    lora_name: Annotated[StrictStr, Field(min_length=1)]
    lora_path: StrictStr | None = None
    load_inplace: bool = False


@dataclass(slots=True)
class Asked:
    """A parsed request, in one form for all APIs: its prompts, limits and options."""

    prompts: list[list[int]]  # token ids
    max_tokens: int | None  # output tokens of each sequence; None: as many as fit
    n: int = 1  # sequences for each prompt
    stream: bool = False
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: int = 0
    salt: str | None = None
    clip: bool = False  # a max_tokens beyond the context is clipped, not refused
    text: bool = True  # the prompts came as text, not as token ids
    reads_cache: bool = True  # False computes the whole prompt for its logprobs, which cached tokens lack
    priority: int = 0
    limit: str = "max_tokens"  # the name of the request's field that gave `max_tokens`


def parse(raw: bytes) -> dict:
    """Return a request's body. Raises RequestError unless it is a JSON object with fields of the right types."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    checked(Fields, body)
    return body


def checked(model: type[Checked], body: dict) -> Checked:
    """Return a body as an object of `model`. Raises RequestError, which names the first field that is wrong."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise RequestError(f"`{name}`: {first['msg']}, got {first['input']!r}"[:300], param=name) from None


def _asked(body: dict, prompts: list[list[int]], limit: str, stop: Any, text: bool = True, least: int = 1) -> Asked:
    """Return the parsed request of a body whose prompts are tokenized already.

    `limit`: the name of the field that limits the output tokens; `least`: the lowest valid value of that field. `stop`:
    a stop string, or several. `text`: the prompts came as text.
    """
    if not all(prompts):
        raise RequestError("the prompt is empty: it must have at least one token", param="prompt")
    most = body.get(limit)
    if most is not None and most < least:
        raise RequestError(f"`{limit}` must be a whole number of at least {least}, got {most!r}", param=limit)
    return Asked(
        prompts,
        most,
        n=body.get("n") or 1,
        stream=bool(body.get("stream")),
        stop=[word for word in ([stop] if isinstance(stop, str) else stop or ()) if word],
        ignore_eos=bool(body.get("ignore_eos")),
        min_tokens=body.get("min_tokens") or 0,
        salt=body.get("cache_salt"),
        text=text,
        priority=body.get("priority") or 0,
        limit=limit,
    )


def _conversation(body: dict, tokens: Tokens, limit: str, stop: Any, translated: Callable[[dict], dict]) -> Asked:
    """Return the parsed request of a conversation: a chat, or a Responses or Messages body.

    If the body's `kv_transfer_params` have token ids, these are the prompt, and the messages are not read. `limit`: the
    name of the field that limits the output tokens. `translated(body)`: returns the chat body that vLLM makes of a body
    of this API.
    """
    ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if ids is not None:
        return _asked(body, [_ids(ids, "kv_transfer_params")], limit, stop, text=False)
    return _asked(body, [_chat(translated(body), tokens, bool(body.get(limit)))], limit, stop)


def _chat(body: dict, tokens: Tokens, outputs: bool, side: str = "left") -> list[int]:
    return tokens.truncated(tokens.chat(body), body, outputs, side)


def chat(body: dict, tokens: Tokens) -> Asked:
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    asked = _conversation(body, tokens, limit, body.get("stop"), lambda chat: chat)
    asked.reads_cache = body.get("prompt_logprobs") is None and not body.get("echo")
    return asked


def completion(body: dict, tokens: Tokens) -> Asked:
    given = body.get("prompt")
    special, outputs = body.get("add_special_tokens") is not False, body.get("max_tokens") != 0
    prompts = [tokens.truncated(ids, body, outputs) for ids in texts(given, tokens, special)]
    # with `echo` the prompt alone may be wanted: vLLM then generates one token and does not show it
    asked = _asked(body, prompts, "max_tokens", body.get("stop"), _is_text(given), 0 if body.get("echo") else 1)
    asked.max_tokens = 16 if asked.max_tokens is None else max(1, asked.max_tokens)
    echoes = body.get("echo") and body.get("logprobs") is not None
    asked.reads_cache = body.get("prompt_logprobs") is None and not echoes
    return asked


def texts(prompt: Any, tokens: Tokens, add_special_tokens: bool, param: str = "prompt") -> list[list[int]]:
    """Return the token ids of each prompt in `prompt`, which is a text, a list of ids, or a list of either.

    `param`: the name of the field, for messages.
    """
    if isinstance(prompt, str):
        return [tokens.encode(prompt, add_special_tokens)]
    if isinstance(prompt, list) and prompt:
        if _is_text(prompt):
            return [tokens.encode(part, add_special_tokens) for part in prompt]
        if all(isinstance(part, list) for part in prompt):
            return [_ids(part, param) for part in prompt]
        return [_ids(prompt, param)]
    raise RequestError(f"`{param}` must be text, a list of texts, a list of token ids or a list of these", param=param)


def _is_text(prompt: Any) -> bool:
    """Return whether a prompt is a text or a list of texts."""
    return isinstance(prompt, str) or all(isinstance(part, str) for part in prompt)


def _ids(given: Any, param: str) -> list[int]:
    if not isinstance(given, list) or not all(type(id) is int and 0 <= id < 1 << 32 for id in given):
        raise RequestError(f"`{param}` holds something that is not a token id", param=param)
    return given


def embeddings(body: dict, tokens: Tokens) -> Asked:
    if body.get("messages") is not None:
        prompts = [_chat({"add_generation_prompt": False, **body}, tokens, False, "right")]
    else:
        special = body.get("add_special_tokens") is not False
        given = texts(body.get("input"), tokens, special, "input")
        prompts = [tokens.truncated(ids, body, False, "right") for ids in given]
    return Asked(prompts, 1, salt=body.get("cache_salt"))


def responses(body: dict, tokens: Tokens) -> Asked:
    before = body.get("previous_response_id")
    if before is not None:  # none is stored, as in vLLM without VLLM_ENABLE_RESPONSES_API_STORE=1
        missing = f"Response with id '{before}' not found."
        raise RequestError(missing, 404, "invalid_request_error", "previous_response_id")
    asked = _conversation(body, tokens, "max_output_tokens", None, translate.responses)
    asked.clip = True
    return asked


def anthropic(body: dict, tokens: Tokens) -> Asked:
    if body.get("max_tokens") is None:
        raise RequestError("`max_tokens` is required", param="max_tokens")
    own = {name: value for name, value in body.items() if name not in ("n", "priority")}  # vLLM ignores these here
    asked = _conversation(own, tokens, "max_tokens", body.get("stop_sequences"), translate.anthropic)
    asked.limit = "max_completion_tokens"  # vLLM makes a chat of it, and names its field in errors
    return asked

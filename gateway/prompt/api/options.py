"""What a request says besides its prompt: the model, streaming, the limits of its output, the session, the choices.

These are fields of the body that all endpoints share, under the names that each of them uses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import Any

from ...errors import ApiError
from ..prompt import LONGEST_RESPONSE_ID, Prompt
from .fields import INTEGERS, bad, boolean, bounded_integers, count

# The paths whose bodies differ in how they name the prompt, the output limit, or the parameter at fault.
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"

# What vLLM allows `n` to be unless VLLM_MAX_N_SEQUENCES says otherwise. It ignores `best_of` (0.28 and 0.32 tried).
_MOST_SEQUENCES = 16_384
# Characters of what a client wrote that outlive the body: of a longer session the SHA-256 stands for it.
_LONG_SESSION = 256
# Fields that most requests have none of.
_SELDOM = (
    frozenset(
        {"stream_options", "n", "prompt_logprobs", "echo", "cache_salt", "session_id", "prompt_cache_key", "user"}
    )
    | INTEGERS
)


def read_options(
    path: str,
    request: dict[str, Any],
    headers: Mapping[str, str] | None,
    adapters: Collection[str],
    context: int | None,
) -> Prompt:
    """Return a Prompt that has everything but its tokens. Raises ApiError.

    `context`: the model's context length in tokens, None where it is not known.
    """
    get = request.get
    model = get("model")
    if model is None:
        model = ""
    elif type(model) is not str:
        raise bad("'model' must be a string", "model")
    prompt = Prompt(path, model)
    if model in adapters:
        prompt.adapter = model
    stream = get("stream")
    if stream is not None:
        prompt.stream = stream if type(stream) is bool else boolean(stream, "stream")
    if path in (RESPONSES, MESSAGES):
        prompt.include_usage = True  # their streams always end with it
        previous = get("previous_response_id")
        prompt.previous_response = (
            previous if type(previous) is str and 0 < len(previous) <= LONGEST_RESPONSE_ID else None
        )
    limit = get("max_completion_tokens")
    if limit is None:
        limit = get("max_output_tokens" if path == RESPONSES else "max_tokens")
    prompt.max_tokens = wanted = count(limit, "max_tokens")
    session = headers.get("x-session-id") if headers else None
    if not _SELDOM.isdisjoint(request):
        session = _seldom_given(prompt, request, session)
    if session is not None:
        long = len(session) > _LONG_SESSION
        prompt.session = sha256(session.encode("utf-8", "replace")).hexdigest() if long else session
    listed = path in (COMPLETIONS, EMBEDDINGS) and _is_list(get("prompt" if path == COMPLETIONS else "input"))
    if listed or prompt.n > 1:
        prompt.several = True
        prompt.copies = 0 if listed else prompt.n
    if prompt.n > _MOST_SEQUENCES or (context is not None and wanted is not None and wanted > context):
        _refuse_beyond_limits(prompt, request, context)
    return prompt


def _is_list(prompts: Any) -> bool:
    """Whether these are several prompts."""
    return type(prompts) is list and len(prompts) > 1 and type(prompts[0]) is not int


def _seldom_given(prompt: Prompt, request: dict[str, Any], session: str | None) -> str | None:
    """Read the fields of `_SELDOM`. Returns the session."""
    get = request.get
    options = get("stream_options")
    if options is not None:
        if type(options) is not dict:
            raise bad("'stream_options' must be an object", "stream_options")
        prompt.include_usage |= boolean(options.get("include_usage") or False, "stream_options.include_usage")
    prompt.n = count(get("n"), "n") or 1
    bounded_integers(request)
    prompt.reads_cache = not _wants_prompt_logprobs(request)
    salt = get("cache_salt")
    if salt is not None and type(salt) is not str:
        raise bad("'cache_salt' must be a string", "cache_salt")
    for key in ("session_id", "prompt_cache_key", "user"):
        if session:
            break
        value = get(key)
        session = value if type(value) is str else None
    return session


def _refuse_beyond_limits(prompt: Prompt, request: dict[str, Any], context: int | None) -> None:
    """Numbers that the engine would refuse, in its words: no replica is to find out what they do to it."""
    if prompt.n > _MOST_SEQUENCES and prompt.path in (CHAT, COMPLETIONS):
        raise ApiError(400, f"n must be at most {_MOST_SEQUENCES}, got {prompt.n}", param="n")
    wanted = prompt.max_tokens
    if context is not None and wanted is not None and wanted > context and prompt.path != EMBEDDINGS:
        key = "max_completion_tokens" if request.get("max_completion_tokens") is not None else "max_tokens"
        key = "max_output_tokens" if prompt.path == RESPONSES else key
        raise ApiError(
            400,
            f"{key}={wanted} cannot be greater than max_model_len={context}. Please request fewer output tokens.",
            param=key,
        )


def _wants_prompt_logprobs(request: dict[str, Any]) -> bool:
    """What a cache holds has no logprobs, so for these vLLM computes the whole prompt (and stores it)."""
    if request.get("prompt_logprobs") is not None:
        return True
    # With `echo` the prompt gets as many as each token of the answer: none by default in completions, but 0 in chat,
    # and 0 is a number of them. A null is read as 0 by 0.32, and by 0.28 as none at all.
    return bool(request.get("echo")) and ("messages" in request or request.get("logprobs") is not None)

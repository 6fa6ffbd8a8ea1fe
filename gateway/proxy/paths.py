"""The allow-list of paths: which paths of engines the gateway's clients may reach.

Engines serve more than inference on their one port: vLLM has `/pause`, `/scale_elastic_ep` and `/load_lora_adapter`
there, in development mode also `/sleep`, `/collective_rpc` and `/reset_prefix_cache`, most of them without a key.
Clients of the gateway reach the paths that vLLM's documentation ("Online Serving") offers to clients, and those that
the operator adds with `--allow-path`. Operators reach all other paths at `/replicas/ID/engine/PATH` on the gateway's
admin port.

Paths are compared as the client wrote them, before any decoding. But an engine decodes `%73leep` to `sleep`, and may
resolve `..`. So where `--allow-path` names only the beginning of a path, the rest may contain neither `%` nor `..`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

from replicas.spelling import closest

from ..prompt.prompt import EMBEDDINGS, LONGEST_RESPONSE_ID, NO_PREFILL, PROMPT_PATHS

MODELS = "/v1/models"
INVOCATIONS = "/invocations"  # SageMaker's path for completions and chats
# Paths whose POSTs make engines compute prompts that the gateway does not read: these are routed by load alone.
UNREAD_PROMPTS = frozenset((
    "/v1/chat/completions/batch", "/v1/audio/transcriptions", "/v1/audio/translations",
    "/v2/embed", "/cohere/v2/chat", "/pooling", "/classify", "/score", "/v1/score",
    "/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring", "/v1/systemone",
    "/inference/v1/generate", INVOCATIONS,
))  # fmt: skip
# All allowed paths whose prompts the gateway does not read, including those at which engines compute none.
OTHER_PATHS = UNREAD_PROMPTS | frozenset((
    "/v1/chat/completions/render", "/v1/chat/completions/derender",
    "/v1/completions/render", "/v1/completions/derender",
    "/v1/messages/count_tokens", "/v1/messages/render", "/v1/responses/render",
    MODELS, "/health", "/version", "/tokenizer_info", "/ping",
))  # fmt: skip
# Paths at which engines decode no tokens. Paths that --allow-path adds are not among them, since they may do anything.
WRITES_NOTHING = NO_PREFILL | OTHER_PATHS - UNREAD_PROMPTS | {EMBEDDINGS} | frozenset((
    "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
))  # fmt: skip
# A path of one stored response, with its id.
STORED_RESPONSE = re.compile(
    rf"/v1/responses/(?!(?:\.+|render)(?:/|\Z))([\w.:-]{{1,{LONGEST_RESPONSE_ID}}})(?:/(?:cancel|input_items))?",
    re.ASCII,
)
# Paths of the gateway's admin port. A client that requests one on the main port is told that it is on the other.
ADMIN_PATHS = ("/metrics", "/replicas", "/explain", "/decide", "/status", "/recent", "/livez", "/readyz")
# Least similarity at which a path counts as a misspelt one: /v1/chat/completions with a letter missing has 0.98.
LIKE_A_SLIP = 0.9
# What may follow the beginning of a path that was allowed with `/*`: no percent sign, and no part of dots.
PLAIN_REST = re.compile(r"(?:(?!\.{1,2}(?:/|\Z))[\w.~:@!$&'()+,=-]+(?:/|\Z))*", re.ASCII)


def check_allowed(path: str) -> str:
    """Return one value of `--allow-path` if it is valid, else raise ValueError.

    A valid value is a path, or the beginning of several paths followed by `/*`.
    """
    if {".", ".."} & {*path.split("/")}:
        raise ValueError(f"{path!r} has a part of dots, which an engine may take for another path; write it without")
    if not re.fullmatch(r"/(?:[^\s?#*%]*/)?(?:\*|[^\s?#*%]*)", path):
        raise ValueError(f"{path!r} is not a path like /v1/audio/speech, or the beginning of several like /v1/images/*")
    return path


class AllowedPaths:
    """The paths that clients may reach: the inference API, and `extra`, the values of `--allow-path`."""

    def __init__(self, extra: Sequence[str] = ()):
        self._exact = OTHER_PATHS | PROMPT_PATHS.keys() | {path for path in extra if not path.endswith("/*")}
        self._beginnings = tuple(path[:-1] for path in extra if path.endswith("/*"))

    def __contains__(self, path: str) -> bool:
        return path in self._exact or STORED_RESPONSE.fullmatch(path) is not None or any(
            path.startswith(beginning) and PLAIN_REST.fullmatch(path, len(beginning)) for beginning in self._beginnings
        )  # fmt: skip


def model_in(path: str) -> str | None:
    """Return NAME, decoded, if the path is `/v1/models/NAME`, else None; a slash in it may be written as `%2F`."""
    name = unquote(path[len(MODELS) + 1 :]) if path.startswith(MODELS + "/") else ""
    return name if name and not {"", ".", ".."} & {*name.split("/")} else None


def refusal(path: str, discreet: bool) -> str:
    """Return the error message for a path outside the allow-list.

    `discreet`: clients are tenants, so the message does not mention what operators can do.
    """
    shown = path[:200]
    said = f"{shown} is not part of the inference API, so this gateway does not send it to an engine"
    if near := closest(shown, (*PROMPT_PATHS, *OTHER_PATHS), LIKE_A_SLIP):
        return f"{said}: did you mean {near}?"
    if discreet or not PLAIN_REST.fullmatch(path, 1):  # suggest no path that an engine may read as another one
        return said
    if path.startswith(ADMIN_PATHS) and f"/{path.split('/')[1]}" in ADMIN_PATHS:
        return f"{shown} is on this gateway's admin side, which has another port: --admin-port, 8081 unless it is set"
    return (
        f"{said}. Operators reach it at /replicas/ID/engine{shown} of the admin side, "
        f"or open it to clients with --allow-path {shown}"
    )

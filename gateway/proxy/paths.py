"""Which paths of an engine clients may reach.

Engines serve more on their one port than inference: vLLM has `/pause`, `/scale_elastic_ep` and `/load_lora_adapter`
there, in development mode also `/sleep`, `/collective_rpc` and `/reset_prefix_cache`, and most of them ask for no
key. A client of the gateway gets what vLLM's documentation ("Online Serving") offers to clients, and what the operator
adds with `--allow-path`. Everything else is the operator's, who reaches it at `/replicas/ID/engine/PATH` of the admin
side.

Paths are compared as the client wrote them, before any decoding. An engine decodes `%73leep` and may resolve `..`, so
where a path is allowed by its beginning, its rest must be free of both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

from replicas.spelling import closest

from ..prompt.prompt import EMBEDDINGS, LONGEST_RESPONSE_ID, NO_PREFILL, PROMPT_PATHS

MODELS = "/v1/models"
INVOCATIONS = "/invocations"  # SageMaker's: of a completion or a chat
# The inference API without PROMPT_PATHS is sent on by load alone. Posted to these, engines compute prompts, ...
UNREAD_PROMPTS = frozenset((
    "/v1/chat/completions/batch", "/v1/audio/transcriptions", "/v1/audio/translations",
    "/v2/embed", "/cohere/v2/chat", "/pooling", "/classify", "/score", "/v1/score",
    "/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring", "/v1/systemone",
    "/inference/v1/generate", INVOCATIONS,
))  # fmt: skip
# ... and at the rest they do not.
OTHER_PATHS = UNREAD_PROMPTS | frozenset((
    "/v1/chat/completions/render", "/v1/chat/completions/derender",
    "/v1/completions/render", "/v1/completions/derender",
    "/v1/messages/count_tokens", "/v1/messages/render", "/v1/responses/render",
    MODELS, "/health", "/version", "/tokenizer_info", "/ping",
))  # fmt: skip
# Answers to these have no tokens that are decoded. A path that --allow-path adds may be anything: it is none of them.
WRITES_NOTHING = NO_PREFILL | OTHER_PATHS - UNREAD_PROMPTS | {EMBEDDINGS} | frozenset((
    "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
))  # fmt: skip
# What a path says of one stored response, and its id.
STORED_RESPONSE = re.compile(
    rf"/v1/responses/(?!(?:\.+|render)(?:/|\Z))([\w.:-]{{1,{LONGEST_RESPONSE_ID}}})(?:/(?:cancel|input_items))?",
    re.ASCII,
)
# Of the gateway's own admin side, which clients ask for on the wrong port.
ADMIN_PATHS = ("/metrics", "/replicas", "/explain", "/decide", "/status", "/recent", "/livez", "/readyz")
LIKE_A_SLIP = 0.9  # of a path: a letter left out of /v1/chat/completions gives 0.98, the shortest operators' path below
# What may follow the beginning of a path that was allowed with `/*`.
PLAIN_REST = re.compile(r"(?:(?!\.{1,2}(?:/|\Z))[\w.~:@!$&'()+,=-]+(?:/|\Z))*", re.ASCII)


def check_allowed(path: str) -> str:
    """One value of `--allow-path`: a path, or the beginning of paths followed by `/*`. Raises ValueError."""
    if {".", ".."} & {*path.split("/")}:
        raise ValueError(f"{path!r} has a part of dots, which an engine may take for another path; write it without")
    if not re.fullmatch(r"/(?:[^\s?#*%]*/)?(?:\*|[^\s?#*%]*)", path):
        raise ValueError(f"{path!r} is not a path like /v1/audio/speech, or the beginning of several like /v1/images/*")
    return path


class AllowedPaths:
    """What clients may ask of replicas: the inference API, and `extra` as `--allow-path` takes it."""

    def __init__(self, extra: Sequence[str] = ()):
        self._exact = OTHER_PATHS | PROMPT_PATHS.keys() | {path for path in extra if not path.endswith("/*")}
        self._beginnings = tuple(path[:-1] for path in extra if path.endswith("/*"))

    def __contains__(self, path: str) -> bool:
        return path in self._exact or STORED_RESPONSE.fullmatch(path) is not None or any(
            path.startswith(beginning) and PLAIN_REST.fullmatch(path, len(beginning)) for beginning in self._beginnings
        )  # fmt: skip


def model_in(path: str) -> str | None:
    """The model that `/v1/models/NAME` asks about. Clients write the slashes of a name as they are or as `%2F`."""
    name = unquote(path[len(MODELS) + 1 :]) if path.startswith(MODELS + "/") else ""
    return name if name and not {"", ".", ".."} & {*name.split("/")} else None


def refusal(path: str, discreet: bool) -> str:
    """What a client is told that asked for a path outside the allow-list. `discreet`: clients are tenants, and what
    operators can do is not for them."""
    shown = path[:200]
    said = f"{shown} is not part of the inference API, so this gateway does not send it to an engine"
    if near := closest(shown, (*PROMPT_PATHS, *OTHER_PATHS), LIKE_A_SLIP):
        return f"{said}: did you mean {near}?"
    if discreet or not PLAIN_REST.fullmatch(path, 1):  # nothing that an engine may read as another path
        return said
    if path.startswith(ADMIN_PATHS) and f"/{path.split('/')[1]}" in ADMIN_PATHS:
        return f"{shown} is on this gateway's admin side, which has another port: --admin-port, 8081 unless it is set"
    return (
        f"{said}. Operators reach it at /replicas/ID/engine{shown} of the admin side, "
        f"or open it to clients with --allow-path {shown}"
    )

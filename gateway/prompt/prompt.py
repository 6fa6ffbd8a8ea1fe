"""The result of the pipeline: what routing, accounting and the comparison with the engine's answer need of a body."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Mode = Literal["exact", "media", "engine", "partly", "text", "load"]
GUESSED = frozenset(("partly", "text"))  # the modes in which some block hashes are the gateway's own, not the engine's
LONGEST_RESPONSE_ID = 200  # characters of a stored response's id

# The paths whose bodies differ in the names of the prompt, the output limit, or the parameter at fault.
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
# All paths whose bodies are read for their prompt, and a short name of each.
PROMPT_PATHS = {
    CHAT: "chat",
    COMPLETIONS: "completions",
    RESPONSES: "responses",
    MESSAGES: "messages",
    EMBEDDINGS: "embeddings",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
NO_PREFILL = frozenset(("/tokenize", "/detokenize"))  # those of them for which engines compute no prompt

# The states of knowledge about a prompt's media, in words.
MEDIA = {
    "exact": "nothing is missing: all blocks are known",
    "load": "nothing: the request is matched as text from the item on",
    "family": "how many tokens this model makes of an item is not known",
    "kind": "sound, video and embeddings are not counted here",
    "remote": "what is at a URL, or behind a uuid alone, only the engine sees",
    "image": "an image whose size is not read here (one with more than 512 parts before its pixels) or that engines refuse",
    "request": "the request has settings of its own for its media",
    "engine": "by which name the engine knows an image is not known",
    "template": "the template prints other placeholders than there are images",
    "length": "it would not fit the context",
    "many": "there are more items than an engine takes by default (999)",
}


@dataclass(slots=True)
class Prompt:
    """One request, as far as routing is concerned.

    `mode` says how certain its tokens are:
        "exact": they are the ids that the engine will compute.
        "media": the block hashes are the engine's, but it needs more than ids to compute the blocks.
        "engine": an engine computed the ids for the gateway.
        "partly": exact up to the first image or other unknown content, hashed from the text from there on.
        "text": not known; the hashes are of the text, and 4 UTF-8 bytes stand for a token.
        "load": not known, and without hashes: the request is routed by load alone. `note` says why.

    For a list of prompts `tokens` is the sum over all of them, while `token_ids` and `hashes` are those of the longest:
    one replica gets the whole list, and a cached prefix saves most in the longest prompt.
    """

    path: str
    model: str
    adapter: str | None = None
    stream: bool = False
    tokens: int = 0  # prompt tokens
    token_ids: bytes = b""  # uint32 little endian, 4 * tokens bytes
    hashes: Sequence[int] = ()  # one per full block, as array("Q"): a list takes five times the space
    max_tokens: int | None = None
    capped: bool = False  # the gateway set `max_tokens`
    n: int = 1
    cut: bool = False  # the client asked for truncation, which shortens the prompt
    several: bool = False  # several prompts or choices, so `usage` is not that of one sequence
    sequences: int = 1  # sequences that the engine generates or embeds: prompts times choices
    copies: int = 1  # sequences with this very prompt: choices times the equal prompts of a list; 0: they differ
    reads_cache: bool = True  # False: the engine computes the whole prompt, whatever it has cached
    # How engines render such bodies, see `forward.kind_of`; "" where ids cannot replace the text, or do not pay.
    kind: str = ""
    # `kind` where the request's own options influence the rendering, "" if such a body has none; None: they do not.
    steered: str | None = field(default=None, compare=False)
    # The features of its body, see `prompt.features`; None where they are unknown without the body.
    features: Collection[str] | None = field(default=None, compare=False)
    doubted: bool = False  # an engine counted other tokens for such a body
    made: int | None = None  # the gateway's token count of a body that is matched as text because it is `doubted`
    made_by: int = 0  # the number of the pipeline's way of making ids, see `Pipeline.made_by`
    session: str | None = None
    mode: Mode = "exact"
    rendered_chars: int = 0  # length of the rendered text, 0 where ids came in
    include_usage: bool = False
    previous_response: str | None = None  # id of the stored response that it continues
    background: bool = False  # the response is generated after its request was answered
    note: str = ""
    declined: bool = False  # the engine accepts it, but its tokens are not known here; `note` says why
    media: str = ""  # with media: a key of MEDIA, else ""
    block_size: int = 16  # tokens in each block of `hashes`
    looks_ahead: int = 0  # tokens after a block that are part of its hash
    seed: int = 0  # the hash that the chain of `hashes` starts from
    space: int = 0  # the number of the variant that it was prepared for, see `Pipeline.space`
    also: Prompt | None = None  # the same request prepared for another variant of its model, where there are two


def unread(path: str, model: str | None) -> Prompt:
    """Return the prompt of a path that is not in PROMPT_PATHS: only its model, if it names one, is known."""
    return Prompt(path, model or "", mode="load", note="the prompts of this path are not read")


def as_variant(prompt: Prompt, space: int) -> Prompt:
    """Return the request as prepared for the variant of its model with this number; its `also` is the other variant's.

    A variant is the replicas of a model with equal tokens and blocks. If the request was prepared for other variants
    only, the returned prompt is routed by load.
    """
    also = prompt.also
    if prompt.space == space:
        return prompt
    if also is None or also.space != space:
        if prompt.mode == "load":  # it has no tokens or blocks, and its note says why
            return prompt
        note = "a third variant of its model has it"
        return replace(prompt, mode="load", note=note, hashes=(), token_ids=b"", space=space, also=prompt)
    prompt.also, also.also = None, prompt
    return also

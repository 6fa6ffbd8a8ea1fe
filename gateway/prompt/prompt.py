"""What the pipeline hands on: all that routing, accounting and settling need to know of a request body.

What is the client's own fault leaves as an `ApiError`. Nothing else leaves this room.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Mode = Literal["exact", "media", "engine", "partly", "text", "load"]
GUESSED = frozenset(("partly", "text"))  # the modes in which some names of blocks are the gateway's own
LONGEST_RESPONSE_ID = 200  # of a stored response

# The paths of which the bodies differ in how they name the prompt, the output limit, or the parameter at fault.
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
NO_PREFILL = frozenset(("/tokenize", "/detokenize"))  # of these, those for which engines compute no prompt

# What is known of a prompt's media, in words.
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

    `mode` says how sure we are: "exact" (the ids the engine will compute), "media" (the blocks are
    the engine's, but it needs more than ids to compute them), "engine" (ids the
    engine computed for us), "partly" (exact up to the first item of media, or to what is not known here, by text from
    there on), "text" (the tokens are not known: 4 UTF-8 bytes stand for one), "load" (route by load alone; `note` says
    why).

    For a list of prompts `tokens` is the sum over all of them, while `token_ids` and `hashes`
    are those of the longest: one replica gets the whole list, and the longest prompt is where
    a held prefix saves the most.
    """

    path: str
    model: str
    adapter: str | None = None
    stream: bool = False
    tokens: int = 0  # prompt tokens
    token_ids: bytes = b""  # uint32 little endian, 4 * tokens bytes
    hashes: Sequence[int] = ()  # one per full block, as array("Q"): a list takes five times the space
    max_tokens: int | None = None
    capped: bool = False  # that limit is the gateway's
    n: int = 1
    cut: bool = False  # its client has the engine leave a part of it out
    several: bool = False  # several prompts or choices: usage speaks of one of them
    sequences: int = 1  # that the engine is to write, or to embed: prompts, each as often as it is asked for
    copies: int = 1  # sequences with this very prompt: choices, times the equal prompts of a list. 0: they differ
    reads_cache: bool = True  # False: the engine computes all of it, whatever it holds
    kind: str = ""  # of body, where an engine may be sent the ids in place of the text, and it pays
    # Its kind where its client has a say in how it is rendered, "" if it has none: nothing of the prompt itself.
    steered: str | None = field(default=None, compare=False)
    # What sets its body apart from others, see `prompt.features`; None where that is not known without the body.
    features: Collection[str] | None = field(default=None, compare=False)
    doubted: bool = False  # an engine counted such a body otherwise
    made: int | None = None  # tokens that the gateway makes of it, where it is matched as text because of that
    made_by: int = 0  # the pipeline's number for its present way of making ids
    session: str | None = None
    mode: Mode = "exact"
    rendered_chars: int = 0  # length of the rendered text, 0 where ids came in
    include_usage: bool = False
    previous_response: str | None = None  # the stored response that it goes on from
    background: bool = False  # a response that is made once its request has been answered
    note: str = ""
    declined: bool = False  # the engine takes it and makes tokens of it that are not known here; `note` says why
    media: str = ""  # of one with media: what is known of it, one of MEDIA
    block_size: int = 16  # tokens in each block of `hashes`
    looks_ahead: int = 0  # so many tokens behind a block are part of its hash
    seed: int = 0  # what the chain of `hashes` starts from
    space: int = 0  # the pipeline's number for its tokens and blocks, see `Pipeline.space`
    also: Prompt | None = None  # the same request as another variant of its model has it, where there are two


def unread(path: str, model: str | None) -> Prompt:
    """A request of a path that is not in PROMPT_PATHS: nothing is known of it but the model that it names, if any."""
    return Prompt(path, model or "", mode="load", note="the prompts of this path are not read")


def as_variant(prompt: Prompt, space: int) -> Prompt:
    """The request as the replicas of this space have it; `also` leads from there to where it was."""
    also = prompt.also
    if prompt.space == space:
        return prompt
    if also is None or also.space != space:
        if prompt.mode == "load":  # nothing in it belongs to a space, and its note says why
            return prompt
        return replace(
            prompt,
            mode="load",
            note="a third variant of its model has it",
            hashes=(),
            token_ids=b"",
            space=space,
            also=prompt,
        )
    prompt.also, also.also = None, prompt
    return also

"""The `Prompt`: what the gateway knows of one request after it has rendered and tokenized the body.

Routing, accounting and the comparison with the engine's answer need only this.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Mode = Literal["exact", "media", "engine", "partly", "text", "load"]
# The modes in which some block hashes are computed from text and so differ from the engine's.
GUESSED = frozenset(("partly", "text"))
LONGEST_RESPONSE_ID = 200  # the most characters of a stored response's id

# The API paths. Their bodies name the prompt, the output limit and the parameter at fault differently.
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
NO_PREFILL = frozenset(("/tokenize", "/detokenize"))  # paths of PROMPT_PATHS whose prompts engines do not prefill

# What is not known about the images, sound or video of a prompt, in words, by the value of `Prompt.media`.
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
    """The prompt of one request, with all else that routing needs of the request.

    `mode` says how certain the tokens and block hashes are:
        "exact": the token ids are the ones that the engine will compute.
        "media": the block hashes are the engine's, but the prompt has images, so token ids alone do not describe it.
        "engine": an engine computed the token ids for the gateway.
        "partly": the tokens are exact up to the first image or other unknown content. The later block hashes are
            computed from text.
        "text": the tokens are not known. All block hashes are computed from text, with 4 UTF-8 bytes for each token.
        "load": neither tokens nor block hashes are known, and the request is routed by load alone. `note` says why.

    If the request holds a list of prompts, `tokens` is the sum over all of them, while `token_ids` and `hashes` are
    those of the longest. One replica gets the whole list, and a cached prefix saves most in the longest prompt.
    """

    path: str
    model: str
    adapter: str | None = None
    stream: bool = False
    tokens: int = 0  # number of prompt tokens
    token_ids: bytes = b""  # uint32 little endian, 4 * tokens bytes
    hashes: Sequence[int] = ()  # one per full block, as array("Q"): a list takes five times the space
    max_tokens: int | None = None
    capped: bool = False  # the gateway has set `max_tokens` in the request
    n: int = 1  # number of choices that the client asked for
    cut: bool = False  # the client asked for truncation, and it has shortened the prompt
    several: bool = False  # there are several prompts or choices, so `usage` is not that of one sequence
    sequences: int = 1  # sequences that the engine generates or embeds: prompts times choices
    # Sequences with exactly this prompt: the choices, times the prompts of a list if all are equal; 0: they differ.
    copies: int = 1
    reads_cache: bool = True  # False: the engine computes the whole prompt, whatever it has cached
    # How engines render such bodies, as `forward.kind_of` describes it. "": the text cannot be replaced by token ids,
    # or the prompt is too short for that to save time.
    kind: str = ""
    # The result of `forward.kind_of` if the body sets rendering options or has no kind (""); None: it sets none.
    steered: str | None = field(default=None, compare=False)
    # Short texts that name what may change how engines tokenize the body (`prompt.features`); None: not known without
    # the body.
    features: Collection[str] | None = field(default=None, compare=False)
    doubted: bool = False  # an engine has reported another token count than the gateway's for such a body
    made: int | None = None  # the gateway's token count, where `mode` is "text" because the body is `doubted`
    made_by: int = 0  # which version of the tokenizer and templates made the ids (`Pipeline.made_by`)
    session: str | None = None
    mode: Mode = "exact"
    rendered_chars: int = 0  # length of the rendered text in characters; 0: the client sent token ids
    include_usage: bool = False
    previous_response: str | None = None  # id of the stored response that the request continues
    background: bool = False  # the client wants the response to be generated after the request was answered
    note: str = ""
    declined: bool = False  # the engine accepts the request, but its tokens are not known here; `note` says why
    media: str = ""  # with images, sound or video: a key of MEDIA; else ""
    block_size: int = 16  # tokens in each block of `hashes`
    looks_ahead: int = 0  # number of tokens after a block that are part of the block's hash
    seed: int = 0  # the hash that the chain of `hashes` starts from
    space: int = 0  # which replicas the tokens and hashes are valid for (`Pipeline.space`)
    also: Prompt | None = None  # the same request prepared for the model's other `space`, where there are two

    def forget_ids(self) -> None:
        """Free the token ids, which will not be sent."""
        self.token_ids = b""

    def cap(self, tokens: int) -> None:
        """Note that the gateway has limited the answer to so many output tokens, in the request's body too."""
        self.max_tokens, self.capped = tokens, True

    def accompany(self, other: Prompt) -> None:
        """Note the same request prepared for the model's other space."""
        self.also = other


def unread(path: str, model: str | None) -> Prompt:
    """Return a Prompt for a path whose bodies are not read for prompts: routed by load, with only the model set."""
    return Prompt(path, model or "", mode="load", note="the prompts of this path are not read")


def as_variant(prompt: Prompt, space: int) -> Prompt:
    """Return the request's Prompt for the replicas of one space: those that make equal tokens and blocks of a request.

    `space`: the number of the space. A request is prepared for at most two spaces of its model, and the attribute
    `also` of the returned Prompt holds the other Prompt. For a third space the result is a copy that is routed by load
    alone.
    """
    also = prompt.also
    if prompt.space == space:
        return prompt
    if also is None or also.space != space:
        if prompt.mode == "load":  # the prompt has no tokens or blocks for any replica, and its note says why
            return prompt
        note = "a third variant of its model has it"
        return replace(prompt, mode="load", note=note, hashes=(), token_ids=b"", space=space, also=prompt)
    prompt.also, also.also = None, prompt
    return also

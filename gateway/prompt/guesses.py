"""Block hashes of the gateway's own, for prompts of which no tokens, or only the first ones, are known.

These hashes are computed from the request's text, with 4 bytes in place of each token. A later request with the same
text gets the same hashes, so it is routed to the replica that got the text before (`cachemap.GuessedBlocks`). They
never equal the hashes that engines report in their KV cache events. Two things that agents change in every turn are
left out of the text: `cache_control`, which marks where the cached part ends, and Claude Code's attribution line, which
holds a checksum.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from cachemap import GuessedBlocks, chain_seed, hash_blocks
from cachemap.hashing import covering, named_ahead

from .api.conversation import BILLING_HEADER, is_plain
from .api.openai import Chat
from .prompt import Prompt
from .render.renderer import Renderer

_OF_A_TURN = (b'"cache_control"', BILLING_HEADER.encode())


def fill_partly(prompt: Prompt, chat: Chat, renderer: Renderer, exact: str, rest: bytes, seed: int) -> None:
    """Set the block hashes and token count of a prompt of which only the rendered beginning is known.

    `exact`: the known beginning of the rendered text, which is tokenized. `rest`: the remaining text, from which the
    later blocks are hashed; b"": there are no later blocks. `seed`: the hash that the chain of block hashes starts
    from. Changes `prompt`, whose mode becomes "partly". Four bytes of `rest` are counted as one token.
    """
    size = prompt.block_size
    ids, hashes, chars = renderer.cut_tokens(seed, exact, renderer.tokenizer.leading() if chat.special else b"")
    if prompt.looks_ahead:  # then the last block's hash also depends on tokens after the block, which are not known
        hashes = named_ahead(hashes, ids, size, prompt.looks_ahead)
    behind = covering(["guessed"], hashes[-1] if hashes else seed)
    more = ids[4 * size * len(hashes) :] + rest if rest else b""
    prompt.mode = "partly"
    prompt.hashes = GuessedBlocks.of([*hashes, *hash_blocks(more, size, behind)], len(hashes))
    prompt.tokens, prompt.rendered_chars = (len(ids) + len(rest)) // 4, chars + len(rest)


def fill_by_text(prompt: Prompt, request: dict[str, Any], served_name: str, unfollowed: dict[str, Any]) -> None:
    """Set the block hashes of a prompt from the request's text, because its tokens are not known.

    Changes `prompt`, whose mode becomes "text"; 4 bytes of text are counted as one token. The chain of hashes starts
    from a seed that is used for texts only, so the hashes never match an engine's blocks. `served_name`: the model's
    name in block hashes. `unfollowed`: fields of the request, with values, whose effect on the prompt is not
    implemented here. Requests that differ in them get different hashes. Raises ValueError or RecursionError for a
    request that is nested too deeply.
    """
    said = request.get("messages", request.get("prompt", request.get("input", "")))
    head = [request.get("system"), request.get("instructions"), request.get("tools")]
    text = said.encode() if isinstance(said, str) and not any(head) else written([head, said])
    salt = request.get("cache_salt")
    if unfollowed:
        salt = _dumped([salt, sorted(unfollowed.items())]).decode()
    seed = chain_seed("text:" + served_name, prompt.block_size, prompt.adapter, salt)
    prompt.mode = "text"
    prompt.rendered_chars = len(text)
    prompt.tokens = len(text) // 4 or 1
    prompt.hashes = GuessedBlocks.of(hash_blocks(text, prompt.block_size, seed), 0)


def written(said: Any) -> bytes:
    """Return a part of a request as JSON, without what agents change in each turn.

    Left out are `cache_control` members and content parts that begin with Claude Code's attribution line.
    """
    text = _dumped(said)
    return _dumped(_kept(said)) if any(one in text for one in _OF_A_TURN) else text


def _dumped(said: Any) -> bytes:
    try:
        return orjson.dumps(said)
    except TypeError:  # orjson refuses half a surrogate pair, integers of more than 64 bits, and 255 levels
        return json.dumps(said).encode()


def _kept(said: Any) -> Any:
    if type(said) is dict:
        return {key: _kept(value) for key, value in said.items() if key != "cache_control"}
    if type(said) is list:
        texts = [one.get("text") if type(one) is dict else None for one in said]
        return [_kept(one) for one, text in zip(said, texts) if type(text) is not str or is_plain(text)]
    return said

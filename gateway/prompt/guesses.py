"""Block hashes that are the gateway's own, of prompts whose tokens are not known, or only at the beginning.

They are hashed from text, of which 4 bytes stand for a token. A repetition of the text gets the same hashes, so it goes
to the replica that it was sent to before (`cachemap.GuessedBlocks`), but no event of an engine reports such a hash.
What agents change in each turn is left out: `cache_control`, their mark of where the cache is to end, and the checksum
in Claude Code's attribution line.
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
    """Fill a prompt of which only the beginning is known.

    `exact`: the rendered beginning; `rest`: the text from which later blocks are hashed, b"" for none; `seed`: the hash
    that the chain of block hashes starts from. The prompt's tokens are counted as one for four bytes of the rest.
    """
    size = prompt.block_size
    ids, hashes, chars = renderer.cut_tokens(seed, exact, renderer.tokenizer.leading() if chat.special else b"")
    if prompt.looks_ahead:  # the last block's hash depends on tokens that are not known
        hashes = named_ahead(hashes, ids, size, prompt.looks_ahead)
    behind = covering(["guessed"], hashes[-1] if hashes else seed)
    more = ids[4 * size * len(hashes) :] + rest if rest else b""
    prompt.mode = "partly"
    prompt.hashes = GuessedBlocks.of([*hashes, *hash_blocks(more, size, behind)], len(hashes))
    prompt.tokens, prompt.rendered_chars = (len(ids) + len(rest)) // 4, chars + len(rest)


def fill_by_text(prompt: Prompt, request: dict[str, Any], served_name: str, unfollowed: dict[str, Any]) -> None:
    """Fill a prompt with hashes of the request's text.

    The chain of hashes starts from a seed that no chain of tokens has, so it never matches an engine's blocks.
    `served_name`: the model's name in block hashes; `unfollowed`: fields of the request that may change the names of
    blocks. Raises ValueError or RecursionError for a request that is nested too deeply.
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
    """Return a part of a request as JSON text, without what agents change in each turn."""
    text = _dumped(said)
    return _dumped(_kept(said)) if any(one in text for one in _OF_A_TURN) else text


def _dumped(said: Any) -> bytes:
    try:
        return orjson.dumps(said)
    except TypeError:  # half a surrogate pair, integers of more than 64 bits, 255 levels
        return json.dumps(said).encode()


def _kept(said: Any) -> Any:
    if type(said) is dict:
        return {key: _kept(value) for key, value in said.items() if key != "cache_control"}
    if type(said) is list:
        texts = [one.get("text") if type(one) is dict else None for one in said]
        return [_kept(one) for one, text in zip(said, texts) if type(text) is not str or is_plain(text)]
    return said

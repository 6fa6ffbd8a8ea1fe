"""Prompts of which only the beginning is known: exact blocks up to there, then blocks hashed from the text.

The same conversation gets the same hashes again, so it goes to the replica that it was sent to before
(`cachemap.GuessedBlocks`), but no event of an engine reports such a hash.
"""

from __future__ import annotations

from cachemap import GuessedBlocks, hash_blocks
from cachemap.hashing import covering, named_ahead

from .api.openai import Chat
from .prompt import Prompt
from .render.renderer import Renderer


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

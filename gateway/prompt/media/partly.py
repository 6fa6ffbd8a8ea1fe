"""Prompts with media whose blocks are known only up to the first item.

An engine's tokens before an item's placeholder do not depend on the item, so these blocks are exact. The following
blocks are hashed from the text and from digests of the items: the same conversation with the same media gets the same
hashes, so it goes to the replica that it was sent to before (`cachemap.GuessedBlocks`), but no event of an engine
reports such a hash.
"""

from __future__ import annotations

from cachemap import GuessedBlocks, hash_blocks
from cachemap.hashing import covering, named_ahead

from ..api.openai import Chat
from ..prompt import MEDIA, Prompt
from ..render.renderer import Renderer
from ..tokens.tokenizer import Tokenizer
from .items import Seen, StandIns

# Tokens that an item counts for in a replica's load where their number is not known. An image of a megapixel has some
# 1,300 in Qwen2.5-VL, one of any size 256 in Gemma 3, and up to some 2,500 in Llama 4.
TOKENS_OF_AN_ITEM = 1000


def fill(prompt: Prompt, chat: Chat, renderer: Renderer, tokenizer: Tokenizer, seed: int, why: str) -> None:
    """Fill a prompt with the blocks of a conversation with media, exact ones up to the first item.

    `why`: the key of MEDIA that says what is not known of the items; `seed`: the hash that the chain of block hashes
    starts from. Raises what rendering raises, and Multimodal for parts that no engine is known to take.
    """
    seen, size = Seen(), prompt.block_size
    text, named = renderer.text(chat, seen), renderer.text(chat, StandIns())
    # The texts differ from the engine's placeholder on, or from what may precede it. Tokens near that point may span
    # it, except before an added token, where `beginning` ends.
    exact = renderer.beginning(text, named)
    ids = tokenizer.encode(named, special=chat.special)
    known = (tokenizer.added_around()[0] if exact and chat.special else 0) + len(tokenizer.encode(exact)) // 4
    whole = known // size
    hashes = hash_blocks(ids[: 4 * size * whole], size, seed)
    if prompt.looks_ahead and whole:  # the last block's hash depends on tokens that may be the item's
        hashes = [*named_ahead(hashes, ids[: 4 * known], size, prompt.looks_ahead)]
        whole = len(hashes)
    behind = covering(["guessed"], hashes[-1] if hashes else seed)
    hashes += hash_blocks(ids[4 * size * whole :], size, behind)
    prompt.mode, prompt.media = "partly", why
    prompt.hashes = GuessedBlocks.of(hashes, whole)
    prompt.tokens = len(ids) // 4 + TOKENS_OF_AN_ITEM * len(seen.items)
    prompt.rendered_chars = len(named)
    items = (
        f"{len(seen.items)} items" if len(seen.items) > 1 else f"an item ({seen.items[0].kind})" if seen.items else ""
    )
    prompt.note = f"{items} of media: exact up to the first one, by text from there on ({MEDIA[why]})"

"""A prompt with media of which the blocks before the first item are known, and the others are not.

What an engine makes of the text before an item's placeholder does not depend on the item, so these blocks are exact.
What follows is named by its text and by digests of the items: the same conversation with the same media has the same
names, so it goes where it was sent before (`cachemap.GuessedBlocks`), but no event of an engine is about them.
"""

from __future__ import annotations

from cachemap import GuessedBlocks, hash_blocks
from cachemap.hashing import covering, named_ahead

from ..api.openai import Chat
from ..prompt import MEDIA, Prompt
from ..render.renderer import Renderer
from ..tokens.tokenizer import Tokenizer
from .items import Seen, StandIns

# Tokens that an item is counted as in a replica's load where they are not known. An image of a megapixel has some 1,300
# in Qwen2.5-VL, one of any size 256 in Gemma 3, and up to some 2,500 in Llama 4.
TOKENS_OF_AN_ITEM = 1000


def fill(prompt: Prompt, chat: Chat, renderer: Renderer, tokenizer: Tokenizer, seed: int, why: str) -> None:
    """Give a prompt the blocks of a conversation with media. `why`: what is not known of the items, one of MEDIA.

    Raises what rendering raises, Multimodal for parts that no engine is known to take.
    """
    seen, size = Seen(), prompt.block_size
    text, named = renderer.text(chat, seen), renderer.text(chat, StandIns())
    # Where the two part the engine's placeholder begins, or what it may put before it, and tokens near that may reach
    # across. Before an added token none do.
    exact = renderer.beginning(text, named)
    ids = tokenizer.encode(named, special=chat.special)
    known = (tokenizer.added_around()[0] if exact and chat.special else 0) + len(tokenizer.encode(exact)) // 4
    whole = known // size
    hashes = hash_blocks(ids[: 4 * size * whole], size, seed)
    if prompt.looks_ahead and whole:  # the last one is named by what may be the item's
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

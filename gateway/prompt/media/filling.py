"""Block hashes of prompts with images, sound or video ("items").

If every item is an image whose tokens and name in block hashes are known, all blocks get the hashes that the engine
computes.

Otherwise only the blocks before the first item's placeholder get the engine's hashes, since the tokens there do not
depend on the item. The blocks after it are hashed from the text and from digests of the items.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cachemap import Span, hash_with_media
from cachemap.hashing import named_ahead

from ..api.conversation import Unroutable
from ..api.openai import Chat, may_cut
from ..guesses import fill_partly
from ..offload import TakesLong, event_loop
from ..prompt import MEDIA, Prompt
from ..render.renderer import Renderer
from ..tokens.folder import ModelError, json_object
from ..tokens.tokenizer import Tokenizer
from . import gemma3, llama4, qwen_vl
from .families import Family, Files, Ids, Places, Runs
from .identity import Identities
from .images import Unreadable
from .items import Item, Seen, StandIns

MOST_ITEMS = 999  # images, sounds and videos in one request; vLLM's default limit
# The number of tokens that is added to a replica's load for an item whose own number is not known. An image of a
# megapixel has some 1,300 in Qwen2.5-VL, one of any size 256 in Gemma 3, and up to some 2,500 in Llama 4.
TOKENS_OF_AN_ITEM = 1000
# The most tokens of a prompt with images that the event loop may make and hash, which takes some 2 ms (a 2-core cloud
# machine under load). Headers of images with a kilobyte in all can declare a million tokens.
_BRIEF = 32_768
_FAMILIES = (qwen_vl.family, gemma3.family, llama4.family)
# Fields of a request that change the tokens of its items or their names in block hashes.
_CHANGING = ("mm_processor_kwargs", "media_io_kwargs")


class _NotKnown(Exception):
    """Raised if the block hashes of a prompt with images, sound or video cannot be computed.

    Its argument is a key of the dictionary `prompt.MEDIA`, which says the reason in words.
    """


class _Image(NamedTuple):
    runs: Runs  # the image's tokens
    length: int  # the number of these tokens
    identity: str  # the image's name in block hashes


class Media:
    """Computes block hashes for one model's prompts with images, sound or video."""

    def __init__(self) -> None:
        self.family: Family | None = None  # the rule for the tokens of images; None: it is not known
        # The path or name from which all engines loaded the model, which is a part of the images' names in block
        # hashes; "": it was not reported, or engines differ in it.
        self.root = ""
        self._identities = Identities()

    def fill(
        self,
        prompt: Prompt,
        chat: Chat,
        request: dict[str, Any],
        renderer: Renderer,
        seed: int,
        rule: str | None,
        context: int,
    ) -> None:
        """Set the block hashes and token count of a conversation with images, sound or video ("items").

        Changes `prompt`: all blocks are exact (mode "media"), or only those before the first item (mode "partly").
        `seed`: the hash that the chain of block hashes starts from. `rule`: how the engines' version names images in
        block hashes, `identity.FRAMED` (vLLM 0.32) or `identity.PLAIN` (0.28); None: that is not known. `context`: the
        most tokens that a prompt may have.

        Raises Unroutable if the request asks for truncation, Multimodal for parts that no engine is known to accept,
        any error of rendering, and TakesLong on the event loop.
        """
        if may_cut(request):
            raise Unroutable("truncation of a prompt with media")
        seen = Seen()
        text = renderer.text(chat, seen)
        try:
            if self.family is None:
                raise _NotKnown("family")
            if prompt.adapter is not None or not self.root or rule is None:
                raise _NotKnown("engine")
            if any(request.get(field) for field in _CHANGING):
                raise _NotKnown("request")
            if len(seen.items) > MOST_ITEMS:
                raise _NotKnown("many")
            images = [self._image(self.family, item, rule) for item in seen.items]
            tokens = np.frombuffer(renderer.tokenizer.encode(text, special=chat.special), "<u4")
            ids, spans = _expanded(self.family, tokens, images, context)
        except _NotKnown as why:
            # The two texts are equal up to the first item's placeholder, or up to what the template prints before it.
            named, items = renderer.text(chat, StandIns()), seen.items
            exact = renderer.beginning(text, named)
            fill_partly(prompt, chat, renderer, exact, named[len(exact) :].encode(), seed)
            prompt.tokens += TOKENS_OF_AN_ITEM * len(items)
            prompt.media = str(why)
            what = f"{len(items)} items" if len(items) > 1 else f"an item ({items[0].kind})" if items else ""
            prompt.note = f"{what} of media: exact up to the first one, by text from there on ({MEDIA[prompt.media]})"
            return
        prompt.mode, prompt.media = "media", "exact"
        size, ahead = prompt.block_size, prompt.looks_ahead
        prompt.hashes = array("Q", hash_with_media(ids, size, seed, spans, ahead))
        if ahead:
            prompt.hashes = named_ahead(prompt.hashes, ids, size, ahead)
        prompt.tokens, prompt.rendered_chars = len(ids) // 4, len(text)
        inside = sum(image.length for image in images)
        prompt.note = f"{len(images)} of media, {inside} tokens of them: all blocks are known"

    def _image(self, family: Family, item: Item, rule: str) -> _Image:
        if item.kind != "image":
            raise _NotKnown("kind")
        if item.url[:5].lower() != "data:":
            raise _NotKnown("remote" if item.url or item.uuid else "kind")
        try:
            image, identity = self._identities.of(item.url, rule, self.root)
        except Unreadable:
            raise _NotKnown("image") from None
        runs = family.expansion(image.width, image.height)
        if runs is None:
            raise _NotKnown("image")
        return _Image(runs, sum(count for _, count in runs), item.uuid if item.uuid is not None else identity)


def _expanded(family: Family, tokens: Ids, images: list[_Image], context: int) -> tuple[bytes, list[Span]]:
    """Return a prompt's token ids with each image's tokens in place of its placeholder, and the images' spans.

    `tokens`: the ids with placeholders; `context`: the most tokens that the result may have. The ids are returned as
    uint32 bytes. Raises _NotKnown, and TakesLong on the event loop. The work is done by array operations, because a
    prompt may have 999 images, each with 36 runs of equal tokens.
    """
    places = np.flatnonzero(tokens == family.placeholder)
    if len(places) != len(images):
        raise _NotKnown("template")  # the template prints other placeholders, or a text spells one
    total = len(tokens) + sum(image.length for image in images)
    if total > context:
        raise _NotKnown("length")
    if event_loop.holds and total > _BRIEF:
        raise TakesLong
    # The number of array entries for each token: one, or for a placeholder one for each run of its image's tokens.
    slots = np.ones(len(tokens), np.int64)
    slots[places] = [len(image.runs) for image in images]
    is_place = np.zeros(len(tokens), bool)
    is_place[places] = True
    of_images = np.repeat(is_place, slots)
    values, repeats = np.repeat(tokens, slots), np.ones(len(of_images), np.int64)
    values[of_images] = [token for image in images for token, _ in image.runs]
    repeats[of_images] = [count for image in images for _, count in image.runs]
    first = (np.cumsum(slots) - slots)[places]
    joined: tuple[Ids, Places] | None = np.repeat(values, repeats), (np.cumsum(repeats) - repeats)[first]
    if family.joining is not None:
        joined = family.joining(*joined, np.array([image.length for image in images], np.int64))
        if joined is None:
            raise _NotKnown("template")
    ids, starts = joined
    return ids.tobytes(), [Span(one.identity, at, one.length) for one, at in zip(images, starts.tolist(), strict=True)]


def family_of(
    directory: Path, settings: dict[str, Any], tokenizer_settings: dict[str, Any], tokenizer: Tokenizer
) -> Family | None:
    """Return the rule for the tokens of images of the model in this folder, or None if it is not known.

    `settings`: the content of config.json; `tokenizer_settings`: the content of tokenizer_config.json.
    """
    own, shared = (_read(directory / f"{name}_config.json") for name in ("preprocessor", "processor"))
    inner = shared.get("image_processor")
    processor = own or inner
    if (own and inner) or not isinstance(processor, dict) or not processor:
        return None  # if both files have settings, the engine's release of transformers decides which are used
    files = Files(settings, processor, shared, tokenizer_settings)
    return next((found for one in _FAMILIES if (found := one(files, tokenizer)) is not None), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json_object(path)
    except ModelError:
        return {}

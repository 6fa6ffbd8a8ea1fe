"""Exact blocks for prompts with images: the tokens of each image, and the name by which the engine knows it."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cachemap import Span, hash_with_media
from cachemap.hashing import named_ahead

from ..api.openai import Chat
from ..offload import TakesLong, event_loop
from ..prompt import Prompt
from ..render.renderer import Renderer
from ..tokens.folder import ModelError, json_object
from ..tokens.tokenizer import Tokenizer
from . import gemma3, llama4, qwen_vl
from .families import Family, Files, Ids, Places, Runs
from .identity import Identities
from .images import Unreadable
from .items import Item, Seen

MOST_ITEMS = 999  # of a request; vLLM's default limit
# Tokens of a prompt with images that the event loop may make and hash: a kilobyte of headers can declare a million, and
# these take some 2 ms (a 2-core cloud machine under load).
_BRIEF = 32_768
_FAMILIES = (qwen_vl.family, gemma3.family, llama4.family)
# Fields of a request that change its media's tokens or names.
_CHANGING = ("mm_processor_kwargs", "media_io_kwargs")


class Unknown(Exception):
    """Raised where the blocks are not known. Its argument is a key of MEDIA."""


class Engine(NamedTuple):
    """The properties of a model's engines that determine an image's name, and the most tokens of a prompt."""

    rule: str | None  # the naming rule, `identity.FRAMED` or `identity.PLAIN`; None: not known
    model: str  # the path or name that engines loaded the model from; "": not reported, or not the same for all
    context: int  # tokens that a prompt may have


class Known(NamedTuple):
    """An image of a request, with its tokens."""

    runs: Runs  # its tokens
    length: int  # their number
    identity: str  # the name by which the engine knows the image


class Images:
    """The maker of exact blocks for one model's prompts with images."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._identities = Identities()

    def fill(
        self,
        prompt: Prompt,
        chat: Chat,
        request: dict[str, Any],
        renderer: Renderer,
        tokenizer: Tokenizer,
        seed: int,
        engine: Engine,
    ) -> str:
        """Fill a prompt that has images with its exact blocks, and return "exact".

        Where they are not known, changes nothing and returns the key of MEDIA that says why. `seed`: the hash that the
        chain of block hashes starts from. Raises what rendering raises, and TakesLong on the event loop.
        """
        seen = Seen()
        text = renderer.text(chat, seen)
        try:
            if prompt.adapter is not None or not engine.model or engine.rule is None:
                raise Unknown("engine")
            if any(request.get(field) for field in _CHANGING):
                raise Unknown("request")
            if len(seen.items) > MOST_ITEMS:
                raise Unknown("many")
            items = [self._known(item, engine) for item in seen.items]
            ids, spans = self._expanded(tokenizer.encode(text, special=chat.special), items, engine.context)
        except Unknown as unknown:
            return str(unknown)
        prompt.mode, prompt.media = "media", "exact"
        size, ahead = prompt.block_size, prompt.looks_ahead
        prompt.hashes = array("Q", hash_with_media(ids, size, seed, spans, ahead))
        if ahead:
            prompt.hashes = named_ahead(prompt.hashes, ids, size, ahead)
        prompt.tokens, prompt.rendered_chars = len(ids) // 4, len(text)
        prompt.note = (
            f"{len(items)} of media, {sum(span.length for span in spans)} tokens of them: all blocks are known"
        )
        return "exact"

    def _known(self, item: Item, engine: Engine) -> Known:
        if item.kind != "image":
            raise Unknown("kind")
        if item.url[:5].lower() != "data:":
            raise Unknown("remote" if item.url or item.uuid else "kind")
        assert engine.rule is not None
        try:
            image, identity = self._identities.of(item.url, engine.rule, engine.model)
        except Unreadable:
            raise Unknown("image") from None
        runs = self.family.expansion(image.width, image.height)
        if runs is None:
            raise Unknown("image")
        return Known(runs, sum(count for _, count in runs), item.uuid if item.uuid is not None else identity)

    def _expanded(self, ids: bytes, items: list[Known], context: int) -> tuple[bytes, list[Span]]:
        tokens = np.frombuffer(ids, "<u4")
        places = np.flatnonzero(tokens == self.family.placeholder)
        if len(places) != len(items):
            raise Unknown("template")  # the template prints other placeholders, or a text spells one
        total = len(tokens) + sum(item.length for item in items)
        if total > context:
            raise Unknown("length")
        if event_loop.holds and total > _BRIEF:
            raise TakesLong
        expanded, starts = _put(tokens, places, [item.runs for item in items])
        if self.family.joining is not None:
            joined = self.family.joining(expanded, starts, np.array([item.length for item in items], np.int64))
            if joined is None:
                raise Unknown("template")
            expanded, starts = joined
        spans = [Span(item.identity, start, item.length) for item, start in zip(items, starts.tolist(), strict=True)]
        return expanded.tobytes(), spans


def _put(tokens: Ids, places: Places, items: list[Runs]) -> tuple[Ids, Places]:
    """Return the tokens with the token at each of `places` replaced by an item's, and the positions where these begin.

    Array operations, no loop over the tokens: there may be 999 items of 36 runs.
    """
    slots = np.ones(len(tokens), np.int64)  # for each token a slot, for an item's place one for each of its runs
    slots[places] = [len(runs) for runs in items]
    is_place = np.zeros(len(tokens), bool)
    is_place[places] = True
    of_items = np.repeat(is_place, slots)
    values, repeats = np.repeat(tokens, slots), np.ones(len(of_items), np.int64)
    values[of_items] = [token for runs in items for token, _ in runs]
    repeats[of_items] = [count for runs in items for _, count in runs]
    first = (np.cumsum(slots) - slots)[places]
    return np.repeat(values, repeats), (np.cumsum(repeats) - repeats)[first]


def images_of(
    directory: Path, settings: dict[str, Any], tokenizer_settings: dict[str, Any], tokenizer: Tokenizer
) -> Images | None:
    """Return the Images of the model in this folder, or None if the tokens of its images are not known.

    `settings`: config.json; `tokenizer_settings`: tokenizer_config.json.
    """
    own, shared = (_read(directory / f"{name}_config.json") for name in ("preprocessor", "processor"))
    inner = shared.get("image_processor")
    if own and inner:
        return None  # which of the two counts depends on transformers
    processor = own or inner
    if isinstance(processor, dict) and processor:
        files = Files(settings, processor, shared, tokenizer_settings)
        for family in _FAMILIES:
            if (found := family(files, tokenizer)) is not None:
                return Images(found)
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        return json_object(path)
    except ModelError:
        return {}

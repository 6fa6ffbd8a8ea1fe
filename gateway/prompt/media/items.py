"""The parts of messages that are not text, and their replacements when a template is rendered.

An engine renders a conversation with a placeholder in place of each item. `Seen` gives the template what vLLM gives it;
`StandIns` writes a digest of the item there, so that equal conversations with equal media are equal texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from xxhash import xxh3_64_hexdigest

from ..api.conversation import Multimodal, Placeholder

# vLLM's fields for media, and the type that templates get.
_FIELDS = (
    "image_url", "input_image", "image_pil", "image_embeds", "audio_url", "input_audio", "audio_embeds", "video_url",
    "video_embeds",
)  # fmt: skip
_KINDS = {name: name.removeprefix("input_").partition("_")[0] for name in _FIELDS}
_BY_URL = frozenset({"image_url", "input_image"})  # images in a data URL, or fetched from a URL


@dataclass(frozen=True, slots=True)
class Item:
    """One item of media.

    `kind`: image, audio or video; `url`: an image's URL, or ""; `uuid`: the name that the client gave it, or None.
    """

    kind: str
    url: str = ""
    uuid: str | None = None


def item_of(part: dict[str, Any]) -> Item:
    """Return the item of a part that is not text. Raises Multimodal for parts that no engine is known to take."""
    name, uuid = part.get("type"), part.get("uuid")
    if name is None or uuid is not None:
        name = next((key for key in _KINDS if key in part), None)
    if not isinstance(name, str) or name not in _KINDS:
        raise Multimodal(str(part.get("type")))
    given = part.get("image_url") if name in _BY_URL else None
    url = given.get("url") if isinstance(given, dict) else given
    return Item(_KINDS[name], url if isinstance(url, str) else "", None if uuid is None else str(uuid))


class Seen:
    """A `MediaPlacing` that gives a template what vLLM gives it, and collects the items in order."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def place(self, part: dict[str, Any], more: dict[str, Any], as_parts: bool) -> Any:
        item = item_of(part)
        self.items.append(item)
        # Where texts are joined, vLLM puts the model's placeholder before or between them, which is not known here.
        return {"type": item.kind, **more} if as_parts else None


class StandIns:
    """A `MediaPlacing` that gives a template a text for each item: a digest of its uuid, URL or content."""

    def place(self, part: dict[str, Any], more: dict[str, Any], as_parts: bool) -> Any:
        item = item_of(part)
        known = item.uuid if item.uuid is not None else item.url
        named = known.encode("utf-8", "surrogatepass") if known else orjson.dumps(part, default=str)
        text = f"\ufffc{item.kind} {xxh3_64_hexdigest(named)}"
        return {"type": "text", "text": text, **more} if as_parts else Placeholder(text)

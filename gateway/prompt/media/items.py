"""Images, sounds and videos in messages ("items"), and what a chat template gets in place of them.

An engine renders a conversation with a placeholder for each item. `Seen` gives the template what vLLM gives it.
`StandIns` gives it a digest of the item instead, so that conversations render to equal texts only if their items are
equal, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from xxhash import xxh3_64_hexdigest

from ..api.conversation import Multimodal, Placeholder

# The fields in which vLLM takes images, sound and video, and for each field the type that templates get.
_FIELDS = (
    "image_url", "input_image", "image_pil", "image_embeds", "audio_url", "input_audio", "audio_embeds", "video_url",
    "video_embeds",
)  # fmt: skip
_KINDS = {name: name.removeprefix("input_").partition("_")[0] for name in _FIELDS}
_BY_URL = frozenset({"image_url", "input_image"})  # images in a data URL, or fetched from a URL


@dataclass(frozen=True, slots=True)
class Item:
    """One image, sound or video in a message.

    `kind`: "image", "audio" or "video"; `url`: the URL of an image, or ""; `uuid`: the name that the client gave to the
    item, or None.
    """

    kind: str
    url: str = ""
    uuid: str | None = None


def item_of(part: dict[str, Any]) -> Item:
    """Return the image, sound or video in a content part. Raises Multimodal if no engine is known to accept it."""
    name, uuid = part.get("type"), part.get("uuid")
    if name is None or uuid is not None:
        name = next((key for key in _KINDS if key in part), None)
    if not isinstance(name, str) or name not in _KINDS:
        raise Multimodal(str(part.get("type")))
    given = part.get("image_url") if name in _BY_URL else None
    url = given.get("url") if isinstance(given, dict) else given
    return Item(_KINDS[name], url if isinstance(url, str) else "", None if uuid is None else str(uuid))


class Seen:
    """Gives a chat template what vLLM gives it in place of images, sounds and videos (a `MediaPlacing`).

    It also collects these items in order.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []

    def place(self, part: dict[str, Any], more: dict[str, Any], as_parts: bool) -> Any:
        item = item_of(part)
        self.items.append(item)
        # For a template that takes one text, vLLM writes the model's placeholder before or between the texts of the
        # message. That placeholder is not known here.
        return {"type": item.kind, **more} if as_parts else None


class StandIns:
    """Gives a chat template a digest in place of each image, sound or video (a `MediaPlacing`).

    The digest is of the item's uuid, else of its URL, else of its content part.
    """

    def place(self, part: dict[str, Any], more: dict[str, Any], as_parts: bool) -> Any:
        item = item_of(part)
        known = item.uuid if item.uuid is not None else item.url
        named = known.encode("utf-8", "surrogatepass") if known else orjson.dumps(part, default=str)
        text = f"\ufffc{item.kind} {xxh3_64_hexdigest(named)}"
        return {"type": "text", "text": text, **more} if as_parts else Placeholder(text)

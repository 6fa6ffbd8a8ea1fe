"""The name that vLLM gives to an image, which is a part of the hashes of the blocks that contain the image.

The name is a BLAKE3 digest of the image's bytes as received, of the settings that change their decoding, and of the
model's path or name. vLLM 0.28 and 0.32 join these parts differently (read in their `multimodal/hasher.py`). The rules
of the versions between are not known. If the client names an image (`uuid`), vLLM uses that name instead.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Iterable
from typing import NamedTuple

from blake3 import blake3
from xxhash import xxh3_128_digest

from ..tokens.prefixes import Generations
from .images import HEAD_BYTES, TURNING, Image, Unreadable, read

FRAMED, PLAIN = "framed", "plain"  # how vLLM 0.32 and vLLM 0.28 join the parts of a name before hashing
# Characters of base64 that are decoded at a time, which takes 0.3 ms; other threads can run in between.
_PIECE = HEAD_BYTES // 3 * 4
_OVERLAP = max(map(len, TURNING))
KNOWN_BYTES = 2 * 1024 * 1024  # the memory for cached names: room for some 8,000 images
_ENTRY_BYTES = 250
_WHITE = 255  # vLLM's default background behind transparent pixels
_LEAF, _MAPPING, _SEQUENCE = b"\3", b"\2", b"\1"


class Known(NamedTuple):
    """An image's size and colours, with the name that vLLM gives to the image."""

    image: Image
    identity: str


class Identities:
    """A cache of the names that vLLM gives to images, for one model. Thread safe."""

    def __init__(self) -> None:
        self._known: Generations[tuple[bytes, str, str], Known] = Generations(KNOWN_BYTES, lambda *_: _ENTRY_BYTES)

    def of(self, url: str, rule: str, model: str) -> Known:
        """Return the size, colours and name of the image in a data URL. Raises Unreadable.

        `rule`: how the engine's version computes the name, FRAMED (0.32) or PLAIN (0.28). `model`: the path or name
        from which the engines loaded the model.
        """
        key = xxh3_128_digest(url.encode("utf-8", "replace")), rule, model
        known = self._known.get(key)
        if known is None:
            known = _identify(url, rule, model)
            self._known.put(key, known)
        return known


def _identify(url: str, rule: str, model: str) -> Known:
    head, _, data = url[5:].partition(",")
    if url[:5].lower() != "data:" or not head.endswith(";base64") or not data or len(data) % 4:
        raise Unreadable("no base64")
    padding = len(data) - len(data.rstrip("="))
    image, marks, digest, before = None, TURNING, blake3(), b""
    for at in range(0, len(data), _PIECE):
        piece = _decoded(data[at : at + _PIECE], at + _PIECE >= len(data))
        if image is None:
            image, marks = read(piece)
            for part in _begin(image, len(data) // 4 * 3 - padding, rule):
                digest.update(part)
        if any(mark in before + piece for mark in marks):
            raise Unreadable("it may be turned in a way that is not read here")
        digest.update(piece)
        before = piece[-_OVERLAP:]
    assert image is not None
    named = model.encode("utf-8", "surrogatepass")
    for part in (*_framed(b"model_id"), _LEAF, *_framed(named)) if rule == FRAMED else (b"model_id", named):
        digest.update(part)
    return Known(image, digest.hexdigest())


def _decoded(piece: str, last: bool) -> bytes:
    try:
        if "=" in piece and not last:
            raise ValueError
        return binascii.a2b_base64(piece, strict_mode=True)
    except ValueError:
        raise Unreadable("no base64") from None


def _begin(image: Image, size: int, rule: str) -> Iterable[bytes]:
    """Return the byte strings that vLLM hashes before an image's own bytes.

    `size`: the number of the image's bytes. `rule`: how the engine's version joins the hashed parts, FRAMED (vLLM 0.32)
    or PLAIN (0.28). For an image that is not RGB, the byte strings include the settings by which vLLM converts it to
    RGB.
    """
    white = struct.pack("<q", _WHITE)
    if rule == PLAIN:
        if image.rgb:
            return b"image", b"image"
        colours = [part for i in range(3) for part in (b"image.io_config.rgba_background_color.%d" % i, white)]
        return (b"image", b"image.io_config.image_mode", b"RGB", *colours, b"image.data")
    if image.rgb:
        return (*_framed(b"image"), _LEAF, *_framed(b"image"), _LEAF, struct.pack("<q", size))
    return (
        *_framed(b"image"), _LEAF, *_framed(b"image"), _MAPPING, struct.pack("<q", 2),
        *_framed(b"io_config"), _MAPPING, struct.pack("<q", 2),
        *_framed(b"image_mode"), _LEAF, *_framed(b"RGB"),
        *_framed(b"rgba_background_color"), _SEQUENCE, struct.pack("<q", 3), *(_LEAF, *_framed(white)) * 3,
        *_framed(b"data"), _LEAF, struct.pack("<q", size),
    )  # fmt: skip


def _framed(part: bytes) -> tuple[bytes, bytes]:
    return struct.pack("<q", len(part)), part

"""An image's size and colours, read from its header: PNG, JPEG and WebP, as Pillow reads them.

No pixels are decoded. An image of which an engine may see another size or other colours than its header says is
Unreadable, because a wrong answer is worse than none.
"""

from __future__ import annotations

import re
from typing import NamedTuple

HEAD_BYTES = 192 * 1024  # of an image, which must contain its header; a JPEG's EXIF has up to 64 KiB
# The most parts of a header that are read; each costs a step of Python. A photograph has a dozen, one with a large
# colour profile some more, and an engine would read 46,000 of four bytes.
MOST_PARTS = 512
# Pillow refuses images of more pixels, and so do engines.
_MOST_PIXELS = 178_956_970
_ORIENTATION, _SHORT = 0x0112, 3
_TURNS_SIDES = range(5, 9)  # the orientations that exchange width and height
# Marks of data that may turn an image, anywhere in it: XMP, and EXIF in forms that are not read here.
TURNING = (b"tiff:Orientation", b"XML:com.adobe.xmp\0\1", b"Raw profile type", b"acTL")
_EXIF_OF_PNG = b"eXIf"
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of JPEG that begin a frame
_NO_FILL = re.compile(rb"[^\xff]")  # the marker after a run of 0xFF fill bytes
_BARE = frozenset(range(0xD0, 0xD8)) | {0x01}  # markers without content


class Unreadable(Exception):
    """Raised where it is not certain how an engine reads an image."""


class Image(NamedTuple):
    """The size and colours of an image.

    `rgb`: Pillow reads it as RGB, in colour and without transparency, so no engine converts it.
    """

    width: int
    height: int
    rgb: bool


def read(head: bytes) -> tuple[Image, tuple[bytes, ...]]:
    """Read an image from `head`, its first HEAD_BYTES. Raises Unreadable.

    Also returns the byte sequences that must not occur anywhere in the image, because they may turn it.
    """
    marks = TURNING
    try:
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            image, exif = _png(head)
            marks = TURNING if exif else (*TURNING, _EXIF_OF_PNG)
        elif head.startswith(b"\xff\xd8\xff"):
            image = _jpeg(head)
        elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            image = _webp(head)
        else:
            raise Unreadable("a format that is not read here")
    except (IndexError, ValueError):
        raise Unreadable("its header ends early") from None
    if not 0 < image.width * image.height <= _MOST_PIXELS:
        raise Unreadable(f"it has {image.width} x {image.height} pixels")
    return image, marks


def _number(data: bytes, at: int, size: int, order: str = "big") -> int:
    if at + size > len(data):
        raise IndexError
    return int.from_bytes(data[at : at + size], order)  # type: ignore[arg-type]


def _png(head: bytes) -> tuple[Image, bool]:
    """Return a PNG's size and colours, and whether EXIF was found before the pixels; EXIF may also follow them."""
    if head[12:16] != b"IHDR" or _number(head, 8, 4) != 13:
        raise Unreadable("a PNG that does not begin with its header")
    image = Image(_number(head, 16, 4), _number(head, 20, 4), _number(head, 25, 1) == 2)
    at = 8
    for _ in range(MOST_PARTS):
        if at + 8 > len(head):
            break
        size, name = _number(head, at, 4), head[at + 4 : at + 8]
        if name == b"IDAT":
            return image, False
        if name == _EXIF_OF_PNG:
            return _turned(image, head[at + 8 : at + 8 + size]), True
        at += size + 12
    raise Unreadable("no pixels within the parts that are read")


def _jpeg(head: bytes) -> Image:
    at, image, exif = 2, None, b""
    for _ in range(MOST_PARTS):
        marked = _NO_FILL.search(head, at)
        if marked is None:
            raise IndexError
        marker, at = head[marked.start()], marked.end()
        if marker == 0xDA:
            break
        if marker in _BARE:
            continue
        size = _number(head, at, 2)
        content = head[at + 2 : at + size]
        if size < 2 or len(content) < size - 2:
            raise IndexError
        if marker in _FRAMES:
            if image is not None or content[0] != 8:
                raise Unreadable("a JPEG of several frames, or of more than 8 bits")
            image = Image(_number(content, 3, 2), _number(content, 1, 2), content[5] == 3)
        elif marker == 0xE1 and content.startswith(b"Exif\0\0"):
            if exif:
                raise Unreadable("a JPEG with several EXIF parts")
            exif = content[6:]
        at += size
        if _number(head, at, 1) != 0xFF:
            raise Unreadable("a JPEG with bytes between its parts")
    else:
        raise Unreadable(f"a JPEG with more than {MOST_PARTS} parts before its pixels")
    if image is None:
        raise Unreadable("a JPEG without a frame")
    return _turned(image, exif) if exif else image


def _turned(image: Image, exif: bytes) -> Image:
    """Return the image as engines turn it: with width and height exchanged if the orientation in its EXIF says so."""
    order = {b"II": "little", b"MM": "big"}.get(exif[:2])
    if order is None or _number(exif, 2, 2, order) != 42:
        raise Unreadable("EXIF that is not read here")
    at = _number(exif, 4, 4, order)
    entries = _number(exif, at, 2, order)
    if entries > MOST_PARTS:
        raise Unreadable(f"EXIF of more than {MOST_PARTS} entries")
    for entry in range(at + 2, at + 2 + 12 * entries, 12):
        if _number(exif, entry, 2, order) == _ORIENTATION:
            if _number(exif, entry + 2, 2, order) != _SHORT or _number(exif, entry + 4, 4, order) != 1:
                raise Unreadable("EXIF that is not read here")
            sides = _number(exif, entry + 8, 2, order) in _TURNS_SIDES
            return Image(image.height, image.width, image.rgb) if sides else image
    return image


def _webp(head: bytes) -> Image:
    kind = head[12:16]
    if kind == b"VP8 ":
        if head[23:26] != b"\x9d\x01\x2a":
            raise Unreadable("a WebP without a key frame")
        return Image(_number(head, 26, 2, "little") & 0x3FFF, _number(head, 28, 2, "little") & 0x3FFF, True)
    if kind == b"VP8L" and head[20:21] == b"\x2f":
        bits = _number(head, 21, 4, "little")
        return Image((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, not bits >> 28 & 1)
    raise Unreadable("a WebP with parts that are not read here")

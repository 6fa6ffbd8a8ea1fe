"""Reading an image's size and colours from its header: PNG, JPEG and WebP, as Pillow reads them.

No pixels are decoded. Unreadable is raised for an image for which an engine may find another size or other colours than
its header says, because a wrong answer is worse than none.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# The header must lie within this many bytes from the start of an image; a JPEG's EXIF has up to 64 KiB.
HEAD_BYTES = 192 * 1024
# The most parts of a header that are read, because each takes a step of Python. A photograph has a dozen, and one with
# a large colour profile some more. An engine would read even 46,000 parts of four bytes.
MOST_PARTS = 512
# Pillow, and so every engine, refuses images of more pixels.
_MOST_PIXELS = 178_956_970
_ORIENTATION, _SHORT = 0x0112, 3
_TURNS_SIDES = range(5, 9)  # the orientations that exchange width and height
# Byte strings that begin data by which Pillow may rotate an image, wherever they are in the file: XMP, and EXIF in
# forms that are not read here.
TURNING = (b"tiff:Orientation", b"XML:com.adobe.xmp\0\1", b"Raw profile type", b"acTL")
_EXIF_OF_PNG = b"eXIf"
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of JPEG that begin a frame
_NO_FILL = re.compile(rb"[^\xff]")  # the marker after a run of 0xFF fill bytes
_BARE = frozenset(range(0xD0, 0xD8)) | {0x01}  # markers without content


class Unreadable(Exception):
    """Raised for an image if it is not certain which size and colours an engine finds; the text says why."""


class Image(NamedTuple):
    """The size of an image in pixels, and whether it is RGB.

    `rgb`: Pillow reads the image in colour and without transparency, so engines need not convert it.
    """

    width: int
    height: int
    rgb: bool


def read(head: bytes) -> tuple[Image, tuple[bytes, ...]]:
    """Return an image's size and colours, and byte strings whose presence in its data would make the size uncertain.

    `head`: the image's first 192 KiB (HEAD_BYTES). The byte strings begin metadata by which an engine may rotate the
    image, and which is not interpreted here. The caller searches all of the image for them. Raises Unreadable.
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
    """Return a PNG's size and colours, and whether its EXIF was found before the pixels (it may also follow them)."""
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
    """Return the image with width and height exchanged if the orientation in its EXIF makes engines rotate it so.

    `exif`: the EXIF data, from its byte-order mark on. Raises Unreadable or IndexError for EXIF of an unknown form.
    """
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

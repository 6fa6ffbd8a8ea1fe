"""Images of all kinds, made by Pillow, and such that nobody can read."""

from __future__ import annotations

import io
import random

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from .models import png

ORIENTATION = 0x0112
SIDES = ((1, 1), (27, 5), (64, 48), (111, 1000), (501, 500))


def saved(form: str, mode: str = "RGB", size: tuple[int, int] = (64, 48), orientation: int = 0, **more) -> bytes:
    image = Image.effect_noise(size, 50).convert(mode) if mode != "I;16" else Image.new(mode, size, 7)
    if more.pop("alpha", False):
        image.putalpha(Image.effect_noise(size, 50))
    if orientation:
        exif = image.getexif()
        exif[ORIENTATION] = orientation
        exif[0x010F] = "somebody's camera"
        more["exif"] = exif.tobytes()
    with io.BytesIO() as written:
        image.save(written, form, **more)
        return written.getvalue()


def readable() -> dict[str, bytes]:
    """Those of which the gateway has to find out all that there is."""
    random.seed(4)
    found = {f"{form} {width} x {height}": saved(form, size=(width, height)) for form in ("PNG", "JPEG", "WEBP") for width, height in SIDES}  # fmt: skip
    found |= {f"PNG {mode}": saved("PNG", mode) for mode in ("1", "L", "LA", "P", "RGBA", "I;16")}
    found |= {f"JPEG {mode}": saved("JPEG", mode) for mode in ("L", "CMYK")}
    found |= {f"JPEG turned {i}": saved("JPEG", orientation=i) for i in range(1, 9)}
    found |= {f"PNG turned {i}": saved("PNG", "RGBA" if i % 2 else "RGB", orientation=i) for i in (1, 3, 6, 8)}
    found |= {
        "JPEG progressive": saved("JPEG", progressive=True),
        "JPEG with a profile": saved("JPEG", icc_profile=bytes(90_000)),
    }
    found |= {
        "WEBP lossless": saved("WEBP", lossless=True),
        "WEBP lossless RGBA": saved("WEBP", "RGBA", lossless=True, alpha=True),
    }
    found |= {"WEBP opaque RGBA": saved("WEBP", "RGBA")}
    found |= {"PNG of one colour": png(), "PNG larger than a piece": saved("PNG", size=(700, 700))}
    return found


def unreadable() -> dict[str, bytes]:
    """Those that it says nothing about: engines may turn them, take another size, or refuse them."""
    said = PngInfo()
    said.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    packed = PngInfo()
    packed.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>', zip=True)
    whole, photo = png(), saved("JPEG", orientation=6)
    frames = [Image.new("RGB", (8, 8), shade) for shade in ("red", "blue")]
    moving = {}
    for form in ("PNG", "GIF", "WEBP"):
        with io.BytesIO() as written:
            frames[0].save(written, form, save_all=True, append_images=frames[1:])
            moving[f"{form} that moves"] = written.getvalue()
    return {
        "nothing": b"", "a text": b"What is this?", "a signature": whole[:8], "half a header": whole[:20], "no size": png(0, 5),
        "no pixels": whole[:33], "a huge size": png(8, 8).replace(b"\0\0\0\x08\0\0\0\x08", b"\0\0\xff\xff\0\0\xff\xff", 1),
        "a JPEG that ends": photo[: photo.index(b"Exif") + 20], "a JPEG of zeros": b"\xff\xd8\xff" + bytes(1000),
        "a JPEG whose parts have no length": b"\xff\xd8" + b"\xff\xe0\0\0" * 100,
        "EXIF without an end": photo.replace(b"Exif\0\0II*\0\x08\0\0\0", b"Exif\0\0II*\0\xff\xff\xff\x7f").replace(
            b"Exif\0\0MM\0*\0\0\0\x08", b"Exif\0\0MM\0*\x7f\xff\xff\xff"),
        "XMP that turns": saved("PNG", pnginfo=said), "XMP that may turn": saved("PNG", pnginfo=packed),
        "EXIF behind the pixels": whole[:-12] + b"\0\0\0\x04eXIf" + bytes(8) + whole[-12:],
        "TIFF": saved("TIFF"), "BMP": saved("BMP"), "WEBP RGBA": saved("WEBP", "RGBA", alpha=True), **moving,
    }  # fmt: skip

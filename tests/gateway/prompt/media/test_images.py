"""Sizes and colours of images by their headers, held to Pillow, and the names that vLLM gives images."""

import base64
import contextlib
import io
import json
import random
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from gateway.prompt.media import qwen_vl
from gateway.prompt.media.identity import FRAMED, KNOWN_BYTES, PLAIN, Identities
from gateway.prompt.media.images import HEAD_BYTES, Unreadable, read

from . import pictures
from .models import data_url, png

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
READABLE, UNREADABLE = pictures.readable(), pictures.unreadable()
RULES = {"0.28.0": PLAIN, "0.32.0": FRAMED}


@pytest.mark.parametrize("name", READABLE)
def test_what_pillow_reads(name):
    with Image.open(io.BytesIO(READABLE[name])) as image:
        turned = ImageOps.exif_transpose(image)
    found = Identities().of(data_url(READABLE[name]), FRAMED, "m").image
    assert (found.width, found.height, found.rgb) == (*turned.size, image.mode == "RGB")


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_not_certain(name):
    with pytest.raises(Unreadable):
        Identities().of(data_url(UNREADABLE[name]), FRAMED, "m")


@pytest.mark.parametrize("name", ["PNG 64 x 48", "JPEG turned 6", "WEBP lossless", "WEBP 64 x 48"])
def test_any_bytes_are_read_or_refused_and_nothing_else(name):
    """Cut anywhere, and with bytes changed in the header."""
    whole, rng = READABLE[name], random.Random(5)
    for end in range(min(len(whole), 1000)):
        with contextlib.suppress(Unreadable):
            read(whole[:end])
    for _ in range(2000):
        broken = bytearray(whole[:400])
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        with contextlib.suppress(Unreadable):
            read(bytes(broken))


@pytest.mark.parametrize("version", RULES)
def test_names_and_counts_are_those_of_vllm(version):
    least, most = RECORDED["processor"]["min_pixels"], RECORDED["processor"]["max_pixels"]
    assert len(RECORDED["images"]) > 10
    for one in RECORDED["images"]:
        url = f"data:image/png;base64,{one['data']}"
        known = Identities().of(url, RULES[version], RECORDED["model"])
        counted = qwen_vl.tokens(known.image.width, known.image.height, 28, least, most)
        assert [known.identity, counted] == one[version], one["what"]


def test_names_follow_content_model_and_rule_alone():
    names = Identities()
    first = names.of(data_url(png(shade=1)), FRAMED, "a").identity
    assert names.of(data_url(png(shade=1), "image/jpeg"), FRAMED, "a").identity == first
    assert names.of(data_url(png(shade=1)).replace("data:", "DATA:"), FRAMED, "a").identity == first
    others = [(png(shade=2), FRAMED, "a"), (png(shade=1), PLAIN, "a"), (png(shade=1), FRAMED, "b")]
    assert first not in {names.of(data_url(image), rule, model).identity for image, rule, model in others}


def test_an_image_of_several_pieces_is_named_as_if_it_were_one():
    """Read with a rule written down once more: all bytes at once."""
    from blake3 import blake3

    for size in (HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, 3 * HEAD_BYTES + 2):
        image = png() + bytes(size - len(png()))
        named = blake3(b"imageimage" + image + b"model_id" + b"m").hexdigest()
        assert Identities().of(data_url(image), PLAIN, "m").identity == named


@pytest.mark.parametrize(
    "url",
    [
        "", "data:", "data:,", "data:image/png;base64,", "data:image/png,AAAA", "data:image/png;base32,AAAA", "http://x/y.png",
        data_url(png())[:-1], data_url(png()) + "\n", data_url(png()).replace(",", ", "), data_url(png()) + "AAAA====",
        "data:image/png;base64," + "=" * 8, data_url(png()).replace("A", "\u00e9", 1), data_url(png()).replace("A", "\ud800", 1),
        "data:image/png;base64," + base64.b64encode(png() + bytes(HEAD_BYTES - len(png()))).decode()[:-4] + "AA==" + "AAAA",
    ],
)  # fmt: skip
def test_urls_that_hold_no_image(url):
    with pytest.raises(Unreadable):
        Identities().of(url, FRAMED, "m")


def test_images_that_were_seen_take_a_bounded_space(monkeypatch):
    names = Identities()
    for number in range(20_000):
        names._known.put((number.to_bytes(16, "little"), FRAMED, "m"), None)
    assert len(names._known) * 250 <= KNOWN_BYTES


def test_an_image_that_was_seen_is_not_read_again(monkeypatch):
    names, url = Identities(), data_url(READABLE["PNG larger than a piece"])
    first = names.of(url, FRAMED, "m")
    monkeypatch.setattr("gateway.prompt.media.identity._identify", None)
    assert names.of(url, FRAMED, "m") == first


SEGMENT, CHUNK = b"\xfe\0\2\xff", bytes(4) + b"abcd" + bytes(4)
FRAME = b"\xc0\0\x11\x08\0\x40\0\x40\3" + bytes(9)


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"\xff\xd8\xff" + SEGMENT * 46_000 + FRAME + b"\xff\xda\0\2", id="comments"),
        pytest.param(b"\xff\xd8\xff" + b"\xd0\xff" * 90_000 + FRAME + b"\xff\xda\0\2", id="bare markers"),
        pytest.param(png()[:33] + CHUNK * 15_000 + png()[33:], id="chunks"),
        pytest.param(
            b"\xff\xd8\xff\xe1\xf0\x12Exif\0\0MM\0*\0\0\0\x08\x14\0"
            + bytes(61_440)
            + b"\xff"
            + FRAME
            + b"\xff\xda\0\2",
            id="entries of EXIF",
        ),
    ],
)
def test_a_header_of_many_parts_is_declined_after_a_bounded_number_of_steps(head):
    """Whole as it is: an engine reads it. Lines of Python are counted, since the machine may be busy."""

    def declined():
        with pytest.raises(Unreadable):
            read(head)

    assert lines_of(declined) < 20_000


def test_fill_bytes_before_a_part_are_passed_over_in_one_step():
    whole = READABLE["JPEG 64 x 48"]
    filled = whole[:2] + b"\xff" * 150_000 + whole[2:]
    assert read(filled[:HEAD_BYTES])[0] == read(whole)[0]
    assert lines_of(lambda: read(filled[:HEAD_BYTES])) < 2_000


def lines_of(call) -> int:
    found = 0

    def count(frame, event, argument):
        nonlocal found
        if frame.f_code.co_filename.endswith("images.py"):
            found += event == "line"
            return count
        return None

    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(None)
    return found

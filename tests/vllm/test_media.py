"""Images held to vLLM's own code, without an engine: their names, their tokens, and the blocks that they are in."""

import pytest

from gateway.prompt.media import qwen_vl
from gateway.prompt.media.identity import FRAMED, PLAIN, Identities

from ..gateway.prompt.media import pictures
from ..gateway.prompt.media.bodies import compare, recordings
from ..gateway.prompt.media.models import data_url
from ..gateway.prompt.media.vision_model import tiny_qwen2_vl
from .engines import folder, version
from .record_media import MODEL, PROCESSOR, asked, blocks

pytestmark = [pytest.mark.exact, pytest.mark.timeout(900)]


def test_blocks_of_bodies(vllm_python, tmp_path):
    """By vLLM's own renderers and its own rule for keys, without an engine."""
    if not (folder() / "vision" / "torchvision").is_dir():
        pytest.skip("vLLM's environment has no torchvision: tests/vllm/install.sh brings one")
    name, theirs = ".".join(map(str, version())), blocks(folder(), tmp_path)
    found = compare(tiny_qwen2_vl(tmp_path / "model"), name, theirs)
    assert not found.wrong and not found.declined and len(found.equal) > 100
    assert dict(recordings()).get(name, theirs) == theirs, "what is recorded is another engine's"


def test_names_and_counts_of_images_of_all_kinds(vllm_python):
    images = {**pictures.readable(), **pictures.unreadable()}
    names, rule = Identities(), PLAIN if version() < (0, 29) else FRAMED
    told = asked(vllm_python, images)
    for (what, one), theirs in zip(images.items(), told, strict=True):
        if what in pictures.unreadable():
            continue  # the gateway says nothing of these, see tests/gateway/prompt/media
        known = names.of(data_url(one), rule, MODEL)
        count = qwen_vl.tokens(known.image.width, known.image.height, 28, PROCESSOR["min_pixels"], PROCESSOR["max_pixels"])  # fmt: skip
        assert [known.identity, count] == theirs, what

"""Images held to vLLM's own code, without an engine: their names, their tokens, and the blocks that they are in."""

import pytest

from gateway.prompt.media import llama4, qwen_vl
from gateway.prompt.media.identity import FRAMED, PLAIN, Identities

from ..gateway.prompt.media import cutting, pictures
from ..gateway.prompt.media.bodies import FAMILIES, compare, recordings
from ..gateway.prompt.media.models import data_url
from .engines import folder, version
from .record_media import MODEL, PROCESSOR, asked, blocks, tiles

pytestmark = [pytest.mark.exact, pytest.mark.timeout(900)]


@pytest.fixture
def vision(vllm_python):
    if not (folder() / "vision" / "torchvision").is_dir():
        pytest.skip("vLLM's environment has no torchvision: tests/vllm/install.sh brings one")


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_bodies(vision, tmp_path, family):
    """By vLLM's own renderers, processors and rule for keys, without an engine."""
    name, theirs = ".".join(map(str, version())), blocks(family, folder(), tmp_path)
    found = compare(family, FAMILIES[family].folder(tmp_path / "model"), name, theirs)
    assert not found.wrong and not found.declined and len(found.equal) > 100
    recorded = {(one.family, one.version): one.answers for one in recordings()}
    assert recorded.get((family, name), theirs) == theirs, "what is recorded is another engine's"


def test_tiles_of_llama4(vision):
    for setting, theirs in zip(cutting.SETTINGS, tiles(folder()), strict=True):
        choices = llama4.Choices(setting.tile, setting.most, setting.largest)
        assert [list(choices.tiles(*size)) for size in setting.sizes()] == theirs


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

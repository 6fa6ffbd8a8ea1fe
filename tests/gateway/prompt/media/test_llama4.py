"""Images of Llama 4: their tiles are those of transformers' processor, and which models are known."""

import json

import pytest

from gateway.prompt.media.llama4 import tiling
from gateway.prompt.tokens.tokenizer import Tokenizer

from .cutting import RECORDED, SETTINGS
from .llama4_model import TILE, tiny_llama4
from .models import family_with


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("version", ["0.28.0", "0.32.0"])
def test_tiles_are_those_of_the_processor(version, setting):
    told = json.loads(RECORDED.read_text())[version][SETTINGS.index(setting)]
    grid = tiling(setting.tile, setting.most, setting.largest)
    found = [grid(*size) for size in setting.sizes()]
    assert [100 * rows + columns for rows, columns in found] == told
    assert len(set(found)) >= 2 * setting.most or setting.largest or setting.most == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama4(tmp_path_factory.mktemp("models") / "llama4")


def test_the_tokens_of_an_image(model):
    tokenizer = Tokenizer(model)
    names = {one["id"]: one["content"].strip("<|>") for one in tokenizer.added_tokens}
    expansion = family_with(model).expansion
    assert [(names[id], count) for id, count in expansion(TILE, TILE)] == [
        ("image_start", 1), ("image", 1), ("patch", 4), ("image_end", 1),
    ]  # fmt: skip
    row = [("patch", 4), ("tile_x_separator", 1)] * 2 + [("patch", 4), ("tile_y_separator", 1)]
    assert [(names[id], count) for id, count in expansion(3 * TILE, 2 * TILE)] == [
        ("image_start", 1), *row, *row, ("image", 1), ("patch", 4), ("image_end", 1),
    ]  # fmt: skip


VISION = {"image_size": TILE, "patch_size": 14}


@pytest.mark.parametrize(
    "changes, known",
    [
        ({}, True),
        ({"preprocessor_config": {"image_processor_type": "Llama4ImageProcessor"}}, True),
        ({"preprocessor_config": {"resize_to_max_canvas": True}}, True),
        ({"processor_config": {"patch_token": "<|patch|>"}}, True),
        ({"config": {"vision_config": VISION}}, True),
        ({"config": {"vision_config": {}}}, False),  # whose tiles have another size than the processor's
        ({"config": {"vision_config": {**VISION, "patch_size": 15}}}, False),
        ({"config": {"vision_config": {**VISION, "pixel_shuffle_ratio": 0}}}, False),
        ({"config": {"model_type": "mllama"}}, False),
        ({"config": {"image_token_index": 5}}, False),
        ({"preprocessor_config": {"max_patches": 0}}, False),
        ({"preprocessor_config": {"max_patches": 10**6}}, False),
        ({"preprocessor_config": {"size": {"height": TILE, "width": 2 * TILE}}}, False),
        ({"preprocessor_config": {"do_resize": False}}, False),
        ({"preprocessor_config": {"image_processor_type": "SomebodysProcessor"}}, False),
        ({"processor_config": {"image_token": "<|picture|>"}}, False),
    ],
)
def test_which_models_are_known(changes, known, tmp_path):
    assert (family_with(tiny_llama4(tmp_path / "model"), **changes) is not None) == known

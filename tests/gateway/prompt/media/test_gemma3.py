"""Images of Gemma 3: which models are known, and the newlines around an image."""

import json

import numpy as np
import pytest

from gateway.prompt.media.gemma3 import join
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.prompt import CHAT

from .gemma3_model import TOKENS, tiny_gemma3
from .models import blank, data_url, family_with, image, system, text, user

ONE, TWO, THREE, FOUR, BEGIN, SOFT, END, WORD = 1, 2, 3, 4, 10, 11, 12, 20
IMAGE = [TWO, BEGIN, SOFT, SOFT, END, TWO]


def joined(*parts):
    """Of parts that are images or single tokens, the tokens and where the images start."""
    ids, starts = [], []
    for part in parts:
        if part is IMAGE:
            starts.append(len(ids))
        ids += part if part is IMAGE else [part]
    found = join(
        (ONE, TWO, THREE, FOUR), np.array(ids, np.uint32), np.array(starts, np.int64), np.full(len(starts), len(IMAGE))
    )
    return None if found is None else (found[0].tolist(), found[1].tolist())


@pytest.mark.parametrize(
    "parts, ids, starts",
    [
        ([WORD, IMAGE, WORD], [WORD, *IMAGE, WORD], [1]),
        ([WORD, ONE, IMAGE], [WORD, THREE, *IMAGE[1:]], [1]),
        ([TWO, IMAGE], [FOUR, *IMAGE[1:]], [0]),
        ([THREE, IMAGE], [THREE, *IMAGE], [1]),
        ([IMAGE, TWO, WORD], [*IMAGE[:-1], FOUR, WORD], [0]),
        ([IMAGE, IMAGE], [*IMAGE[:-1], FOUR, *IMAGE[1:]], [0, 5]),
        ([IMAGE, ONE, IMAGE], [*IMAGE, THREE, *IMAGE[1:]], [0, 6]),
        ([IMAGE, TWO, IMAGE], [*IMAGE[:-1], FOUR, *IMAGE], [0, 6]),
        ([IMAGE, TWO, TWO, IMAGE, IMAGE], [*IMAGE[:-1], FOUR, FOUR, *IMAGE[1:-1], FOUR, *IMAGE[1:]], [0, 6, 11]),
        ([TWO, ONE, WORD, IMAGE], [THREE, WORD, *IMAGE], [2]),  # of a text alone, too
        ([TWO, TWO, TWO, WORD, IMAGE], [FOUR, TWO, WORD, *IMAGE], [3]),
    ],
)
def test_newlines_that_come_to_stand_side_by_side(parts, ids, starts):
    assert joined(*parts) == (ids, starts)


def test_an_image_that_the_engine_loses():
    assert joined(IMAGE, ONE, WORD) is None
    assert joined(IMAGE, WORD, IMAGE, ONE) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_gemma3(tmp_path_factory.mktemp("models") / "gemma3")


def test_an_image_behind_which_one_newline_comes_is_declined(model):
    pipeline = Pipeline(model, "m", 16)
    pipeline.media.root = "somebody/Gemma-3"
    one = image(data_url(blank(30, 20)))
    for said, found in (("What?", ("media", "exact")), ("\nWhat?", ("partly", "template"))):
        prompt = pipeline.prepare(CHAT, json.dumps({"messages": [system(), user(one, text(said))]}).encode())
        assert (prompt.mode, prompt.media) == found


@pytest.mark.parametrize(
    "changes, known",
    [
        ({}, True),
        ({"preprocessor_config": {"do_pan_and_scan": False}}, True),
        ({"preprocessor_config": {"image_processor_type": "Gemma3ImageProcessorFast"}}, True),
        ({"tokenizer_config": {"extra_special_tokens": {}}}, True),
        ({"tokenizer_config": {"boi_token": {"content": "<start_of_image>"}}}, True),
        ({"preprocessor_config": {"do_pan_and_scan": True}}, False),
        ({"preprocessor_config": {"do_resize": False}}, False),
        ({"preprocessor_config": {"image_processor_type": "SomebodysProcessor"}}, False),
        ({"config": {"model_type": "gemma3n"}}, False),
        ({"config": {"mm_tokens_per_image": 2 * TOKENS}}, False),
        ({"config": {"boi_token_index": 7_000}}, False),
        ({"config": {"image_token_index": "8"}}, False),
        ({"processor_config": {"image_seq_length": 2 * TOKENS}}, False),
        ({"tokenizer_config": {"eoi_token": "<eos>"}}, False),  # and in extra_special_tokens another
        ({"tokenizer_config": {"extra_special_tokens": {}, "image_token": None}}, False),
    ],
)
def test_which_models_are_known(changes, known, tmp_path):
    assert (family_with(tiny_gemma3(tmp_path / "model"), **changes) is not None) == known


def test_a_tokenizer_without_a_token_for_each_number_of_newlines(model, tmp_path):
    directory = tiny_gemma3(tmp_path / "model")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if pair != ["\n\n", "\n\n"]]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert family_with(directory) is None

"""What the data path takes from the settings, and what from the model."""

import json

import pytest

from gateway import datapath
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.tokens.model import LoadedModel
from gateway.settings import Settings, load
from replicas.simulated.model import sim_model_dir

MIB = 2**20


@pytest.fixture(scope="module")
def pipeline():
    return Pipeline(sim_model_dir(), "m", 16)


@pytest.mark.parametrize(
    "context, largest", [(None, 64), (8192, 16), (131_072, 16), (1_000_000, 30), (10_000_000, 64), (10**12, 64)]
)
def test_the_largest_body_is_as_the_longest_context_needs(pipeline, context, largest):
    pipeline.max_model_len = context
    assert datapath.limits(Settings(), [pipeline]).body_bytes // MIB == largest
    assert datapath.limits(Settings(max_body_bytes="5MiB"), [pipeline]).body_bytes == 5 * MIB


def test_nothing_is_taken_for_too_large_of_a_model_that_is_not_known():
    assert datapath.limits(Settings(), [Pipeline(None, "m", 16, max_model_len=8192)]).body_bytes == 64 * MIB


@pytest.mark.parametrize(
    "file, said",
    [("preprocessor_config.json", {}), ("processor_config.json", {}), ("config.json", {"vision_config": {}})],
)
def test_images_may_have_any_size(tmp_path, file, said):
    (tmp_path / file).write_text(json.dumps(said))
    assert LoadedModel(tmp_path, {}, {}, said).takes_media
    assert not LoadedModel(tmp_path / "other", {}, {}, {}).takes_media


def test_a_largest_body_that_nobody_gave_is_no_size():
    assert "max_body_bytes: null" in load({}, {}).to_yaml() and load({}, {}).plain()["max_body_bytes"] is None

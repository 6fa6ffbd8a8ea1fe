"""Models for the tests of this room, each loaded once."""

from functools import cache

import pytest

from gateway.prompt.pipeline import Pipeline

from .reference import HERE, MODELS, Reference, model_dir


@cache
def pair(name: str) -> tuple[Pipeline, Reference]:
    """A pipeline and its reference; "parts" is Qwen3's tokenizer with a template that loops over parts."""
    directory = model_dir("qwen3" if name == "parts" else name)
    template = HERE / "parts.jinja" if name == "parts" else None
    pipeline = Pipeline(directory, "m", 16, chat_template=template)
    return pipeline, Reference(directory, template.read_text() if template else None)


@pytest.fixture(params=MODELS)
def model(request):
    return pair(request.param)


@pytest.fixture
def sim():
    return pair("sim")


@pytest.fixture
def load_model():
    return pair

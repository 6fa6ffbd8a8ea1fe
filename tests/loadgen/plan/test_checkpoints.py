"""Where a model's shape and weights are read, and what is said when they are not there."""

import json

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from loadgen.plan import checkpoints
from policies.kv_space import BadModel
from tests.policies.test_kv_space import LLAMA_8B

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


@pytest.mark.parametrize("part", [".", "config.json"])
def test_a_folder_or_its_config(folder, part):
    found = checkpoints.find(str(folder / part))
    assert found.shape.layers[0].count == 32 and found.weights is None


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "config.json is not JSON"), ("[]", "not a JSON object"), ("{}", "is this a language model's")],
)
def test_a_config_that_is_none(folder, text, why):
    (folder / "config.json").write_text(text)
    with pytest.raises(BadModel, match=f"--model {folder}: .*{why}"):
        checkpoints.find(str(folder))


def test_no_such_folder(tmp_path):
    for name in (str(tmp_path / "gone"), "Llama"):
        with pytest.raises(BadModel, match="there is no such folder; give the one with config.json"):
            checkpoints.find(name)
    with pytest.raises(BadModel, match="can't read config.json: No such file"):
        checkpoints.find(str(tmp_path))


def test_a_name_is_fetched_and_only_the_small_files(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.append((name, options)) or str(folder)
    )
    assert checkpoints.find("meta/llama-8b").shape.kv_heads == 8
    assert asked == [("meta/llama-8b", {"allow_patterns": ["config.json", INDEX]})]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LocalEntryNotFoundError("offline"), "is not in the cache .* its hub can't be reached: .*, or give the folder"),
        (OSError("gated"), r"can't be fetched \(gated\): set HF_TOKEN if the model is gated, or give the folder"),
    ],
)
def test_a_name_that_can_not_be_fetched(monkeypatch, error, said):
    def gone(name, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", gone)
    with pytest.raises(BadModel, match=said):
        checkpoints.find("meta/llama-8b")


def test_weights_by_the_files_or_by_the_index_of_the_shards(folder):
    for name, size in (("a.safetensors", 10), ("b.safetensors", 20), ("tokenizer.json", 5)):
        (folder / name).write_bytes(b"x" * size)
    assert checkpoints.find(str(folder)).weights == 30
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 16_060_522_496.0}}))  # some are still to come
    assert checkpoints.find(str(folder)).weights == 16_060_522_496

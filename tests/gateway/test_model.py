"""Which folder the tokenizer comes from, by what is told of the model."""

import pytest

from gateway.model import SIM, model_dir
from gateway.settings import ConfigError
from replicas.simulated.model import sim_model_dir


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_the_first_name_that_leads_to_a_folder_is_taken(tmp_path):
    assert model_dir(str(tmp_path)) == tmp_path
    assert model_dir(None, str(tmp_path / "not here"), str(tmp_path), SIM) == tmp_path
    assert model_dir(str(tmp_path / "not here"), SIM) == sim_model_dir()


def test_of_names_that_lead_nowhere_each_is_said_with_why():
    with pytest.raises(
        ConfigError,
        match=r"no directory /models/of/another/machine: set model to .* nobody/nothing is not in the .* cache",
    ):
        model_dir("/models/of/another/machine", "nobody/nothing", "nobody/nothing")
    with pytest.raises(ConfigError, match="do not name their model.* Give --model"):
        model_dir(None, None)

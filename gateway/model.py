"""Which model's tokenizer and chat template the gateway works with: a name or a folder becomes a folder."""

from __future__ import annotations

from pathlib import Path

from gateway.config import ConfigError

SIM = "sim"  # what the simulated engine calls the model that comes with it


def model_dir(name: str | None) -> Path:
    """The folder with the tokenizer of the model called `name`. ConfigError says what is wrong and what would do."""
    from gateway.prompt.model import ModelError, find_model

    if name is None:
        raise ConfigError("the replicas do not name their model, so there is no tokenizer to use. Give --model NAME_OR_FOLDER")
    if name == SIM:
        from replicas.simulated.model import sim_model_dir

        return sim_model_dir()
    try:
        return find_model(name)
    except ModelError as error:
        raise ConfigError(f"model {name}: {error}") from None

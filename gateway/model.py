"""Which model's tokenizer and chat template the gateway works with: a name or a folder becomes a folder."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.config import ConfigError, Settings
from replicas.launch import profile as profiles
from replicas.launch.command import LaunchProfile

SIM = "sim"  # what the simulated engine calls the model that comes with it


def model_dir(*names: str | None) -> Path:
    """The folder with the model's tokenizer, by the first of `names` (None: not told) that leads to one. ConfigError
    says of each what is wrong and what would do."""
    from gateway.prompt.tokens.model import ModelError, find_model

    wrong = []
    for name in dict.fromkeys(filter(None, names)):
        if name == SIM:
            from replicas.simulated.model import sim_model_dir

            return sim_model_dir()
        try:
            return find_model(name)
        except ModelError as error:
            wrong.append(f"model {name}: {error}")
    if not wrong:
        raise ConfigError(
            "the replicas do not name their model, so there is no tokenizer to use. Give --model NAME_OR_FOLDER"
        )
    raise ConfigError(". ".join(wrong))


def folder_here(root: str | None) -> Path | None:
    """The folder that an engine names as its model's, if it is here too. Only a whole path: a bare name may be a folder
    here by chance."""
    if not root or "/" not in root or not Path(root).is_absolute():
        return None
    path = Path(root)
    return (
        path
        if any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "config.json"))
        else None
    )


def launch_profile(settings: Settings) -> LaunchProfile | None:
    """How engines are launched; None where none are."""
    if not settings.launch:
        return None
    try:
        return profiles.load(settings.profile)
    except profiles.ProfileError as error:
        raise ConfigError(f"--profile {error}") from None


def model_and_name(settings: Settings, profile: LaunchProfile | None) -> tuple[Path | None, str]:
    """The folder of the model (None: it is learned from the replicas) and the name that launched engines serve it
    by."""
    name = settings.model or (profile.own_model if profile is not None else None)
    if name is None:
        return None, settings.served_model_name or "model"
    return model_dir(name), settings.served_model_name or os.path.basename(name.rstrip("/"))

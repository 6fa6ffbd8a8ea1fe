"""The models that the settings name: their folders, their names, and the engines that are launched for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gateway.files import PASSING
from gateway.settings import ConfigError, Settings, known_urls
from gateway.settings.pools import Launch, incompatibilities
from replicas.launch import profile as profiles
from replicas.launch.command import LaunchProfile
from replicas.replica import parse_url
from replicas.roles import DECODE, PREFILL

SIM = "sim"  # the name of the model that comes with the simulated engine


def model_dir(*names: str | None) -> Path:
    """Return the folder of a model's tokenizer, found by the first of `names` that leads to one.

    `names`: folders or models' names; None is skipped. Raises ConfigError, which says what is wrong with each name and
    what to give instead.
    """
    from gateway.prompt.tokens.model import ModelError, find_model
    from replicas.simulated.model import sim_model_dir

    wrong = []
    for name in dict.fromkeys(filter(None, names)):
        try:
            return sim_model_dir() if name == SIM else find_model(name)
        except (ModelError, OSError) as error:
            if isinstance(error, OSError) and name != SIM:
                raise
            wrong.append(f"model {name}: {error}")
    if not wrong:
        wrong = ["the replicas do not name their model, so there is no tokenizer to use. Give --model NAME_OR_FOLDER"]
    raise ConfigError(". ".join(wrong))


def folder_here(root: str | None) -> Path | None:
    """Return the folder that an engine reports as its model's root, or None if this machine has no model there.

    Only an absolute path is tried, since a folder here may have the bare name of a model by chance.
    """
    if not root or "/" not in root or not Path(root).is_absolute():
        return None
    path = Path(root)
    try:
        found = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "config.json"))
    except OSError as error:
        if error.errno in PASSING:
            raise
        return None  # the name is too long for a path, or the folder is not for this user to read
    return path if found else None


def main_model(settings: Settings, launched: Sequence[Launch]) -> tuple[Path | None, str]:
    """Return the main model's folder and name: the model in the settings, or else that of the first launched engine.

    The folder is None if the replicas are to report it.
    """
    if settings.model or not launched:
        return model_and_name(settings, launched[0].profile if launched else None)
    return launched[0].directory, launched[0].served_name


def launches(settings: Settings) -> list[Launch]:
    """Return the groups of engines to launch: first that of the setting `launch`, then that of each pool.

    Raises ConfigError for a profile or model that cannot be used, and for pools that cannot work together.
    """
    found = {}
    for name, its, one in _given(settings):
        try:
            found[name] = one._replace(directory=model_and_name(its, one.profile)[0])
        except ConfigError as error:
            if name != LAUNCH and its.pools[name].model:
                raise ConfigError(f"{name}.model: {error.text}", "pools") from None
            raise
    _check_together(settings, found)
    return [*found.values()]


def check_roles(settings: Settings) -> None:
    """Check the profiles and roles of the pools, without looking for their models' files.

    Raises ConfigError for a profile that cannot be used, and for pools that cannot work together.
    """
    _check_together(settings, {name: one for name, _, one in _given(settings)})


LAUNCH = "the engines of --launch"  # stands for a pool's name


def _given(settings: Settings) -> Iterator[tuple[str, Settings, Launch]]:
    """Yield for each pool its name, the settings with the pool's own model, and the engines to launch.

    The engines of the setting `launch` come first, as a pool of their own. Each `Launch` lacks the model's folder,
    which is not searched here. Raises ConfigError.
    """
    if settings.launch:
        profile = _loaded(settings.profile, "profile")
        yield LAUNCH, settings, Launch(settings.launch, profile, None, name_of(settings, profile), profile.role)
    for name, pool in settings.pools.items():
        profile = _loaded(pool.profile, "pools", f"{name}.profile: ")
        model = {"model": pool.model or settings.model, "served_model_name": pool.served_model_name}
        if pool.model in (None, settings.model):
            model["served_model_name"] = pool.served_model_name or settings.served_model_name
        its, role = settings.model_copy(update=model), pool.role or profile.role
        yield name, its, Launch(pool.launch, profile, None, name_of(its, profile), role, pool.spill)


def _check_together(settings: Settings, launched: Mapping[str, Launch]) -> None:
    """Raise ConfigError, with a line for each problem, if these pools (`launched`, by name) cannot work together."""
    adopted = {parse_url(url).role for url in known_urls(settings)}
    if settings.discover is not None:
        adopted |= {PREFILL, DECODE}  # pods of either role may come
    if wrong := incompatibilities(launched, adopted):
        raise ConfigError("\n".join(wrong), "pools" if settings.pools else "profile")


def _loaded(name: str, setting: str, part: str = "") -> LaunchProfile:
    try:
        return profiles.load(name)
    except profiles.ProfileError as error:
        raise ConfigError(f"{part}{error}", setting) from None


def model_and_name(settings: Settings, profile: LaunchProfile | None) -> tuple[Path | None, str]:
    """Return the folder of the model and the name by which engines of this profile serve it.

    The folder is None if the replicas report it. Raises ConfigError for a model that is not found.
    """
    name = _model_of(settings, profile)
    try:
        directory = None if name is None else model_dir(name)
    except ConfigError as error:
        why = error.text.removeprefix(f"model {name}: ")  # the error names the setting instead of the model
        raise ConfigError(why, "model") if settings.model else error from None
    return directory, name_of(settings, profile)


def name_of(settings: Settings, profile: LaunchProfile | None) -> str:
    """Return the name by which engines of this profile serve their model."""
    return settings.served_model_name or os.path.basename((_model_of(settings, profile) or "model").rstrip("/"))


def _model_of(settings: Settings, profile: LaunchProfile | None) -> str | None:
    return settings.model or (profile.own_model if profile is not None else None)

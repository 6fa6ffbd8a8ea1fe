"""Finding a model's folder, and reading from it what the gateway needs to make the model's prompts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_64

from replicas.hub import cannot_fetch

from ...files import PASSING
from ..render.program import Program
from ..render.programs import program_for
from .folder import ModelError as ModelError
from .folder import json_object, matching, pieces, read_text, using
from .kinds import KINDS, Kind
from .tekken_files import Unreadable

_FILES = """
    tokenizer.json tekken.json tiktoken.model tokenization_*.py tokenizer_config.json special_tokens_map.json added_tokens.json
    chat_template.jinja chat_template.json config.json params.json processor_config.json preprocessor_config.json
    additional_chat_templates/*.jinja
""".split()
# Architectures whose conversations vLLM writes by rules in its own code, whatever template the model has, and whose
# rules are not implemented here. `render.programs` implements those of other architectures.
WRITTEN_BY_UNKNOWN_RULES = frozenset(
    """
    KimiK3ForConditionalGeneration MoonshotKimiaForCausalLM InklingForCausalLM
    InklingForConditionalGeneration
    """.split()
)


def find_model(name_or_dir: str | Path) -> Path:
    """Return the folder with a model's files. Raises ModelError.

    If `name_or_dir` is a directory, it is returned. Else it is the model's name on the Hugging Face hub: its snapshot
    in the local cache is returned or, if there is none, its small tokenizer files are downloaded (never weights).
    """
    try:
        path = Path(name_or_dir).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError) as error:  # no such user in `~user`, or a path that cannot be looked at
        raise ModelError(f"no directory {name_or_dir}: {error}") from error
    name = str(name_or_dir)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(
            f"no directory {name}: set model to the folder that holds its tokenizer.json, or to its name on the hub"
        )
    from huggingface_hub import constants, snapshot_download  # a slow import, needed only here
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a directory nor a model name: {error}") from error
    except LocalEntryNotFoundError:
        pass
    if constants.HF_HUB_OFFLINE:
        raise ModelError(
            f"{name} is not in the Hugging Face cache and HF_HUB_OFFLINE is set: "
            "unset it, or set model to a directory with tokenizer.json"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except OSError as error:  # HfHubHTTPError and LocalEntryNotFoundError are OSErrors
        otherwise = "set model to a directory with tokenizer.json"
        raise ModelError(cannot_fetch(f"the tokenizer of {name}", error, otherwise)) from error


@dataclass(frozen=True)
class LoadedModel:
    """What was read from a model's folder to make its prompts."""

    directory: Path
    # The chat templates by name: "default", "tool_use", ... If there is a `program`, it holds at most the template that
    # was given in place of the model's own.
    templates: dict[str, str]
    config: dict[str, Any]  # the content of tokenizer_config.json
    settings: dict[str, Any]  # the content of config.json
    no_template: str = ""  # why no template can be used, even if the folder has one; or ""
    no_tokenizer: str = ""  # why the gateway cannot make this model's tokens, or ""
    kind: Kind | None = None  # the kind of the tokenizer files; None: `no_tokenizer` says why there is none
    program: Program | None = None  # the rules that write the model's conversations in place of a template

    @functools.cached_property
    def takes_media(self) -> bool:
        """Whether the model also takes images, sound or video."""
        processors = ("processor", "preprocessor", "video_preprocessor")
        return any((self.directory / f"{name}_config.json").is_file() for name in processors) or any(
            name in self.settings for name in ("vision_config", "audio_config", "encoder_config")
        )

    @property
    def max_model_len(self) -> int | None:
        """The model's context length in tokens according to config.json, or None."""
        inner = self.settings.get("text_config")
        value = (inner if isinstance(inner, dict) else self.settings).get("max_position_embeddings")
        return value if isinstance(value, int) else None


def contents(directory: Path, chat_template: str | Path | None = None) -> int:
    """Return a digest of all files that determine a model's prompts, to detect when one of them changes.

    `chat_template`: a file that replaces the model's own template. Raises OSError for a read error that may be
    temporary, and ModelError for too many files.
    """
    digest = xxh3_64()
    found = {path for pattern in _FILES for path in matching(directory, pattern)}
    if chat_template is not None:
        found.add(Path(chat_template))
    for path in sorted(found):
        digest.update(path.name.encode())
        try:
            for piece in pieces(path):
                digest.update(piece)
        except OSError as error:
            if error.errno in PASSING:
                raise
            digest.update(b" cannot be read")
    return digest.intdigest()


def load_model(directory: Path, chat_template: str | Path | None = None) -> LoadedModel:
    """Read a model's folder and return what determines its prompts. Raises ModelError.

    `chat_template`: a file that replaces the model's own template.
    """
    for path in (path for pattern in _FILES for path in matching(directory, pattern)):
        if not path.is_file():
            raise ModelError(f"can't read {path}: it is no regular file")
    config, settings = json_object(directory / "tokenizer_config.json"), json_object(directory / "config.json")
    templates, no_template = (
        ({"default": read_text(Path(chat_template))}, "")
        if chat_template is not None
        else _templates(directory, config, settings)
    )
    kind, program, no_tokenizer = None, None, ""
    try:
        kind = next((kind for kind in KINDS if kind.finds(directory)), None)
    except Unreadable as error:
        no_template = no_tokenizer = str(error)
    if kind is not None and kind.program is not None:
        templates, program = {}, kind.program(directory)
    elif not no_tokenizer:
        with using(directory / "config.json"):
            architectures = [one for one in settings.get("architectures") or () if isinstance(one, str)]
        program = program_for(architectures)
        if program is None and not WRITTEN_BY_UNKNOWN_RULES.isdisjoint(architectures):
            no_template = "the engine writes this model's conversations without its chat template"
        if kind is None:
            no_tokenizer = (
                f"{directory} has no tokenizer.json, so the engine makes this model's tokens in a way of its own"
            )
            no_template = no_template or no_tokenizer
            if not config and not settings:
                raise ModelError(
                    f"{directory} has no tokenizer.json and nothing else of a model: give the folder that the engine "
                    "was started with"
                )
    if no_template or (program is not None and chat_template is None):
        templates = {}
    return LoadedModel(directory, templates, config, settings, no_template, no_tokenizer, kind, program)


def _templates(directory: Path, config: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, str], str]:
    """Return the model's chat templates by name, as vLLM finds them, and why vLLM's choice is uncertain, or "".

    `config`: the content of tokenizer_config.json; `settings`: the content of config.json. Separate template files
    replace all templates in tokenizer_config.json. The template in chat_template.json is used only if the engine loads
    a processor (for images or sound) for the model, and then for requests without tools.
    """
    files = {path.stem: path for path in matching(directory, "additional_chat_templates/*.jinja")}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    with using(directory / "tokenizer_config.json"):
        found = {name: read_text(path) for name, path in files.items()} or _in_config(config)
    legacy = json_object(directory / "chat_template.json").get("chat_template")
    if not isinstance(legacy, str) or legacy == found.get("default"):
        return found, ""
    processors = (directory / "processor_config.json", directory / "preprocessor_config.json")
    if any(path.is_file() for path in processors) or "processor_class" in config:
        with_tools = found.get("tool_use", found.get("default"))
        return {"default": legacy, **({"tool_use": with_tools} if with_tools is not None else {})}, ""
    uncertain = (
        "chat_template.json counts if the engine loads a processor for this model, which cannot be told from its files"
    )
    return found, uncertain if any(name in settings for name in ("vision_config", "audio_config")) else ""


def _in_config(config: dict[str, Any]) -> dict[str, str]:
    named = config.get("chat_template")
    if isinstance(named, str):
        return {"default": named}
    found = {entry["name"]: entry["template"] for entry in named} if isinstance(named, list) else {}
    if not all(isinstance(one, str) for one in (*found, *found.values())):
        raise TypeError("the name or the text of a chat template is no string")
    return found

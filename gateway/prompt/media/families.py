"""Families of models of which it is known which tokens an engine makes of an image.

Each has a file with a function that reads a model's files, and returns a Family or None where it has none of its
models, or one that it cannot be sure of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..tokens.tokenizer import Tokenizer

Ids = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]
# Tokens in order, each with the number of times that it comes: an image may have 400,000 of one kind.
Runs = Sequence[tuple[int, int]]


class Expansion(Protocol):
    def __call__(self, width: int, height: int) -> Runs | None:
        """The tokens of an image; None where the engine refuses it."""


class Joining(Protocol):
    def __call__(self, ids: Ids, starts: Places, lengths: Places) -> tuple[Ids, Places] | None:
        """The tokens of a prompt after the engine's last changes, and where each image starts in them; None where the
        engine refuses the prompt. An image keeps its length, also where it shares its first token with what is before
        it."""


class Family(NamedTuple):
    """A template prints the token `placeholder` once for each image, and the engine puts the image's `expansion` in its
    place. The whole expansion carries the image's name, tokens that frame it included."""

    name: str
    placeholder: int
    expansion: Expansion
    joining: Joining | None = None


class Files(NamedTuple):
    """What a model's folder says of images, {} where a file is missing."""

    settings: dict[str, Any]  # config.json
    images: dict[str, Any]  # of the image processor
    processor: dict[str, Any]  # processor_config.json
    tokenizer: dict[str, Any]  # tokenizer_config.json


def integer(settings: dict[str, Any], name: str, default: int) -> int | None:
    """A positive number, `default` where it is not set; None where it is none."""
    value = settings.get(name)
    if value is None:
        return default
    return value if type(value) is int and value > 0 else None


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """As an engine encodes a text without the special tokens around it."""
    return np.frombuffer(tokenizer.encode(text), "<u4").tolist()

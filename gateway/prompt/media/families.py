"""Families of models whose image tokens are known.

Each family has a module with a function `family`, which reads a model's files and returns a Family, or None for another
family's model or for settings that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..tokens.tokenizer import Tokenizer

Ids = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]
# Tokens in order, each with its number of repetitions: an image may have 400,000 of one kind.
Runs = Sequence[tuple[int, int]]


# Returns the tokens of an image from its width and height in pixels, or None where the engine refuses it.
Expansion = Callable[[int, int], Runs | None]
# An engine's last changes to the tokens around images: from a prompt's ids, the images' positions and their numbers of
# tokens, it returns the changed ids and positions, or None if the engine refuses the prompt. An image keeps its length,
# also where it shares its first token with what precedes it.
Joining = Callable[[Ids, Places, Places], tuple[Ids, Places] | None]


class Family(NamedTuple):
    """A family's rule for the tokens of an image.

    A template prints the token `placeholder` once for each image, and the engine replaces it by the image's tokens, its
    `expansion`. All of these, with those that frame the image, count as the image's in block hashes. `joining`: the
    engine's last changes to the tokens around images, or None.
    """

    name: str
    placeholder: int
    expansion: Expansion
    joining: Joining | None = None


class Files(NamedTuple):
    """The parts of a model's folder that concern images, {} where a file is missing."""

    settings: dict[str, Any]  # config.json
    images: dict[str, Any]  # the image processor's settings
    processor: dict[str, Any]  # processor_config.json
    tokenizer: dict[str, Any]  # tokenizer_config.json


def integer(settings: dict[str, Any], name: str, default: int) -> int | None:
    """Return the setting of this name: a positive integer, `default` if it is not set, None if it is anything else."""
    value = settings.get(name)
    if value is None:
        return default
    return value if type(value) is int and value > 0 else None


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text without special tokens around it."""
    return np.frombuffer(tokenizer.encode(text), "<u4").tolist()

"""Types for families of models that turn images into tokens by rules known to the gateway.

Each family has a module with a function `family`. It reads a model's files and returns a Family, or None for a model of
another family or with settings whose effect is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..tokens.tokenizer import Tokenizer

Ids = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]
# Token ids in order, each with its number of repetitions: an image may have 400,000 equal tokens.
Runs = Sequence[tuple[int, int]]


# Returns the tokens of an image, given its width and height in pixels, or None if the engine refuses the image.
Expansion = Callable[[int, int], Runs | None]
# Applies an engine's last changes to the tokens around images. The arguments are a prompt's token ids, the positions of
# the images' first tokens, and the images' numbers of tokens. Returns the changed ids and positions, or None if the
# engine refuses the prompt. An image's number of tokens does not change, even if its first token is merged with the
# token before the image.
Joining = Callable[[Ids, Places, Places], tuple[Ids, Places] | None]


class Family(NamedTuple):
    """A model family's rule for the tokens of an image.

    The chat template prints the token `placeholder` once for each image, and the engine replaces it by the image's
    tokens, which `expansion` returns. All of these tokens, including markers before and after the image, belong to the
    image in block hashes. `joining`: a function that makes the engine's last changes to the tokens around images, such
    as merging newlines; None: there are no such changes.
    """

    name: str
    placeholder: int
    expansion: Expansion
    joining: Joining | None = None


class Files(NamedTuple):
    """The files of a model's folder that concern images, parsed; {} for a file that is missing."""

    settings: dict[str, Any]  # config.json
    images: dict[str, Any]  # the image processor's settings, from preprocessor_config.json or processor_config.json
    processor: dict[str, Any]  # processor_config.json
    tokenizer: dict[str, Any]  # tokenizer_config.json


def integer(settings: dict[str, Any], name: str, default: int) -> int | None:
    """Return a setting that must be a positive integer; `default` if it is not set, None if it has another value."""
    value = settings.get(name)
    if value is None:
        return default
    return value if type(value) is int and value > 0 else None


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text, without adding special tokens around it."""
    return np.frombuffer(tokenizer.encode(text), "<u4").tolist()

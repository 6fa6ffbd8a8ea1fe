"""Families of models of which it is known how many tokens an engine makes of an image.

Each has a file with a function that reads a model's settings, and returns a Family or None where it has none of its
models, or one that it cannot be sure of.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Counts(Protocol):
    def __call__(self, width: int, height: int) -> int | None:
        """The tokens of an image; None where the engine refuses it."""


class Family(NamedTuple):
    """A template prints the token `placeholder` once for each image, and the engine puts as many of it in its place as
    `count` says."""

    name: str
    placeholder: int
    count: Counts


def integer(settings: dict[str, Any], name: str, default: int) -> int | None:
    """A positive number, `default` where it is not set; None where it is none."""
    value = settings.get(name)
    if value is None:
        return default
    return value if type(value) is int and value > 0 else None

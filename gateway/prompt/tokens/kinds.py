"""The kinds of tokenizer files that the gateway reads; the first kind that a model's folder has is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..render.program import Program
from . import tekken_files, tiktoken_files
from .ranked import RankedReadings
from .reading import Readings


class Kind(NamedTuple):
    """One kind of tokenizer files.

    `finds`: whether a folder's engine reads its files as this kind; may raise `tekken_files.Unreadable`.
    `readings`: reads a folder's files, given tokenizer_config.json and config.json.
    `sorts_tools`: whether the folder's template gets tools with their keys in alphabetical order.
    `program`: the rules for the folder's conversations; None where a template or the architecture gives them.
    """

    finds: Callable[[Path], bool]
    readings: Callable[[Path, dict[str, Any], dict[str, Any]], Readings | RankedReadings]
    sorts_tools: Callable[[Path], bool] = lambda directory: False
    program: Callable[[Path], Program] | None = None


KINDS = (
    Kind(tekken_files.is_used, tekken_files.readings, program=tekken_files.program),
    Kind(lambda directory: (directory / "tokenizer.json").is_file(), Readings),
    Kind(tiktoken_files.can_be_read, tiktoken_files.readings, tiktoken_files.sorts_tools),
)

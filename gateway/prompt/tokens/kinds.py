"""The kinds of tokenizer files that the gateway can read: tekken.json, tokenizer.json and tiktoken.model.

The first of these kinds that a model's folder has is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..render.program import Program
from . import tekken_files, tiktoken_files
from .ranked import RankedReadings
from .reading import Readings


class Kind(NamedTuple):
    """One kind of tokenizer files, as functions of a model's folder.

    `finds`: returns whether engines read the folder's files as this kind; may raise `tekken_files.Unreadable`.
    `readings`: reads the files, given the folder and the contents of tokenizer_config.json and config.json, and returns
        the ways in which an engine may interpret them.
    `sorts_tools`: returns whether the template gets tools with their keys in alphabetical order.
    `program`: returns the rules that write the model's conversations; None: a template or the model's architecture
        determines how they are written.
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

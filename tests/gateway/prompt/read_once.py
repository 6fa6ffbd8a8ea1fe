"""Tokenizers that are read once for many pipelines: reading one is most of the CPU that making a pipeline takes."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.prompt import reader
from gateway.prompt.tokens.reading import Reading
from gateway.prompt.tokens.tokenizer import Tokenizer


@contextmanager
def tokenizers_read_once() -> Iterator[None]:
    """Within, pipelines that read the same content in the same way get copies of one tokenizer, each with a limit of
    its own."""
    made: dict[tuple[bytes, bool, int], Tokenizer] = {}

    def read(folder: Path, reading: Reading) -> Tokenizer:
        content = reading.rebuilt or (folder / "tokenizer.json").read_bytes()
        key = content, reading.splits_special_tokens, reading.longest_run
        if key not in made:
            made[key] = Tokenizer(folder, reading=reading)
        return copy.copy(made[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "Tokenizer", read)
        yield

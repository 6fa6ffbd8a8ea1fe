"""Reading the files of a model's folder, with limits on their size and number.

Somebody else fills the folder, so only regular files are opened: a pipe, for example, would make the reader wait.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from ...files import regular

# The most bytes of one file. The largest known tokenizers have 40 MB, the largest known other files 10 MB.
_MOST = 16 * 2**20
_MOST_OF = dict.fromkeys(("tokenizer.json", "tekken.json", "tiktoken.model"), 128 * 2**20)
MOST_FILES = 100  # the most files that may match one pattern


class ModelError(Exception):
    """Raised when a model's files can't be found, read or used; the message says why."""


def pieces(path: Path) -> Iterator[bytes]:
    """Yield the contents of a regular file, 1 MiB at a time.

    Raises OSError if the file cannot be read or exceeds its size limit (128 MiB for a tokenizer, else 16 MiB).
    """
    left = most = _MOST_OF.get(path.name, _MOST)
    with open(path, "rb", opener=regular) as file:
        while piece := file.read(2**20):
            left -= len(piece)
            if left < 0:
                raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB, the limit of such a file", str(path))
            yield piece


def read(path: Path) -> bytes:
    """Return the contents of a file. Raises ModelError."""
    try:
        return b"".join(pieces(path))
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror or error}") from error


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, with every kind of line end replaced by a newline. Raises ModelError."""
    try:
        return read(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ModelError(f"can't read {path}: {error}") from error


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if there is no such file or it holds another JSON value.

    Raises ModelError if the file cannot be read or is not JSON.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"can't read {path}: {error}") from error
    return value if isinstance(value, dict) else {}


def matching(directory: Path, pattern: str) -> list[Path]:
    """Return the sorted paths in a folder that match a glob pattern. Raises ModelError for more than 100 paths."""
    found = sorted(islice(directory.glob(pattern), MOST_FILES + 1))
    if len(found) > MOST_FILES:
        raise ModelError(f"{directory} has more than {MOST_FILES} files {pattern}")
    return found


@contextmanager
def using(*paths: Path) -> Iterator[None]:
    """Return a context manager that turns an exception of its body into a ModelError that names these files.

    It is for code that expects a certain form of what was read from the files. ModelError and MemoryError are raised
    unchanged.
    """
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        names = " or ".join(str(path) for path in paths if path.exists())
        raise ModelError(f"can't use {names}: {type(error).__name__}: {error}") from error

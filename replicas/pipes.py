"""The refusal of pipes where a file is needed."""

import errno
from pathlib import Path


def refuse_pipe(path: Path) -> None:
    """Raise OSError if `path` is a pipe, where a file has to be read more than once. A pipe is empty the second time,
    and one that nobody writes to would be waited for silently."""
    if path.is_fifo():
        raise OSError(errno.ESPIPE, "it is a pipe, which cannot be read more than once")

"""The refusal of pipes and devices where a file is needed."""

import errno
import os
from pathlib import Path


def refuse_pipe(path: Path) -> None:
    """Raise OSError if `path` is a pipe or a device where a file has to be read more than once.

    A pipe is empty the second time, and reading one without a writer would wait silently. A device such as /dev/zero
    has no end; /dev/null has one and is allowed.
    """
    if path.is_char_device() and not path.samefile(os.devnull):
        raise OSError(errno.EINVAL, "it is a device, and no file")
    if path.is_fifo():
        raise OSError(errno.ESPIPE, "it is a pipe, which cannot be read more than once")

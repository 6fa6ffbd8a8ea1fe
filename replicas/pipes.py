"""A check that a path which has to be a file is not a pipe or a device."""

import errno
import os
from pathlib import Path


def refuse_pipe(path: Path) -> None:
    """Raise OSError if `path`, which has to be a file that can be read more than once, is a pipe or a device.

    A pipe is empty when it is read again, and reading a pipe without a writer would wait silently. A device such as
    /dev/zero has no end; /dev/null has an end and is allowed.
    """
    if path.is_char_device() and not path.samefile(os.devnull):
        raise OSError(errno.EINVAL, "it is a device, and no file")
    if path.is_fifo():
        raise OSError(errno.ESPIPE, "it is a pipe, which cannot be read more than once")

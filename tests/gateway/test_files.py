"""Files that are followed: no change is lost."""

import asyncio
import os
import select
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway import files

from .http.talk import eventually


async def test_a_change_that_could_not_be_taken_up_is_tried_again(tmp_path, monkeypatch):
    """Else a key that was revoked would be good until the file is written once more."""
    monkeypatch.setattr(files, "LOOK_SECONDS", 0.01)
    file, tried = tmp_path / "keys", []
    file.write_text("a")
    followed = files.Followed([file])
    file.write_text("another")

    async def changed():
        tried.append(file.read_text())
        if len(tried) == 1:
            raise ValueError("a bug")

    with pytest.raises(ValueError):
        await asyncio.wait_for(followed.run(changed), 5)
    again = asyncio.create_task(followed.run(changed))
    try:
        await eventually(lambda: len(tried) == 2)
    finally:
        again.cancel()
    assert tried == ["another", "another"]


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("size", [10, 1_000_000], ids=["small", "more than a pipe holds"])
def test_a_pipe_that_somebody_writes_to_is_read_to_its_end(pipe, size):
    kept, writes = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), os.open(pipe, os.O_WRONLY)
    path = Path(f"/dev/fd/{kept}")  # as a shell names what it puts in the place of <(...)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(files.read, path)
        with open(writes, "wb") as end:
            end.write(b"x" * size)
        assert read.result(5) == b"x" * size
    os.close(kept)


def test_a_pipe_through_which_nothing_comes_is_not_waited_for(pipe):
    with pytest.raises(OSError, match="it is a pipe through which nothing comes"):
        files.read(pipe)


def test_a_pipe_whose_command_fails_after_a_while_is_no_empty_file(pipe, monkeypatch):
    """The command in --config <(...) may fail; the settings would silently be the defaults."""
    kept, writes = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), os.open(pipe, os.O_WRONLY)
    set_blocking = os.set_blocking

    def waits(file, blocking):  # what it is called for: it is about to wait for the command
        set_blocking(file, blocking)
        os.close(writes)

    monkeypatch.setattr(os, "set_blocking", waits)
    with pytest.raises(OSError, match="it is a pipe through which nothing comes"):
        files.read(Path(f"/dev/fd/{kept}"))
    os.close(kept)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full"])
def test_a_file_without_an_end_is_not_read_on(device):
    with pytest.raises(OSError, match="it has more than 64 MiB"):
        files.read(Path(device))


def test_a_pipe_is_written_to_while_somebody_reads_it_and_not_waited_for(pipe):
    with pytest.raises(OSError, match="it is a pipe that nobody reads"):
        files.open_to_append(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    written = files.open_to_append(pipe)
    assert os.get_blocking(written), "a reader that is slow loses nothing"
    os.close(written)
    os.close(reader)


def test_that_a_pipe_can_be_written_to_is_found_without_its_readers_end(pipe):
    """As soon as somebody had opened and closed it, `cat` would end."""
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with select.epoll() as ends:
        ends.register(reader, select.EPOLLHUP)
        files.check_appendable(pipe)
        assert not ends.poll(0)
        os.close(files.open_to_append(pipe))
        assert ends.poll(0) == [(reader, select.EPOLLHUP)]
    os.close(reader)


@pytest.mark.parametrize("name", ["gone/log", "file/log", "."])
def test_a_file_that_cannot_be_made_where_it_is_named_is_found_without_making_it(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        files.check_appendable(tmp_path / name)

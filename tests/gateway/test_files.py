"""Files that are followed: no change is lost."""

import asyncio

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

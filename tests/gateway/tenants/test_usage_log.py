"""The usage log: a line for each request, whatever became of it, in a file that may be rotated."""

import hashlib
import json
import os
import resource
from datetime import UTC, datetime

import pytest

from gateway.tenants.keys import Keys
from gateway.tenants.usage_log import UsageLog

from ..http.talk import eventually
from ..proxy.replies import BODY, EVENT, answers, chunk, post, streams
from ..proxy.stack import stack

USAGE = {"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}}
ANSWER = json.dumps({"choices": [{"index": 0, "message": {"content": "hi"}}], "usage": USAGE}).encode()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "usage.jsonl"


@pytest.fixture
def keys(tmp_path):
    (tmp_path / "keys").write_text("- {name: a, sha256: %s}" % hashlib.sha256(b"a").hexdigest())
    return Keys(tmp_path / "keys")


def lines(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def ask(s, body=BODY, extra=b"Authorization: Bearer a\r\n", **options):
    talk = await s.talk()
    await talk.say(post(body, extra=extra, **options))
    return await talk.response()


async def test_each_request_is_a_line_with_its_tenant_and_its_tokens(file, keys):
    log = UsageLog(file)
    async with stack(answers(ANSWER), keys=keys, on_end=(log,)) as s:
        await ask(s, extra=b"Authorization: Bearer a\r\nx-request-id: mine\r\n")
        await eventually(lambda: len(lines(file)) == 1)
        await ask(s, extra=b"")
        await eventually(lambda: len(lines(file)) == 2)
    log.close()
    first, second = lines(file)
    age = datetime.now(UTC) - datetime.fromisoformat(first.pop("time"))
    assert age.total_seconds() < 60 and 0 < first.pop("seconds") < 60
    assert first == {
        "id": "mine", "key": "a", "model": "m", "path": "/v1/chat/completions", "input_tokens": 20, "cached_tokens": 16,
        "output_tokens": 5, "counted_by": "engine", "status": 200, "outcome": "complete",
    }  # fmt: skip
    told = {name: second[name] for name in ("key", "status", "outcome", "input_tokens", "output_tokens")}
    assert told == {"key": None, "status": 401, "outcome": "refused", "input_tokens": 0, "output_tokens": 0}


async def test_a_stream_without_usage_counts_its_events(file, keys):
    log = UsageLog(file)
    async with stack(streams(chunk(EVENT), chunk(EVENT) + chunk(2 * EVENT)), keys=keys, on_end=(log,)) as s:
        await ask(s, BODY.replace(b"{", b'{"stream": true,', 1))
        await eventually(lambda: len(lines(file)) == 1)
    log.close()
    assert lines(file)[0]["counted_by"] == "gateway" and 3 <= lines(file)[0]["output_tokens"] <= 5


async def test_a_file_that_is_rotated_is_opened_again(file, keys):
    log = UsageLog(file)
    async with stack(answers(ANSWER), keys=keys, on_end=(log,)) as s:
        await ask(s)
        await eventually(lambda: len(lines(file)) == 1)
        file.rename(file.with_suffix(".1"))
        await ask(s)
        await eventually(lambda: len(lines(file)) == 1)
        file.unlink()
        await ask(s)
        await eventually(lambda: len(lines(file)) == 1)
        assert len(lines(file.with_suffix(".1"))) == 1
    log.close()


async def test_a_disk_that_takes_no_more_loses_lines_which_are_counted_and_no_request(file, keys, tmp_path):
    dropped = []
    folder = tmp_path / "logs"
    folder.mkdir()
    log = UsageLog(folder / "usage", dropped.append)
    async with stack(answers(ANSWER), keys=keys, on_end=(log,)) as s:
        os.rename(folder, tmp_path / "away")
        for _ in range(50):
            assert (await ask(s))[0] == 200
            if dropped:
                break
        assert sum(dropped) > 0
        folder.mkdir()
        await ask(s)
        await eventually(lambda: len(lines(folder / "usage")) > 0)
    log.close()


async def test_a_line_that_a_full_disk_broke_off_takes_no_other_with_it(file, keys):
    """The disk is full within a line; the next one, once there is space again, stands by itself."""
    size, limits = 2**30, resource.getrlimit(resource.RLIMIT_FSIZE)
    file.touch()
    os.truncate(file, size)  # sparse, so that the limit is below no other file of this process
    log, dropped = None, []
    try:
        log = UsageLog(file, dropped.append)
        async with stack(answers(ANSWER), keys=keys, on_end=(log,)) as s:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limits[1]))
            await ask(s)
            await eventually(lambda: file.stat().st_size == size + 50 and log._lost == 1)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            await ask(s, extra=b"Authorization: Bearer a\r\nx-request-id: next\r\n")
            await ask(s, extra=b"Authorization: Bearer a\r\nx-request-id: last\r\n")
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with open(file, "rb") as written:
        written.seek(size)
        broken, *whole = written.read().splitlines()
    assert len(broken) == 50 and [json.loads(line)["id"] for line in whole] == ["next", "last"]
    assert sum(dropped) == 1


async def test_a_disk_that_stays_full_does_not_fill_the_log_as_well(file, keys, caplog):
    log = UsageLog(file)
    file.unlink()
    file.mkdir()
    async with stack(answers(ANSWER), keys=keys, on_end=(log,)) as s:
        for count in range(1, 6):
            await ask(s)
            await eventually(lambda: log._lost == count)
    log.close()
    assert caplog.text.count("were not written") == 1

"""The usage log: a line for each request, whatever became of it, in a file that may be rotated."""

import asyncio
import errno
import hashlib
import json
import os
import resource
import select
import threading
from datetime import UTC, datetime

import pytest

from gateway import datapath
from gateway.ops.metrics import Metrics
from gateway.settings import Settings
from gateway.tenants.keys import Keys
from gateway.tenants.metering import Metering
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
    return await s.ask(post(body, extra=extra, **options))


async def test_each_request_is_a_line_with_its_tenant_and_its_tokens(file, keys):
    log = UsageLog(file)
    async with stack(answers(ANSWER), keys=keys, usage_log=log) as s:
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


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/rerank"])
async def test_a_line_names_the_model_of_a_request_that_is_refused(file, tmp_path, path):
    (limited := tmp_path / "limited").write_text(
        "\n".join(
            f"- {{name: {name}, sha256: {hashlib.sha256(name.encode()).hexdigest()}, {limit}}}"
            for name, limit in (("a", "tokens_per_day: 1"), ("b", "requests_per_minute: 1"), ("c", "models: [other]"))
        )
    )
    log = UsageLog(file)
    async with stack(answers(ANSWER), keys=Keys(limited), usage_log=log, metering=Metering(lambda: 1000.0)) as s:
        for name, body in (("a", BODY), ("b", BODY), ("b", BODY), ("c", BODY), ("c", BODY.replace(b'"m"', b'""'))):
            await ask(s, body, extra=b"Authorization: Bearer %b\r\n" % name.encode(), path=path)
        await eventually(lambda: len(lines(file)) == 5)
    log.close()
    found = [(one["key"], one["status"], one["model"]) for one in lines(file)]
    counted = 429 if path == b"/v1/chat/completions" else 200  # of other paths the tokens are not known before
    assert found == [("a", counted, "m"), ("b", 200, "m"), ("b", 429, "m"), ("c", 403, "m"), ("c", 403, None)]


CHAT = [
    (0, b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}'),
    (1, EVENT.strip()),
    (1, b'data: {"choices":[{"index":0,"delta":{"content":"\\"delta\\":{\\""},"finish_reason":null}]}'),
    (1, b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}'),
    (1, b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}'),  # of the end's token
    (0, b"data: [DONE]"),
]
TEXT = [
    (1, b'data: {"choices":[{"index":0,"text":"a","logprobs":{"text_offset":[0]},"finish_reason":null}]}'),
    (0, b": ping"),
    (1, b'data: {"choices":[{"index":0,"text":"\\"text\\":","finish_reason":"length"}]}'),
    (0, b"data: [DONE]"),
]
RESPONSE = [
    (0, b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}'),
    (0, b'event: response.output_item.added\ndata: {"type":"response.output_item.added","item":{"type":"message"}}'),
    (1, b'event: response.reasoning_text.delta\ndata: {"type":"response.reasoning_text.delta","delta":"a"}'),
    (1, b'event: response.output_text.delta\ndata: {"delta":"\\".delta\\"","type":"response.output_text.delta"}'),
    (0, b'event: response.output_text.done\ndata: {"type":"response.output_text.done","text":"a"}'),
    (0, b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r","status":"completed"}}'),
]
MESSAGE = [
    (0, b'event: message_start\ndata: {"type":"message_start","message":{"id":"m"}}'),
    (0, b'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":{"type":"text"}}'),
    (1, b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}'),
    (0, b'event: ping\ndata: {"type": "ping"}'),
    (1, b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"b"}}'),
    (0, b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}'),
    (0, b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}'),
    (0, b'event: message_stop\ndata: {"type":"message_stop"}'),
]  # fmt: skip


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("of_key", [False, True])
@pytest.mark.parametrize(
    "path, events",
    [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)],
)
async def test_a_stream_without_usage_counts_the_events_that_bring_output(
    path, events, of_key, together, line_end, file, keys
):
    log = UsageLog(file)
    sent = [chunk(raw.replace(b"\n", line_end) + 2 * line_end) for _, raw in events]
    script = streams(*([b"".join(sent)] if together else sent), end=b"0\r\n\r\n", pause=lambda: asyncio.sleep(0.002))
    async with stack(script, keys=keys if of_key else None, usage_log=log) as s:
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        body |= {"prompt": "hi", "input": "hi"}
        assert (await ask(s, json.dumps(body).encode(), path=path.encode()))[0] == 200
        await eventually(lambda: len(lines(file)) == 1)
    log.close()
    assert lines(file)[0]["counted_by"] == "gateway"
    assert lines(file)[0]["output_tokens"] == sum(count for count, _ in events)


async def test_a_file_that_is_rotated_is_opened_again(file, keys):
    log = UsageLog(file)
    async with stack(answers(ANSWER), keys=keys, usage_log=log) as s:
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


def test_a_file_that_its_server_has_forgotten_is_opened_again(file, monkeypatch):
    """As on NFS, once another machine has put another file in its place."""
    log, fstat = UsageLog(file), os.fstat
    first = log._file

    def look(opened):
        if opened == first:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(opened)

    monkeypatch.setattr(os, "fstat", look)
    again = log._follow()
    assert again != first and log._follow() == again
    log.close()


@pytest.fixture
def pipe(tmp_path):
    """Its path and a reader of it."""
    os.mkfifo(path := tmp_path / "pipe")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    yield path, reader
    os.close(reader)


def test_lines_of_several_workers_stay_whole_in_a_pipe_whose_reader_is_slow(pipe, monkeypatch):
    path, reader = pipe
    written = [b'{"worker":%d,"number":%d,"pad":"%b"}\n' % (n % 2, n, b"x" * (n % 500)) for n in range(4000)]
    monkeypatch.setattr("gateway.tenants.usage_log._line", lambda line, *_: line)
    logs = [UsageLog(path) for _ in range(2)]
    for number, line in enumerate(written):
        logs[number % 2](line, "", None)
    closing = [threading.Thread(target=log.close) for log in logs]
    for one in closing:
        one.start()
    read = bytearray()
    while part := os.read(reader, 3000):
        read += part
    for one in closing:
        one.join()
    assert sorted(read.splitlines(keepends=True)) == sorted(written)
    assert [log._lost for log in logs] == [0, 0]


def test_a_line_that_a_pipe_may_break_up_is_written_all_the_same(pipe, monkeypatch):
    """As where PIPE_BUF is 512 (macOS)."""
    path, reader = pipe
    monkeypatch.setattr(select, "PIPE_BUF", 512)
    monkeypatch.setattr("gateway.tenants.usage_log._line", lambda line, *_: line)
    written = [b"x" * length + b"\n" for length in (10, 511, 512, 2000, 500, 3)]
    log = UsageLog(path)
    for line in written:
        log(line, "", None)
    log.close()
    assert os.read(reader, 10_000) == b"".join(written)


async def test_the_longest_line_fits_into_one_write_to_a_pipe(file, tmp_path):
    name = "a" * 64
    (tmp_path / "keys").write_text("- {name: %s, sha256: %s}" % (name, hashlib.sha256(b"a").hexdigest()))
    log = UsageLog(file)
    body = json.dumps(json.loads(BODY) | {"model": "\1" * 300}).encode()
    async with stack(answers(ANSWER), keys=Keys(tmp_path / "keys"), usage_log=log) as s:
        await ask(s, body, b"Authorization: Bearer a\r\nx-request-id: %b\r\n" % (b'"' * 300))
        await eventually(lambda: len(lines(file)) == 1)
    log.close()
    (line,) = lines(file)
    assert (line["key"], line["model"]) == (name, "\1" * 200)
    # as if each character of the names that clients give were written as one of `model` is: \u0001
    names = sum(len(json.dumps(line[one])) - 2 for one in ("id", "model", "path"))
    assert file.stat().st_size - names + 3 * 200 * 6 < select.PIPE_BUF


async def test_a_file_that_takes_no_more_loses_lines_which_are_counted_and_no_request(file, keys, caplog):
    """A scrape counts them though no other request ends, and the gateway's own log is not filled."""
    metrics = Metrics()
    log = datapath.usage_log(Settings(usage_log=file), metrics)
    file.unlink()
    file.mkdir()
    async with stack(answers(ANSWER), keys=keys, usage_log=log) as s:
        for lost in (1, 2):
            assert (await ask(s))[0] == 200
            await eventually(lambda: log._lost == lost)
            page, _ = await metrics.exposition()
            assert b"hitherto_usage_lines_dropped_total %d.0\n" % lost in page
        await ask(s)
        await eventually(lambda: log._lost == 3)
        assert metrics.counts()["usage_lines_dropped"] == [[(), 3]]  # of a worker, whose counts the first one reads
        file.rmdir()
        await ask(s)
        await eventually(lambda: len(lines(file)) == 1)
    log.close()
    assert caplog.text.count("were not written") == 1


@pytest.mark.parametrize("left", [0, 50], ids=["cut off", "append-only file"])
async def test_a_line_that_a_full_disk_broke_off_spoils_no_other(file, keys, left, monkeypatch):
    """The disk is full within a line; the next one, once there is space again, stands by itself.

    The broken one is cut off where that is possible: the next line may be that of another worker, or after a restart.
    """

    def refuse(opened, size):
        raise PermissionError

    if left:
        monkeypatch.setattr(os, "ftruncate", refuse)
    size, limits = 2**30, resource.getrlimit(resource.RLIMIT_FSIZE)
    file.touch()
    os.truncate(file, size)  # sparse, so that the limit is below no other file of this process
    dropped = []
    log = UsageLog(file, dropped.append)
    try:
        async with stack(answers(ANSWER), keys=keys, usage_log=log) as s:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limits[1]))
            for lost in (1, 2):
                await ask(s)
                await eventually(lambda: log._lost == lost)
                assert file.stat().st_size == size + left
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            await ask(s, extra=b"Authorization: Bearer a\r\nx-request-id: next\r\n")
            await ask(s, extra=b"Authorization: Bearer a\r\nx-request-id: last\r\n")
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with open(file, "rb") as written:
        written.seek(size)
        broken, *whole = written.read().splitlines() if left else [b"", *written.read().splitlines()]
    assert len(broken) == left and [json.loads(line)["id"] for line in whole] == ["next", "last"]
    assert sum(dropped) == 2


def test_a_log_that_lost_nothing_says_nothing_at_its_end(tmp_path, caplog):
    UsageLog(tmp_path / "none" / "usage.jsonl").close()
    assert not caplog.text

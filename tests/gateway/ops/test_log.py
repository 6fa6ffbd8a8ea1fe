"""Log lines: one line each, fields readable back, never waiting for the reader."""

import io
import json
import logging
import re
import shlex
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ops import log


@pytest.fixture
def logger():
    logger = logging.getLogger("hitherto.test")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    yield logger
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()


def attach(logger, stream) -> log.Outbox:
    outbox = log.Outbox(stream)
    outbox.setFormatter(log.LineFormatter())
    logger.addHandler(outbox)
    return outbox


def test_a_line(logger):
    stream = io.StringIO()
    outbox = attach(logger, stream)
    fields = {"replica": "127.0.0.1:9001", "reason": "exit code 1", "seconds": 0.12345678, "none": None}
    log.event(logger, logging.WARNING, "replica failed", **fields)
    outbox.close()
    stamp, _, rest = stream.getvalue().partition(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stamp)
    assert rest == 'warning hitherto.test replica failed replica=127.0.0.1:9001 reason="exit code 1" seconds=0.123457\n'


def test_a_traceback_and_a_hostile_path_stay_on_one_line(logger):
    stream = io.StringIO()
    outbox = attach(logger, stream)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("failed on %s", "/v1/x\n2026-01-01 info forged\x1b[31m")
    outbox.close()
    text = stream.getvalue()
    assert text.count("\n") == 1 and "\x1b" not in text
    assert "ValueError: two\\nlines" in text


@given(st.text())
def test_a_value_reads_back(text):
    shown = log.value(text)
    assert (json.loads(shown) if shown.startswith('"') else shown) == text
    assert shown.isprintable() and len(shown.splitlines()) == 1
    if not shown.startswith('"'):
        assert shlex.split(shown, comments=False) == [shown]


class StuckPipe(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.stuck, self.released = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.stuck.set()
        assert self.released.wait(30)
        return super().write(text)


@pytest.mark.parametrize(
    "bound, most, line, dropped",
    [("PENDING_LINES", 4, "a line", 6), ("PENDING_CHARS", 5 * log.LONGEST_LINE, "x" * 60_000, 5)],
    ids=["lines", "characters"],
)
def test_a_stuck_reader_costs_lines_not_time(logger, monkeypatch, bound, most, line, dropped):
    """Nor memory without end: what waits is bounded in lines and in characters."""
    monkeypatch.setattr(log, bound, most)
    pipe = StuckPipe()
    outbox = attach(logger, pipe)
    logger.info("first")
    assert pipe.stuck.wait(30)
    for _ in range(10):
        logger.info(line)  # returns although nobody reads
    assert outbox.dropped == dropped
    pipe.released.set()
    outbox.close()
    lines = pipe.getvalue().splitlines()
    assert len(lines) == 12 - dropped and f"{dropped} log lines dropped here" in "".join(lines)
    assert max(map(len, lines)) < log.LONGEST_LINE + 50
    assert any("characters more)" in one for one in lines) == (len(line) > log.LONGEST_LINE)


def test_standard_error_that_is_gone_harms_nobody(logger):
    stream = io.StringIO()
    outbox = attach(logger, stream)
    stream.close()
    logger.info("into the void")
    outbox.close()
    assert not outbox._thread.is_alive()


def test_setup_takes_over_the_root_logger_and_access_lines_go_there():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    try:
        outbox = log.setup("info", stream)
        logging.getLogger("aiohttp.access").info("chatter")
        log.access("POST", "/v1/chat/completions", 200, 0.5, replica="r1", ttft=None, prompt_tokens=812)
        outbox.close()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert line.endswith(
        "info hitherto.access POST /v1/chat/completions 200 seconds=0.5 replica=r1 prompt_tokens=812\n"
    )

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.exits import KEPT_LINES, LONGEST_LINE, Tail, explain


@pytest.mark.parametrize(
    "lines, remedy",
    [
        (["INFO loading", "OSError: [Errno 98] Address already in use", "INFO bye"], "ss -ltnp"),
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"], "too little free memory"),
        (["ModuleNotFoundError: No module named 'vllm'"], "install it"),
        (["vllm serve: error: unrecognized arguments: --enable-scale-out"], "extra_args"),
        (["OSError: /models/x does not appear to have a file named config.json"], "check --model"),
        (["OSError: [Errno 28] No space left on device"], "df -h"),
    ],
)
def test_a_known_failure_has_a_remedy_and_shows_its_line(lines, remedy):
    reason = explain(1, 3.21, ["starting", *lines], oom=False)
    assert reason.startswith("exited with code 1 after 3.2 s: ")
    assert remedy in reason and max(lines, key=len) in reason


def test_an_unknown_failure_shows_the_line_that_says_most():
    assert explain(7, 60, ["x", "ValueError: no common block size for 16", "shutting down"], oom=False) == (
        'exited with code 7 after 60 s; log: "ValueError: no common block size for 16"'
    )
    assert explain(0, 1, ["one", "two"], oom=False) == 'exited with code 0 after 1.0 s; log: "two"'
    assert explain(0, 1, [], oom=False) == "exited with code 0 after 1.0 s, and left no log"


def test_signals_are_told_apart():
    kill = explain(-signal.SIGKILL, 5, ["fine"], oom=False)
    assert "SIGKILL" in kill and "someone killed it" in kill
    assert "the kernel killed it for memory" in explain(-signal.SIGKILL, 5, ["fine"], oom=True)
    assert "crashed in native code" in explain(-signal.SIGSEGV, 5, [], oom=False)
    assert "asked it to stop" in explain(-signal.SIGTERM, 5, [], oom=False)
    assert "signal 250" in explain(-250, 5, [], oom=False)


@given(st.lists(st.binary(max_size=30)))
def test_a_tail_is_the_same_however_its_bytes_come(pieces):
    one, many = Tail(), Tail()
    one.feed(b"".join(pieces))
    for piece in pieces:
        many.feed(piece)
    one.close(), many.close()
    assert one.lines == many.lines


def test_a_tail_keeps_the_last_lines_short_and_clean():
    tail = Tail()
    tail.feed(b"\n".join(b"line %d" % i for i in range(200)) + b"\n")
    assert tail.lines == [f"line {i}" for i in range(200 - KEPT_LINES, 200)]
    tail.feed(b"\r 10%\r 20%\r\x1b[32mdone\x1b[0m\n")
    assert tail.lines[-3:] == ["10%", "20%", "done"]
    tail.feed(b"x" * 1_000_000)
    assert tail.last == "done"
    tail.close()
    assert tail.last == "x" * LONGEST_LINE

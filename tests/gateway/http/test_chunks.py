"""Taking HTTP's framing off, wherever reads end."""

import pytest

from gateway.http.chunks import LONGEST_LINES, Chunks

BODY = b"3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\n\r\n"


@pytest.mark.parametrize("at", range(len(BODY) + 1))
def test_reads_may_end_anywhere(at):
    chunks = Chunks()
    assert chunks.feed(BODY[:at]) + chunks.feed(BODY[at:]) == b"abcde" and chunks.ended


def test_a_chunk_of_any_size_is_handed_out_as_it_comes():
    chunks, read, out = Chunks(), b"x" * 2**16, 0
    out += len(chunks.feed(b"ffffffff\r\n" + read))
    for _ in range(100):
        out += len(chunks.feed(read))
        assert len(chunks.rest) <= 1
    assert out == 101 * len(read)


def test_a_size_may_begin_with_zeros():
    chunks = Chunks()
    assert chunks.feed(b"0000000005\r\nabcde\r\n" + b"0" * 20 + b"a;x=1\r\n0123456789\r\n") == b"abcde0123456789"
    assert not chunks.ended
    assert chunks.feed(b"0" * 20) == b"" and not chunks.ended
    assert chunks.feed(b"\r\n\r\n") == b"" and chunks.ended


NO_FRAMING = [b"\r\n", b"x\r\n", b"123456789\r\n", b"0123456789abc\r\n", b"00000000fffffffff;e=1\r\n"]


@pytest.mark.parametrize("raw", [*NO_FRAMING, b"1;" + b"e" * LONGEST_LINES, b"0\r\n" + b"t" * LONGEST_LINES])
def test_what_is_no_framing_is_an_error(raw):
    with pytest.raises(ValueError):
        Chunks().feed(raw)

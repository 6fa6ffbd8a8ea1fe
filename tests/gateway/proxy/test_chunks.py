"""Taking HTTP's framing off, wherever reads end."""

import pytest

from gateway.proxy.chunks import Chunks

BODY = b"3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\n\r\n"


@pytest.mark.parametrize("at", range(len(BODY) + 1))
def test_reads_may_end_anywhere(at):
    chunks = Chunks()
    assert chunks.feed(BODY[:at]) + chunks.feed(BODY[at:]) == b"abcde" and chunks.ended

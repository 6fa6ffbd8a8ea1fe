"""Replies of something else than Redis at its address: lengths that cannot be are refused before they are allocated."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.exceptions import InvalidResponse

from cachemap.cluster.connect import FAILURES, RedisClients, RedisConnection, describe, parse
from cachemap.cluster.parser import MOST_AHEAD, Parser

from .test_nonsense import Other

IMPOSSIBLE = [
    b"*1000000000\r\n", b"*2\r\n*1000000000\r\n", b"*2\r\n$3\r\nabc\r\n*1000000000\r\n", b"%1000000000\r\n",
    b"~1000000000\r\n", b">1000000000\r\n", b"|1000000000\r\n", b"$1000000000\r\n", b"*1\r\n=1000000000\r\n",
    b"*3\r\n$1\r\naXX*1000000000\r\n", b"*9999\r\n" * 1000, b"*9\r\n*99999\r\n*99999\r\n",
]  # fmt: skip


class Reads:
    """A connection's stream that gives these reads, one after the other."""

    def __init__(self, reads):
        self._reads = iter(reads)

    async def read(self, most):
        return next(self._reads, b"")

    def at_eof(self):
        return False


def reading(reads):
    parser = Parser(1 << 16)
    encoder = SimpleNamespace(decode_responses=False)
    parser.on_connect(SimpleNamespace(_reader=Reads(reads), encoder=encoder))
    return parser


async def replies(reads, count):
    parser = reading(reads)
    return [await parser.read_response() for _ in range(count)]


def cut(data, at):
    """The bytes in pieces that end at these places."""
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[start:end] for start, end in pairwise(places)]


def encoded(value):
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%s\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))


@pytest.mark.parametrize("data", IMPOSSIBLE, ids=lambda data: repr(data[:24]))
@pytest.mark.parametrize("size", [1, 3, 1 << 16])
async def test_a_length_that_cannot_be_is_refused_before_it_is_allocated(data, size, monkeypatch):
    reads = [b"+OK\r\n", *(data[at : at + size] for at in range(0, len(data), size))]
    parser, fed = reading(reads), []
    monkeypatch.setattr(parser, "_reader", SimpleNamespace(
        feed=lambda data, at=0, length=None, reader=parser._reader: (
            fed.append(data if length is None else data[at : at + length]),
            reader.feed(fed[-1]),
        ),
        gets=parser._reader.gets, has_data=parser._reader.has_data,
    ))  # fmt: skip
    assert await parser.read_response() == b"OK"
    with pytest.raises(InvalidResponse, match="a length that cannot be"):
        await parser.read_response()
    assert b"00000000\r\n" not in b"".join(fed) and b"".join(fed).count(b"9999\r\n") <= MOST_AHEAD // 9999 + 1


TEXTS = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"\r\n*1000000000\r\n", b"*123456\r\n" * 9, b"$9999999999\r\n", b"x\r\n*"])
)
VALUES = st.recursive(
    st.none() | st.integers(-5, 1 << 40) | TEXTS, lambda value: st.lists(value, max_size=14), max_leaves=40
)


@given(st.lists(VALUES, min_size=1, max_size=5), st.lists(st.integers(0, 1 << 12), max_size=9))
@example([b"*123456\r\n" * 100, [b"\r\n*1000000000\r\n"] * 12], range(0, 1 << 12, 7))
@example([[b"x"] * 20_000], [40, 50_000])
def test_what_redis_sends_is_read_as_it_is_however_it_is_cut(values, at):
    assert asyncio.run(replies(cut(b"".join(map(encoded, values)), at), len(values))) == values


async def test_the_largest_replies_are_read():
    slots = [[slot, slot, [b"10.0.0.1", 6379, b"n" * 40, []]] for slot in range(16384)]
    streams = [[b"stream %d" % number, [[b"1-0", [b"d", b"x"]]] * 20] for number in range(5000)]
    for value in (slots, streams, [[b"x" * 48] * 10_000, 0, 0], [1, [b"x" * (1 << 20)] * 30]):
        data = encoded(value)
        assert await replies([data[at : at + 1000] for at in range(0, len(data), 1000)], 1) == [value]


async def test_a_push_message_is_refused():
    with pytest.raises(InvalidResponse, match="a push message"):
        await replies([b">1\r\n+message\r\n" * 3000], 1)


async def test_every_client_says_that_something_else_answers(redis_server):
    async with Other(redis_server.port) as other:
        other.answer = lambda command: b"*1000000000\r\n" if command[0] in (b"PING", b"EVALSHA") else None
        ways = RedisClients(parse(other.url))
        line = RedisConnection(ways, "key")
        for ask in ((await ways.to("key")).ping, lambda: line.ask([("PING",)])):
            with pytest.raises(FAILURES) as failed:
                await ask()
            assert describe(failed.value) == (
                "something else than Redis answers there (a length that cannot be: *1000000000)"
            )
        other.answer = lambda command: None
        assert await (await ways.to("key")).ping() and await line.ask([("PING",)]) == [b"PONG"]
        await ways.aclose()

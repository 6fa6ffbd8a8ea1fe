"""Clients that stop reading a stream hold back that stream alone: its replica waits, the gateway keeps little, others
go on."""

import asyncio

from ..http.talk import eventually, read_request
from .replies import EVENT, SSE_HEAD, chunk, post
from .stack import stack

PIECE, PIECES = 65536, 1024  # kernel buffers hold some megabytes, 64 MB they do not
SLOW = b"slow-"


class Replica:
    """Writes to clients named slow-N as fast as it may, to others a chunk whenever it is told."""

    def __init__(self):
        self.taken: dict[bytes, int] = {}  # pieces, by slow client
        self.next: asyncio.Queue[bool] = asyncio.Queue()

    async def __call__(self, reader, writer):
        head, _ = await read_request(reader)
        name = head.split(b"x-name: ")[1].split(b"\r\n")[0]
        writer.write(SSE_HEAD)
        if name.startswith(SLOW):
            for number in range(PIECES):
                self.taken[name] = number
                writer.write(chunk(b":%07d" % number * (PIECE // 8)))
                await writer.drain()
        else:
            while await self.next.get():
                writer.write(chunk(EVENT))
        writer.write(b"0\r\n\r\n")
        await reader.read()


def held(exchange) -> int:
    """Bytes of an answer that the gateway has in hand: not yet sent, and kept to find the usage in."""
    return exchange.client.transport.get_write_buffer_size() + sum(map(len, exchange.attempt.tail))


def waits(exchange) -> bool:
    attempt = exchange.attempt
    return attempt is not None and attempt.upstream is not None and attempt.upstream.paused


async def test_slow_readers_hold_back_only_themselves():
    replica = Replica()
    async with stack(replica, idle_timeout=60) as s:
        slow = [await s.talk() for _ in range(4)]
        for number, talk in enumerate(slow):
            await talk.say(post(extra=b"X-Name: %b%d\r\n" % (SLOW, number)))
        exchanges = s.proxy.exchanges
        await eventually(lambda: len(exchanges) == 4 and all(map(waits, exchanges)), 20)
        stopped = list(exchanges)
        other = await s.say(post(extra=b"X-Name: other\r\n"))
        for _ in range(200):  # one by one: each must come before the next is written
            replica.next.put_nowait(True)
            assert EVENT in await other.until(b"\n\n\r\n")
        await eventually(lambda: all(map(waits, stopped)))
        assert max(map(held, stopped)) < 384 * 1024  # a read of 256 kB on top of 64 kB that may wait
        replica.next.put_nowait(False)
        await other.until(b"0\r\n\r\n")

        assert len(replica.taken) == 4 and max(replica.taken.values()) < 3 * PIECES // 4
        whole = b"".join(b":%07d" % number * (PIECE // 8) for number in range(PIECES))
        assert all(body == whole for _, _, body in await asyncio.gather(*(talk.response(60) for talk in slow)))


async def test_a_slow_reader_that_leaves_lets_its_replica_go():
    replica = Replica()
    async with stack(replica, idle_timeout=60) as s:
        talk = await s.say(post(extra=b"X-Name: slow-1\r\n"))
        await eventually(lambda: any(map(waits, s.proxy.exchanges)), 20)
        talk.writer.transport.abort()
        await eventually(s.idle)
        assert s.metrics.client_aborts.total() == 1 and s.faults == []

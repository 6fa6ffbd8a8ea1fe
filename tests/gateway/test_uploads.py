"""Uploads that nobody finishes, against a real gateway process: what they take of its memory, and that it comes
back."""

import asyncio
import re
from pathlib import Path

from .running import running

MIB = 1 << 20


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def test_uploads_that_are_held_and_left_take_no_more_than_their_budget():
    async with running(
        "--replica-url", "http://127.0.0.1:9", "--request-budget", "48MiB", "--max-body-bytes", "16MiB"
    ) as gateway:
        port = int(gateway.url.rpartition(":")[2])

        async def held() -> int:
            text = (await gateway.admin.get("/metrics")).text
            return int(float(re.search(r"^hitherto_request_bytes (\S+)$", text, re.M)[1]))

        async def upload() -> asyncio.StreamWriter:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (15 * MIB)
                + b"x" * (10 * MIB)
            )
            return writer

        async def sent(writer: asyncio.StreamWriter) -> None:
            while writer.transport.get_write_buffer_size():
                await asyncio.sleep(0.01)

        before, most = resident(gateway.process.pid), 0
        for _ in range(3):
            writers = [await upload() for _ in range(12)]
            await asyncio.wait_for(asyncio.gather(*map(sent, writers)), 30)
            assert 10 * MIB <= await held() <= 48 * MIB
            most = max(most, resident(gateway.process.pid) - before)
            for writer in writers:
                writer.transport.abort()
            while await held():
                await asyncio.sleep(0.01)
        assert most < 48 * MIB + 24 * MIB

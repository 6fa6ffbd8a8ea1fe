"""What requests leave behind in the gateway's process: every memory of it has a budget, whatever clients send."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from .running import Running, running

MB = 1_000_000
CHAT = "/v1/chat/completions"


def body(**fields) -> bytes:
    return json.dumps(
        {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, **fields}
    ).encode()


def resident(gateway: Running) -> int:
    """Bytes of memory that the gateway's process has."""
    return int(Path(f"/proc/{gateway.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def most_resident(gateway: Running) -> int:
    """The most that it has had since it started."""
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


async def grown(gateway: Running, path: str, bodies: Sequence[bytes]) -> float:
    """Bytes by which the process is larger after these requests than after the first of them a few times."""

    async def send(bodies: Sequence[bytes]) -> int:
        for at in range(0, len(bodies), 8):
            replies = [
                gateway.client.post(path, content=one, headers={"content-type": "application/json"})
                for one in bodies[at : at + 8]
            ]
            for reply in await asyncio.gather(*replies):
                assert reply.status_code < 500, reply.text[:500]
        return resident(gateway)

    before = await send(bodies[:1] * 16)
    return await send(bodies) - before


def fills() -> Iterator[tuple[str, str, list[bytes]]]:
    """What else of a request might stay: 20 MB of each."""
    big = ["x" * MB + str(i) for i in range(20)]
    yield "salts", CHAT, [body(cache_salt=one) for one in big]
    yield "sessions", CHAT, [body(user=one) for one in big]
    yield "models", CHAT, [body(model=one) for one in big]
    yield "fields", CHAT, [body(**{one: 1}) for one in big]
    yield (
        "types of parts",
        CHAT,
        [body(messages=[{"role": "user", "content": [{"type": one, "text": "hello"}]}]) for one in big],
    )
    yield (
        "types of calls",
        CHAT,
        [
            body(messages=[{"role": "assistant", "tool_calls": [{"type": one, "function": {"name": "f"}}]}])
            for one in big
        ],
    )
    yield (
        "stored responses",
        "/v1/responses",
        [json.dumps({"model": "sim", "input": "hello", "previous_response_id": one}).encode() for one in big],
    )


async def first_line(gateway: Running, head: bytes) -> int:
    """The status of the answer to this."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(head)
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


async def idle(gateway: Running, head: bytes, count: int) -> float:
    """Bytes that so many connections take which have had an answer to this and wait."""
    port, writers, before = int(gateway.url.rpartition(":")[2]), [], 0
    for made in range(count + 20):
        if made == 20:
            before = resident(gateway)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        await reader.readuntil(b"\r\n\r\n")
        writers.append(writer)
    taken = resident(gateway) - before
    for writer in writers:
        writer.close()
    return taken


async def test_what_requests_leave_behind_is_bounded():
    async with running("--launch", "1") as gateway:
        await gateway.ready(1)
        assert (
            await first_line(
                gateway, b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), 17 * 2**20)
            )
            == 413
        )
        # Of a shape of conversation, seen once or compiled, a digest of the tools and template variables is kept.
        shapes = [body(chat_template_kwargs={"unused": "x" * 2 * MB + str(i)}) for i in range(30)]
        assert await grown(gateway, CHAT, shapes) < 30 * MB
        for what, path, bodies in fills():
            assert await grown(gateway, path, bodies) < 12 * MB, what
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Long: %b\r\nContent-Length: 2\r\n\r\n{}" % (
            b"x" * 60_000
        )
        assert await idle(gateway, head, 200) < 200 * 30_000
        before = most_resident(gateway)
        for bomb in (b"[" + b"[]," * 5 * MB + b"1]", b"[" + b'{"a":1},' * (15 * MB // 8) + b"1]"):
            reply = await gateway.client.post(CHAT, content=b'{"model": "sim", "messages": %b}' % bomb)
            assert reply.status_code == 400 and "objects, lists and members" in reply.json()["error"]["message"]
        assert most_resident(gateway) - before < 100 * MB


async def test_a_burst_of_uploads_leaves_nothing_behind(start_engine):
    """What large requests took goes back to the system."""
    engine = start_engine().wait()
    text = body(messages=[{"role": "user", "content": "hello world, " * 1_000_000}])
    async with running("--replica-url", engine.url, "--max-body-bytes", "16MiB") as gateway:
        await gateway.until(lambda status: status["ready"])
        before = resident(gateway)
        post = {"content": text, "headers": {"content-type": "application/json"}}
        answers = await asyncio.gather(*(gateway.client.post(CHAT, **post) for _ in range(16)))
        assert {answer.status_code for answer in answers} == {400}  # longer than its context
        async with asyncio.timeout(20):
            while resident(gateway) > before + 100 * MB:
                await asyncio.sleep(0.1)

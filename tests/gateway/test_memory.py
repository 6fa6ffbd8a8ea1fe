"""Memory that large requests took goes back to the system."""

import asyncio
import re

import orjson

from tests.gateway.running import running


def resident(pid: int) -> int:
    """MB of a process."""
    with open(f"/proc/{pid}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+)", status.read())[1]) // 1024


async def test_a_burst_of_uploads_leaves_nothing_behind(start_engine):
    engine = start_engine().wait()
    text = orjson.dumps({"model": "sim", "messages": [{"role": "user", "content": "hello world, " * 1_000_000}]})
    async with running("--replica-url", engine.url, "--max-body-bytes", "16MiB") as gateway:
        await gateway.until(lambda status: status["ready"])
        pid = gateway.process.pid
        before = resident(pid)
        post = {"content": text, "headers": {"content-type": "application/json"}}
        answers = await asyncio.gather(*(gateway.client.post("/v1/chat/completions", **post) for _ in range(16)))
        assert {answer.status_code for answer in answers} == {400}  # longer than its context
        async with asyncio.timeout(20):
            while resident(pid) > before + 100:
                await asyncio.sleep(0.1)

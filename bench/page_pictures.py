"""Take the pictures of the live page in docs/operations.md, from a gateway with three simulated engines under load:

    python -m bench.page_pictures

Needs Chromium, and Pillow (it comes with `hitherto[plots]`), which makes them small. Takes two minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from PIL import Image

from tests.gateway.ops.browser import CHROMIUM, MISSING, Page, browser
from tests.gateway.running import Running, running

DOCS = Path(__file__).parents[1] / "docs"
USERS, SECONDS = 12, 75.0
SYSTEMS = (
    "You answer for the billing desk, briefly and with the sum in the first line. " * 24,
    "You are a senior engineer of the storage team. Name the module before you explain it. " * 32,
    "Translate into plain English and keep every number. " * 12,
)
QUESTION = "What does a customer see whose invoice was split over two months? " * 4


async def talk(client: httpx.AsyncClient, number: int) -> None:
    draw = random.Random(number)
    while True:
        said = [{"role": "system", "content": draw.choices(SYSTEMS, (6, 3, 1))[0]}]
        for _ in range(draw.randint(1, 4)):
            said.append({"role": "user", "content": f"{draw.random()} {QUESTION * draw.randint(1, 5)}"})
            body = {"model": "sim", "messages": said, "stream": True, "max_tokens": draw.randint(10, 60)}
            body["stream_options"] = {"include_usage": True}
            with contextlib.suppress(httpx.HTTPError):
                await client.post("/v1/chat/completions", json=body)
            said.append({"role": "assistant", "content": "Both parts, each with its own month."})
            await asyncio.sleep(draw.random())


@contextlib.asynccontextmanager
async def load(gateway: Running) -> AsyncIterator[None]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        tasks = [asyncio.create_task(talk(client, number)) for number in range(USERS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def shown(page: Page, gateway: Running, path: Path, width: int, height: int, dark: bool) -> None:
    await page.open(f"{gateway.admin.base_url}/", width, height, dark)
    await page.until("document.querySelectorAll('.tile').length == 6 && !!document.querySelector('#decisions li')")
    await page.picture(path, height)
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(96, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1000:.0f} kB")


async def main() -> None:
    if not CHROMIUM:
        raise SystemExit(MISSING)
    async with running("--launch", "3") as gateway, browser() as page:
        status = await gateway.ready(3)
        async with load(gateway):
            await asyncio.sleep(SECONDS * 0.7)
            os.kill(status["replicas"][1]["pid"], signal.SIGKILL)  # so that there is a failure to be seen
            await asyncio.sleep(SECONDS * 0.3)
            await shown(page, gateway, DOCS / "live-page.png", 1320, 1090, dark=False)
            await shown(page, gateway, DOCS / "live-page-narrow.png", 360, 860, dark=True)


if __name__ == "__main__":
    asyncio.run(main())

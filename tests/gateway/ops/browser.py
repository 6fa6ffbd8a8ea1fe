"""A headless Chromium that a test drives: opens a page, asks it, types, takes pictures."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "there is no Chromium (Debian: apt-get install chromium)"
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
FRAME = "(() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true)))))()"


class Page:
    """One tab, over the DevTools protocol. `problems`: what its console and its scripts complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids = socket, count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if (waiting := self._answers.pop(told.get("id"), None)) is not None:
                waiting.set_result(told)
            elif told.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(told["params"]["exceptionDetails"]))
            elif told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.problems.append(f"{told['params']['entry']['text']} {told['params']['entry'].get('url', '')}")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        id = next(self._ids)
        answer = self._answers[id] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": id, "method": method, "params": parameters})
        told = await asyncio.wait_for(answer, 30)
        assert "error" not in told, told
        return told["result"]

    async def open(self, url: str, width: int = 1360, height: int = 900, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)

    async def ask(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        told = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, script: str, seconds: float = 30) -> Any:
        """Look at each frame until an expression is true; its value."""
        end = asyncio.get_running_loop().time() + seconds
        script = f"(found => found instanceof Node || found)({script})"
        while not (found := await self.ask(script)):
            assert asyncio.get_running_loop().time() < end, f"{script}: {await self.ask('document.body.innerText')}"
            await self.ask(FRAME)
        return found

    async def press(self, key: str, modifiers: int = 0) -> None:
        code = {"Tab": 9, "Enter": 13, " ": 32}[key]
        text = {"Enter": "\r", " ": " "}.get(key, "") if not modifiers else ""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def picture(self, path: Path, height: int | None = None) -> None:
        """Of the whole page, or of its first so many pixels."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        shot = await self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *ARGUMENTS, f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            url = await asyncio.wait_for(_listens_at(process), 60)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{url}/json/list") as response:
                    target = next(one for one in await response.json() if one["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    try:
                        yield page
                    finally:
                        await page.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


async def _listens_at(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async for line in process.stderr:
        if b"DevTools listening on ws://" in line:
            return line.split(b"ws://")[1].split(b"/")[0].decode()
    raise AssertionError("Chromium ended")

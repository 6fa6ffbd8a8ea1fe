"""`python -m tests.gateway.ending KIND ARGS`: a simulated engine that ends gracefully on SIGTERM, or a gateway that
waits a fiftieth as long for what is lost.

  closes  as uvicorn: the port and idle connections close, what is under way is answered
  sick    as SGLang: /health says 503, everything else goes on until nothing is under way
  serve   `hitherto serve`
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from aiohttp import web

from gateway import cli as gateway_cli
from gateway.proxy.failures import deadlines
from replicas import State
from replicas.simulated import cli
from replicas.simulated.server import Server

from . import sglang_engine


def _engine(kind: str, args: Sequence[str]) -> int:
    ending = asyncio.Event()

    async def health(_: Server, request: web.Request) -> web.Response:
        return web.Response(status=503 if kind == "sick" and ending.is_set() else 200)

    async def until_told(runner, publisher, http) -> int:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
        steps = asyncio.ensure_future(runner.run())
        await ending.wait()
        if kind == "closes":
            http._shutdown_timeout = 60.0
            await http.cleanup()
        while runner.live:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)  # what it has written last is sent
        steps.cancel()
        os._exit(0)

    Server._empty = sglang_engine.SglangServer._health = health
    cli._until_told = until_told
    return sglang_engine.main(args) if kind == "sick" else cli.main(list(args))


def main(argv: Sequence[str]) -> int:
    kind, *args = argv
    if kind != "serve":
        return _engine(kind, args)
    deadlines.LOST_SILENCE = 0.2
    deadlines.PATIENCE = {**deadlines.PATIENCE, State.DEGRADED: 0.2}
    return gateway_cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

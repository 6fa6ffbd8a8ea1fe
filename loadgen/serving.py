"""What every verb needs of a server before it sends a load: its model's name, and a way to stop."""

from __future__ import annotations

import asyncio
import signal

import orjson

from loadgen.client import Client
from loadgen.drive import Run


class Unreachable(Exception):
    """The server can't be used; the message says why and what to do."""


async def model_of(client: Client, asked: str | None) -> str:
    """The model to ask for: as given, else the first the server lists. Raises Unreachable."""
    if asked:
        return asked
    status, body, problem = await client.get("/v1/models")
    if problem:
        raise Unreachable(f"{client.base_url} does not answer ({problem}). Is the server up, and the port right?")
    try:
        return orjson.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise Unreachable(f"{client.base_url} answers {status} to /v1/models and lists no model; "
                          "name one with --model") from None


def stop_on_interrupt(load: Run) -> None:
    """Ctrl-C ends the load and still gives the report; a second Ctrl-C ends the program."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        load.stop()

    loop.add_signal_handler(signal.SIGINT, stop)

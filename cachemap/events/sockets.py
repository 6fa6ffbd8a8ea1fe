"""Requests to an engine's replay socket for recorded event batches."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from cachemap.events.zmtp import WAKE_SECONDS, connected

REPLAY_SECONDS = 2.0  # a replay socket that does not answer for so long counts as dead
MOST_ANSWERS = 1000  # the most requests that are sent for one replay
END = b"\xff" * 8  # the sequence number that ends a replay


async def replay(endpoint: str, start: int) -> AsyncGenerator[list[list[bytes]], None]:
    """Yield the event batches that the engine still has, from number `start` on.

    `endpoint`: the address of the engine's replay socket. Each result is a list of batches, as many as one event-loop
    iteration should handle. A batch is a list of ZMQ frames, of which the last two are its number and its payload.
    Raises TimeoutError if the engine stops answering.

    vLLM's socket silently drops messages that are more than 1,000 ahead of the network, even the end marker (its
    high-water mark is ZMQ's default). So if a number is skipped or the end marker does not come, the remaining batches
    are requested again, for up to 1,000 requests in all (MOST_ANSWERS). Each answer but the last has about 1,000
    batches, and an engine keeps 10,000 by default.
    """
    wanted = None
    for _ in range(MOST_ANSWERS):
        heard = False
        try:
            async with aclosing(_answer(endpoint, start if wanted is None else wanted)) as answer:
                async for batches in answer:
                    follow = _following_on(batches, wanted)
                    if follow:
                        heard, wanted = True, _number(follow[-1]) + 1
                        yield follow
                    if len(follow) < len(batches):
                        break
                else:
                    return
        except TimeoutError:
            if not heard:
                raise
        if not heard:
            raise TimeoutError(f"{endpoint} no longer has batch {wanted}")
    raise TimeoutError(f"{endpoint} has given {MOST_ANSWERS} answers that lack batches")


def _following_on(batches: list[list[bytes]], number: int | None) -> list[list[bytes]]:
    """Return the batches before the first gap in their numbers.

    `number`: the number that the first batch must have; None allows any number.
    """
    for at, frames in enumerate(batches):
        if number is not None and _number(frames) != number:
            return batches[:at]
        number = _number(frames) + 1
    return batches


def _number(frames: list[bytes]) -> int:
    return int.from_bytes(frames[-2][:8], "big")


async def _answer(endpoint: str, start: int) -> AsyncGenerator[list[list[bytes]], None]:
    """Yield the batches of the engine's answer to one request for a replay from batch `start` on."""
    loop = asyncio.get_running_loop()
    with connected("DEALER", endpoint) as inbox:
        inbox.send([b"", start.to_bytes(8, "big")])
        until = loop.time() + REPLAY_SECONDS
        while True:
            # A message of one frame is neither a batch nor the end marker.
            messages = [frames for frames in inbox.take() if len(frames) > 1]
            if messages:
                until = loop.time() + REPLAY_SECONDS
                batches = [frames for frames in messages if frames[-2][:8] != END]
                if batches:
                    yield batches
                if len(batches) < len(messages):
                    return
                await asyncio.sleep(0)
            elif loop.time() >= until:
                raise TimeoutError(f"no answer from {endpoint}")
            else:
                await inbox.changed(min(WAKE_SECONDS, until - loop.time()))

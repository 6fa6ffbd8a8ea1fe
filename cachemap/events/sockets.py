"""What an engine's sockets are asked for: the batches of its record, or all that it holds at once."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from cachemap.events.zmtp import WAKE_SECONDS, connected

REPLAY_SECONDS = 2.0  # without a word from the replay socket: nobody is there
MOST_ANSWERS = 1000  # to requests for one replay
SNAPSHOT = b"snapshot"
SNAPSHOT_SECONDS = 10.0  # it is one message, of as many blocks as the engine holds, within MOST_QUEUED bytes
END = b"\xff" * 8  # the sequence number that ends a replay


async def replay(endpoint: str, start: int) -> AsyncGenerator[list[list[bytes]], None]:
    """What the engine still has of its batches from number `start` on, a turn's worth at a
    time, each as [..., sequence, payload]. Raises TimeoutError if it stops answering.

    vLLM's socket drops without a word what is more than 1,000 messages ahead of the network, the end as well (its
    high-water mark is ZMQ's default). So where numbers do not follow on, or the end does not come, it is asked for the
    rest, but not for ever: each answer but the last has about 1,000 batches, and an engine keeps 10,000 unless it is
    told otherwise."""
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
    """Those before the first hole. The first of them has this number, or None: any."""
    for at, frames in enumerate(batches):
        if number is not None and _number(frames) != number:
            return batches[:at]
        number = _number(frames) + 1
    return batches


def _number(frames: list[bytes]) -> int:
    return int.from_bytes(frames[-2][:8], "big")


def publisher_of(frames: list[bytes]) -> bytes:
    """The id of the process that sent a batch, behind its sequence number; b"" of engines that do not tell it."""
    return frames[-2][8:] if len(frames) > 1 else b""


class Snapshot(NamedTuple):
    """All that an engine holds, as batches of events that end with number `sequence` of this publisher."""

    sequence: int
    publisher: bytes
    payloads: list[bytes]


async def snapshot(endpoint: str) -> Snapshot | None:
    """Ask for all that the engine holds; None if it has no answer to that now. Raises TimeoutError.

    As vLLM's proposal has it: one frame `snapshot`, answered by one message of the number (signed, negative where there
    is none), the publisher's id and the batches."""
    loop = asyncio.get_running_loop()
    with connected("DEALER", endpoint) as inbox:
        inbox.send([SNAPSHOT])
        until = loop.time() + SNAPSHOT_SECONDS
        while loop.time() < until:
            for message in inbox.take():
                frames = message[1:] if message[:1] == [b""] else message
                if len(frames) < 2:  # nothing that the proposal knows
                    continue
                sequence, publisher, *payloads = frames
                number = int.from_bytes(sequence, "big", signed=True)
                return Snapshot(number, publisher, payloads) if number >= 0 else None
            await inbox.changed(min(WAKE_SECONDS, max(0.0, until - loop.time())))
    raise TimeoutError(f"no snapshot from {endpoint}")


async def _answer(endpoint: str, start: int) -> AsyncGenerator[list[list[bytes]], None]:
    """One answer to a request for a replay."""
    loop = asyncio.get_running_loop()
    with connected("DEALER", endpoint) as inbox:
        inbox.send([b"", start.to_bytes(8, "big")])
        until = loop.time() + REPLAY_SECONDS
        while True:
            messages = [frames for frames in inbox.take() if len(frames) > 1]  # one frame is no batch, and no end
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

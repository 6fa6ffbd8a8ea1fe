"""A publisher that speaks as vLLM does: PUB with numbered batches, ROUTER for replay."""

import asyncio
import contextlib
import time
from array import array

import msgspec
import zmq
import zmq.asyncio

from cachemap.events import records
from replicas.engines.vllm import VLLM

BLOCK = 4
decode = VLLM.event_decoder(records)


def stored(keys, tokens, parent=None, **fields):
    """Return a BlockStored event as the engine writes it, for blocks of BLOCK tokens."""
    return {
        "type": "BlockStored", "block_hashes": keys, "parent_block_hash": parent,
        "token_ids": tokens, "block_size": BLOCK, "lora_id": None, "medium": "GPU",
        "lora_name": None, "extra_keys": [None] * len(keys), "group_idx": 0,
        "kv_cache_spec_kind": "full_attention", **fields,
    }  # fmt: skip


def record(keys, tokens, size, parent=None, tier="gpu", **fields):
    """Return the decoded event of full attention's blocks of `size` tokens; `tokens`: ids, or their bytes."""
    ids = tokens if isinstance(tokens, bytes) else array("I", tokens).tobytes()
    return records.Stored(keys, parent, ids, size, tier, None, None, 0, records.FULL_ATTENTION, **fields)


def removed(*keys, **fields):
    return {"type": "BlockRemoved", "block_hashes": list(keys), "medium": "GPU", **fields}


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """One engine's sockets.

    `kept`: how many batches it can replay. `room`: how many batches of an answer its socket holds; as at a high-water
    mark it drops the others except the last one, or with `drops_end` all others. `port`: where to publish, any by
    default.
    """

    def __init__(self, topic=b"kv", kept=10_000, topic_in_replay=True, room=None, drops_end=False, port=None):
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # each subscriber is told of
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
        if port is not None:
            self._pub.bind(f"tcp://127.0.0.1:{port}")
        else:
            port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.replay = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._topic, self._kept, self._topic_in_replay = topic, kept, topic_in_replay
        self._room, self._drops_end = room, drops_end
        self.record: dict[int, bytes] = {}
        self.next = 0
        self.asked: list[int] = []
        self._server: asyncio.Task | None = None

    async def subscribed(self):
        """Wait until a subscriber's subscription has arrived."""
        async with asyncio.timeout(10):
            while (await self._pub.recv())[:1] != b"\1":  # else one has ended
                pass

    def serve_replay(self):
        self._server = asyncio.ensure_future(self._serve())

    async def _serve(self):
        while True:
            peer, _, start = await self._router.recv_multipart()
            start = int.from_bytes(start, "big")
            self.asked.append(start)
            topic = [self._topic] if self._topic_in_replay else []
            answer = [one for one in sorted(self.record.items()) if one[0] >= start]
            full = self._room is not None and len(answer) > self._room
            for number, payload in (
                [*answer[: self._room], *([] if self._drops_end else answer[-1:])] if full else answer
            ):
                frames = [peer, b"", *topic, number.to_bytes(8, "big"), payload]
                await self._router.send_multipart(frames)
            if full and self._drops_end:
                continue
            empty = [b""] if self._topic_in_replay else []
            await self._router.send_multipart([peer, b"", *empty, b"\xff" * 8, b""])

    async def publish(self, *events, lose=False):
        """Send one batch; with `lose` it is only kept for replay."""
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        number, self.next = self.next, self.next + 1
        self.record[number] = payload
        self.record.pop(number - self._kept, None)
        if not lose:
            await self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    async def publish_raw(self, frames):
        await self._pub.send_multipart(frames)

    def restart(self):
        """Go on as a new engine at the same addresses."""
        self.record.clear()
        self.next = 0

    async def close(self):
        if self._server:
            self._server.cancel()
            await asyncio.gather(self._server, return_exceptions=True)
        self._context.destroy(linger=0)


@contextlib.asynccontextmanager
async def publishing(serves=True, **options):
    """Yield a publisher; without `serves` it answers requests for replay only once `serve_replay` is called."""
    publisher = Publisher(**options)
    if serves:
        publisher.serve_replay()
    try:
        yield publisher
    finally:
        await publisher.close()

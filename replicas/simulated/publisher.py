"""KV events over ZMQ as vLLM publishes them: a PUB socket, and a ROUTER that replays the last 10,000 batches.

A batch is three frames: topic, sequence number (8 bytes, big endian, from 0), msgpack [time, events, rank]. Events are
tagged maps, as from vLLM 0.24 on.

Copies in host memory have the forms of vLLM's offloading connector: with `self_describing`, tokens and parent of the
blocks of each chunk, otherwise only the key of each chunk's last block, without tokens and with size 0. With `lmcache`
they are LMCache's (`lmcache.py`), which vLLM publishes among its own.
"""

import asyncio
import logging
import os
import time
from collections import deque

import msgspec
import zmq
import zmq.asyncio

from replicas.ports import cannot_listen

from . import lmcache
from .engine import Cleared, Removed, Stored
from .keys import extra_keys
from .steps import GroupKey, GroupStored

KEPT = 10_000
MEDIA = {"gpu": "GPU", "cpu": "CPU"}
END = (-1).to_bytes(8, "big", signed=True)
log = logging.getLogger(__name__)


class Publisher:
    """The publisher of one engine's KV events.

    `host`: where to listen; port 0 takes a free one. Raises ValueError if it cannot listen. `drop`, `swap` and `mute`
    are injected faults. `chunk`: blocks of a chunk in slower tiers. `windows`: the profile's; full attention is the
    last cache group.
    """

    def __init__(
        self,
        host: str,
        port: int,
        replay_port: int,
        block_size: int,
        topic: str = "",
        self_describing: bool = True,
        chunk: int = 1,
        windows: tuple[int, ...] = (),
        lmcache: bool = False,
    ):
        self._windows = windows
        self._self_describing, self._chunk, self._lmcache = self_describing, chunk, lmcache
        self.topic, self.block_size = topic, block_size
        self.sequence = 0
        self.drop = self.swap = 0  # batches to lose; batches to send after their successor
        self.mute = False  # batches vanish without using a number: the engine falls silent
        self._held: list[bytes] | None = None
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.asyncio.Context()
        self._pub = zmq.Socket(zmq.Context(self._context), zmq.PUB)  # plain: a send must not wait for the loop
        self._router = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.SNDHWM, 100_000)
        self.port = self._bind(self._pub, host, port, "--events-port")
        self.replay_port = self._bind(self._router, host, replay_port, "--replay-port")

    @staticmethod
    def _bind(socket: zmq.Socket, host: str, port: int, flag: str) -> int:
        where = f"[{host}]" if ":" in host else host
        if ":" in host:
            socket.set(zmq.IPV6, 1)
        try:
            socket.bind(f"tcp://{'*' if host in ('0.0.0.0', '::', '') else where}:{port or '*'}")
        except zmq.ZMQError as error:
            why = OSError(error.errno, os.strerror(error.errno))  # ZMQ's message repeats the address
            raise ValueError(cannot_listen(host, port, why, flag)) from None
        return int(socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").rsplit(b":", 1)[1])

    def source(self) -> dict:
        """Return this publisher's entry in vLLM's /kv_event_sources."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "buffer_steps": KEPT,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": self.topic,
        }

    def publish(self, events: list[Stored | GroupStored | Removed | Cleared], tokens_of) -> None:
        """Publish one batch.

        `tokens_of(owner of the request)` returns (ids, adapter's name, adapter's number, cache salt).
        """
        if self.mute:
            return
        payload = self._encode([time.time(), self._told(events, tokens_of), 0])
        self._kept.append((self.sequence, payload))
        frames = [self.topic.encode(), self.sequence.to_bytes(8, "big"), payload]
        self.sequence += 1
        if self.drop:
            self.drop -= 1
        elif self.swap and self._held is None:
            self.swap -= 1
            self._held = frames
        else:
            self._pub.send_multipart(frames)
            if self._held is not None:
                self._pub.send_multipart(self._held)
                self._held = None

    def _told(self, events: list[Stored | GroupStored | Removed | Cleared], tokens_of) -> list:
        batch: list = []
        for event in events:
            if type(event) is GroupStored:
                batch.append(self._in_group(event, *tokens_of(event.request.owner)))
            elif type(event) is not Cleared and event.tier != "gpu":
                batch += self._of_lower_tier(event, tokens_of)
            elif type(event) is Stored:
                batch.append(self._as_map(event, *tokens_of(event.request.owner)))
            elif type(event) is Removed:
                batch += [self._as_map(Removed([key])) for key in event.keys]  # vLLM sends one event for each
            else:
                batch.append(self._as_map(event))
        return batch

    def _of_lower_tier(self, event: Stored | Removed, tokens_of) -> list:
        """Return one event for each chunk that was stored, or one for all that were removed."""
        chunk, keys = self._chunk, event.keys
        if self._lmcache:
            ids = tokens_of(event.request.owner)[0] if type(event) is Stored else None
            return lmcache.told(event, chunk, self.block_size, ids)
        if type(event) is Removed:
            return [self._as_map(event if self._self_describing else event._replace(keys=keys[chunk - 1 :: chunk]))]
        if not self._self_describing:
            return [self._as_map(event._replace(keys=[key], parent=None)) for key in keys[chunk - 1 :: chunk]]
        ids, adapter, adapter_id, _ = tokens_of(event.request.owner)
        parents = [event.parent, *keys]
        return [
            self._as_map(
                event._replace(start=event.start + at, keys=keys[at : at + chunk], parent=parents[at]),
                ids,
                adapter,
                adapter_id,
            )
            for at in range(0, len(keys), chunk)
        ]

    def _as_map(self, event, ids=None, adapter=None, adapter_id=None, salt=None) -> dict:
        if type(event) is Cleared:
            return {"type": "AllBlocksCleared"}
        if type(event) is Removed:
            group, keys = len(self._windows), event.keys
            if type(keys[0]) is GroupKey:
                group, keys = keys[0].group, [keys[0].key]
            return {"type": "BlockRemoved", "block_hashes": keys, "medium": MEDIA[event.tier], "group_idx": group}
        told = {
            "type": "BlockStored",
            "block_hashes": event.keys,
            "parent_block_hash": event.parent,
            "token_ids": self._tokens(event, ids),
            "block_size": self.block_size if ids is not None else 0,
            "lora_id": adapter_id,
            "medium": MEDIA[event.tier],
            "lora_name": adapter,
            "extra_keys": self._extra_keys(event, adapter, salt),
            "group_idx": len(self._windows),
        }
        return told | {"kv_cache_spec_kind": "full_attention"} if ids is not None else told

    def _in_group(self, event: GroupStored, ids, adapter=None, adapter_id=None, salt=None) -> dict:
        """Return an event with the tokens of all filled blocks, and the keys of those that the group keeps."""
        every = Stored(event.request, event.start, event.keys, event.parent)
        tokens = ids[event.start * self.block_size : event.end * self.block_size].tolist()
        told = self._as_map(every, ids, adapter, adapter_id, salt) | {"token_ids": tokens, "group_idx": event.group}
        if window := self._windows[event.group]:
            return told | {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": window}
        return told | {"kv_cache_spec_kind": "mamba"}

    @staticmethod
    def _extra_keys(event: Stored, adapter: str | None, salt: str | None) -> list | None:
        """Return the extra keys; None for slower tiers, where vLLM leaves them out."""
        return extra_keys(adapter, salt, event.start, len(event.keys)) if event.tier == "gpu" else None

    def _tokens(self, event: Stored, ids) -> list[int]:
        if ids is None:
            return []
        return ids[event.start * self.block_size : (event.start + len(event.keys)) * self.block_size].tolist()

    async def serve_replay(self) -> None:
        """Answer replay requests [client, b"", start] until cancelled: a message per kept batch, then one with -1."""
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("replay request not understood: %d frames", len(frames))
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            topic = self.topic.encode()
            for sent, (number, payload) in enumerate(list(self._kept)):
                if number >= start:
                    await self._router.send_multipart([client, b"", topic, number.to_bytes(8, "big"), payload])
                if sent % 100 == 0:
                    await asyncio.sleep(0)
            await self._router.send_multipart([client, b"", b"", END, b""])

    def close(self) -> None:
        self._pub.close()
        self._router.close()
        self._context.term()

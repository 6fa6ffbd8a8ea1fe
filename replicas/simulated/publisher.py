"""The publication of KV events over ZMQ, as vLLM does it: a PUB socket, and a ROUTER that replays 10,000 batches.

A batch is three frames: topic (empty), sequence number (8 bytes, big endian, from 0), msgpack [time, events, rank].
Events are tagged maps, as in vLLM from 0.24 on.

Events about copies in host memory have the forms of vLLM's offloading connector. With its setting `self_describing`, an
event has the keys, the tokens and the parent of a chunk's blocks. Without it, the event has only the key of the chunk's
last block, no tokens and block size 0. LMCache makes a key of its own for each chunk; vLLM publishes LMCache's events
among its own.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import zmq
import zmq.asyncio

from replicas.ports import cannot_listen

from .faults import Faults
from .keys import extra_keys
from .profile import Profile
from .steps import Cleared, GroupKey, GroupStored, Removed, Stored

KEPT = 10_000
END = (-1).to_bytes(8, "big", signed=True)
_ODD = 0x9E3779B97F4A7C15


class Publisher:
    """The publisher of one engine's KV events.

    `host`: where to listen. A port of 0 takes a free one. `self_describing`: events about host memory have tokens.
    Cache groups are numbered in events, full attention last. Raises ValueError if it cannot listen.
    """

    def __init__(self, host: str, port: int, replay_port: int, profile: Profile, self_describing: bool = True):
        self._self_describing, self._windows, self._lmcache = self_describing, profile.windows, profile.lmcache
        self.block_size, self._chunk = profile.block_size, profile.chunk_blocks
        self.sequence = 0
        self.faults = Faults()
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
        ports = {"endpoint": f"tcp://*:{self.port}", "replay_endpoint": f"tcp://*:{self.replay_port}"}
        return {"enable_kv_cache_events": True, "publisher": "zmq", **ports, "buffer_steps": KEPT, "topic": ""}

    def publish(self, events: list[Stored | GroupStored | Removed | Cleared], tokens_of) -> None:
        """Publish one batch.

        `tokens_of(owner)`: returns (ids, adapter's name, adapter's number, cache salt) of the request with this owner.
        """
        payload = self._encode([time.time(), list(self._told(events, tokens_of)), 0])
        self._kept.append((self.sequence, payload))
        frames = [b"", self.sequence.to_bytes(8, "big"), payload]
        self.sequence += 1
        if self.faults.happens("drop_events"):
            return
        if self._held is None and self.faults.happens("reorder_events"):
            self._held = frames
        else:
            self._pub.send_multipart(frames)
            if self._held is not None:
                self._pub.send_multipart(self._held)
                self._held = None

    def _told(self, events: list[Stored | GroupStored | Removed | Cleared], tokens_of) -> Iterator[dict]:
        for event in events:
            if type(event) is Cleared:
                yield {"type": "AllBlocksCleared"}
            elif type(event) is Removed:
                yield from self._removed(event)
            elif type(event) is Stored and event.tier != "gpu":
                yield from self._copied(event, *tokens_of(event.request.owner))
            else:
                yield self._stored(event, *tokens_of(event.request.owner))

    def _removed(self, event: Removed) -> Iterator[dict]:
        keys, group = event.keys, len(self._windows)
        if event.tier == "gpu":  # vLLM sends one event for each
            for key in keys:
                group_of, own = key if type(key) is GroupKey else (group, key)
                yield {"type": "BlockRemoved", "block_hashes": [own], "medium": "GPU", "group_idx": group_of}
        elif self._lmcache:
            last = [_lmcache_key(key) for key in keys[self._chunk - 1 :: self._chunk]]
            yield {"type": "BlockRemoved", "block_hashes": last, "medium": "CPU"}
        else:
            keys = keys if self._self_describing else keys[self._chunk - 1 :: self._chunk]
            yield {"type": "BlockRemoved", "block_hashes": keys, "medium": "CPU", "group_idx": group}

    def _stored(self, event: Stored | GroupStored, ids, adapter, adapter_id, salt) -> dict:
        """Return the event that blocks were filled.

        The event of a further cache group has the tokens of all filled blocks, but only the keys that the group keeps.
        """
        group, kind, end = len(self._windows), "full_attention", event.start + len(event.keys)
        if type(event) is GroupStored:
            group, end = event.group, event.end
            kind = "sliding_window" if self._windows[group] else "mamba"
        extra = extra_keys(adapter, salt, event.start, len(event.keys))
        tokens = self._tokens(ids, event.start, end)
        told = _block_stored(event.keys, event.parent, tokens, self.block_size, "GPU", adapter, adapter_id)
        told |= {"extra_keys": extra, "group_idx": group, "kv_cache_spec_kind": kind}
        return told | {"kv_cache_spec_sliding_window": self._windows[group]} if kind == "sliding_window" else told

    def _copied(self, event: Stored, ids, adapter, adapter_id, salt) -> Iterator[dict]:
        """Yield one event for each chunk that was copied to host memory."""
        parents, size, chunk = [event.parent, *event.keys], self.block_size, self._chunk
        more = {"extra_keys": None, "group_idx": len(self._windows)}
        for at in range(0, len(event.keys), chunk):
            keys, parent = event.keys[at : at + chunk], parents[at]
            tokens = self._tokens(ids, event.start + at, event.start + at + len(keys))
            if self._lmcache:
                parent = None if parent is None else _lmcache_key(parent)
                yield _block_stored([_lmcache_key(keys[-1])], parent, tokens, size * chunk, "CPU")
            elif self._self_describing:
                told = _block_stored(keys, parent, tokens, size, "CPU", adapter, adapter_id)
                yield told | more | {"kv_cache_spec_kind": "full_attention"}
            else:
                yield _block_stored(keys[-1:], None, [], 0, "CPU") | more

    def _tokens(self, ids, start: int, end: int) -> list[int]:
        return ids[start * self.block_size : end * self.block_size].tolist()

    async def serve_replay(self) -> None:
        """Answer replay requests [client, b"", start] until cancelled.

        An answer is a message for each kept batch from number `start` on, then one with the number -1.
        """
        while True:
            client, _, start = await self._router.recv_multipart()
            for sent, (number, payload) in enumerate(list(self._kept)):
                if number >= int.from_bytes(start, "big"):
                    await self._router.send_multipart([client, b"", b"", number.to_bytes(8, "big"), payload])
                if sent % 100 == 0:
                    await asyncio.sleep(0)
            await self._router.send_multipart([client, b"", b"", END, b""])

    def close(self) -> None:
        self._pub.close()
        self._router.close()
        self._context.term()


def _block_stored(keys, parent, tokens: list[int], size: int, medium: str, adapter=None, adapter_id=None) -> dict:
    told = {"type": "BlockStored", "block_hashes": keys, "parent_block_hash": parent, "token_ids": tokens}
    return told | {"block_size": size, "lora_id": adapter_id, "medium": medium, "lora_name": adapter}


def _lmcache_key(key: int) -> int:
    """Return LMCache's key of a chunk: a number made from `key`, the engine's key of the chunk's last block."""
    return (key * _ODD + 1) % (1 << 64)

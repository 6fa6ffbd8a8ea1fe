"""Run by vLLM's interpreter, with LMCache beside it: what an engine publishes of LMCache's chunks, by LMCache's own
classes, as JSON on stdout.

    PYTHONPATH=where/lmcache/is  vllm-0.32.0/bin/python tests/vllm/lmcache_events.py

LMCache itself moves a GPU's memory. What it tells comes from parts that need none:

- "server": the server's log of its host memory (`KVEventModule`), which is told of tokens, writes and evictions as the
  transfer module and the storage manager tell it; the worker that republishes it (`LMCacheMPWorkerAdapter`); the
  connector that makes vLLM's events of that (`LMCacheMPConnector`).
- "worker": the same where the server has no log. The worker tells of what it stored itself.
- "in process": `LMCacheConnectorV1`, with what `LMCacheEngine.store` tells.

Three prompts of two chunks, of which host memory has room for two, and then the first one again, longer by a chunk;
the engine itself keeps none of them: {form: [payload in hex, ...]}, three payloads for each: what the engine computed,
what LMCache tells of it, and what the engine dropped.
"""

import json
import logging
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import msgspec
import torch
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventBus
from lmcache.v1.multiprocess.modules.kv_events import KVEventModule
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.token_database import ChunkedTokenDatabase
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash, maybe_convert_block_hash

SIZE, CHUNK, ROOM = 16, 256, 4
STORY = [(0, 2), (1, 2), (2, 2), (0, 3)]  # prompts, and how many chunks of each are asked for


def ids(text: int, chunks: int) -> list[int]:
    return [text * 1000 + n for n in range(CHUNK * chunks)]


def on_the_gpu(tokens: list[int]) -> tuple[list, list]:
    """As vLLM's block pool tells of its own blocks, when they come and when they go."""
    hashes: list = []
    for start in range(0, len(tokens), SIZE):
        hashes.append(
            hash_block_tokens(sha256, hashes[-1] if hashes else None, tuple(tokens[start : start + SIZE]), None)
        )
    keys = [maybe_convert_block_hash(block) for block in hashes]
    stored = BlockStored(
        block_hashes=keys, parent_block_hash=None, token_ids=tokens, block_size=SIZE, lora_id=None,
        medium="GPU", lora_name=None, extra_keys=[None] * len(keys), group_idx=0, kv_cache_spec_kind="full_attention",
    )  # fmt: skip
    return [stored], [BlockRemoved(block_hashes=[key], medium="GPU", group_idx=0) for key in reversed(keys)]


class Server:
    """Its host memory, as far as it is told of: room for ROOM chunks, and a prompt's last chunk goes first."""

    def __init__(self):
        self.hasher, self.bus, self.held = TokenHasher(CHUNK), EventBus(), []
        self.log = KVEventModule(SimpleNamespace(event_bus=self.bus))
        self.cursor = 0

    def store(self, number: int, tokens: list[int]) -> None:
        hashes = [TokenHasher.hash_to_bytes(one) for one in self.hasher.compute_chunk_hashes(tokens)]
        keys = [ObjectKey(one, "m", 0) for one in hashes]
        new = [at for at, key in enumerate(keys) if key not in self.held]
        oldest = [key for key in self.held if key not in keys][: max(0, len(self.held) + len(new) - ROOM)]
        self.held = [key for key in self.held if key not in oldest]
        if oldest:
            self.tell(EventType.L1_KEYS_EVICTED, oldest)
        session = SimpleNamespace(
            get_hashes=lambda start, end: [self.hasher.compute_chunk_hashes(tokens)[start // CHUNK]]
        )
        context = SimpleNamespace(
            chunk_size=CHUNK, event_bus=self.bus, session_manager=SimpleNamespace(get=lambda request: session)
        )
        if new:
            key = SimpleNamespace(token_ids=tokens, start=new[0] * CHUNK, end=len(tokens), request_id=str(number))
            LMCacheDrivenTransferModule._publish_token_bindings(SimpleNamespace(_ctx=context), key, keys[new[0] :])
            self.tell(EventType.L1_WRITE_FINISHED, keys[new[0] :])
        self.held += [keys[at] for at in reversed(new)]

    def tell(self, kind: EventType, keys: list[ObjectKey]) -> None:
        self.bus.publish(Event(event_type=kind, session_id="", metadata={"keys": keys}))

    def news(self):
        batch = self.log.read_kv_events("m", self.cursor, 1024)
        self.cursor = batch.next_cursor
        return batch


def worker(from_server: bool) -> LMCacheMPWorkerAdapter:
    one = object.__new__(LMCacheMPWorkerAdapter)
    one.__dict__ |= {
        "_kv_event_lock": threading.RLock(), "_kv_events": [], "_kv_events_enabled": True, "model_name": "m",
        "_kv_event_subscriber": False, "_kv_event_receiver": None, "_announced_kv_hashes": set(),
        "_kv_event_incarnation": None, "_kv_event_server_source": from_server, "_kv_event_batches": MagicMock(),
        "_kv_events_generated": MagicMock(), "_kv_events_buffered": MagicMock(), "_kv_events_drained": MagicMock(),
        "_kv_event_resyncs": MagicMock(), "lmcache_tokens_per_chunk": CHUNK, "_kv_event_hasher": TokenHasher(CHUNK),
        "_pending_store_kv_events": {}, "_heartbeat": MagicMock(),
    }  # fmt: skip
    return one


def published(connector) -> list:
    """What the scheduler's side of the connector hands to vLLM's publisher."""
    events = connector.get_kv_connector_kv_cache_events()
    connector.update_connector_output(
        SimpleNamespace(kv_cache_events=events, kv_connector_stats=None, finished_sending=None, finished_recving=None)
    )
    return list(connector.take_events())


def connector_of(adapter) -> LMCacheMPConnector:
    """As far as it publishes: what it has besides needs an engine."""
    connector = object.__new__(LMCacheMPConnector)
    connector.__dict__ |= {
        "_enable_kv_events": True,
        "worker_adapter": adapter,
        "_kv_cache_events": [],
        "lazy_offload": False,
    }
    return connector


def from_server() -> list:
    server, adapter = Server(), worker(True)
    connector = connector_of(adapter)
    server.bus.start()
    try:
        for number, (text, chunks) in enumerate(STORY):
            server.store(number, ids(text, chunks))
            while server.bus.queue_depth():
                threading.Event().wait(0.01)
            threading.Event().wait(0.2)
            adapter._apply_kv_event_batch(server.news())
            yield published(connector)
    finally:
        server.bus.stop()


def from_worker() -> list:
    """Nobody tells it what has been evicted: the first prompt is stored as a whole once more."""
    adapter = worker(False)
    connector = connector_of(adapter)
    for number, (text, chunks) in enumerate(STORY):
        key = SimpleNamespace(token_ids=ids(text, chunks), start=0, end=CHUNK * chunks)
        adapter._pending_store_kv_events[str(number)] = adapter._build_store_kv_events(key)
        adapter._publish_store_kv_events(str(number))
        yield published(connector)


def in_process() -> list:
    """`LMCacheEngine.store`, with all that would move memory left out. What is found is left out of a store."""
    config = SimpleNamespace(
        pre_caching_hash_algorithm="builtin", chunk_size=CHUNK, save_unfull_chunk=False, remote_url=None,
        enable_pd=False, get_extra_config_value=lambda name, default: default,
    )  # fmt: skip
    metadata = SimpleNamespace(
        model_name="m", world_size=1, worker_id=0, kv_dtype=torch.bfloat16, use_mla=False,
        get_shapes=lambda tokens: [], get_dtypes=list,
    )  # fmt: skip
    engine = MagicMock()
    engine.config, engine.metadata, engine.kv_events_enabled, engine.kv_events = config, metadata, True, []
    engine.token_database = ChunkedTokenDatabase(config, metadata)
    engine._is_passive.return_value = engine.is_frozen.return_value = False
    engine.storage_manager.allocate.return_value.get_size.return_value = 1
    engine.stats_monitor.on_store_request.return_value.time_to_store.return_value = 1.0
    connector = object.__new__(LMCacheConnectorV1)
    connector._lmcache_engine = SimpleNamespace(get_kv_events=lambda: LMCacheEngine.get_kv_events(engine))
    connector._kv_cache_events = None
    for text, chunks in STORY:
        mask = torch.ones(CHUNK * chunks, dtype=torch.bool)
        mask[: 2 * CHUNK if chunks == 3 else 0] = False
        LMCacheEngine.store(engine, ids(text, chunks), mask=mask)
        yield published(connector)


def payloads(told) -> list[str]:
    encode, every = msgspec.msgpack.Encoder().encode, []
    for (text, chunks), events in zip(STORY, told, strict=True):
        came, went = on_the_gpu(ids(text, chunks))
        for part in (came, events, went):
            every.append(encode(KVEventBatch(ts=1.5, events=part, data_parallel_rank=0)).hex())
    return every


logging.disable(logging.CRITICAL)
init_none_hash(sha256)
forms = {"server": from_server(), "worker": from_worker(), "in process": in_process()}
print(json.dumps({form: payloads(told) for form, told in forms.items()}))

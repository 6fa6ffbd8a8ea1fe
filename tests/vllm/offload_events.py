"""Run by vLLM's interpreter: what its offloading connector publishes, by its own classes, as JSON on stdout.

The connector itself needs a GPU: on a CPU vLLM refuses it (`CPUOffloadingSpec.get_worker`). What it tells comes from
two of its parts that need none: the manager, which says what is stored and evicted, and the tracker, which makes events
of that.
A tier with room for two prompts of two, three prompts: {form: [payload in hex, ...]}.

What it finds comes from a third one, its scheduler's lookup, at the end of each form: {"found, chunks of N": [[prompt,
blocks of it, tokens, tokens on the GPU, tokens found behind those], ...]}; a prompt that has less than all blocks of
one of the three goes on with tokens of its own.
"""

import json
from types import SimpleNamespace

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import events as offloading
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

try:
    from vllm.utils.hashing import sha256
except ImportError:
    from vllm.utils import sha256

SIZE, BLOCKS = 16, 4


def request(text: int, blocks: int = BLOCKS, tokens: int = SIZE * BLOCKS) -> SimpleNamespace:
    """`blocks` of a prompt, and up to `tokens` others."""
    ids = [text * 1000 + n + (500 if n >= blocks * SIZE else 0) for n in range(tokens)]
    hashes = []
    for start in range(0, len(ids) - SIZE + 1, SIZE):
        parent = hashes[-1] if hashes else None
        hashes.append(hash_block_tokens(sha256, parent, ids[start : start + SIZE], None))
    known = {"all_token_ids": ids, "block_hashes": hashes, "num_tokens": len(ids)}
    return SimpleNamespace(**known, lora_request=None, request_id=str(text))


def on_the_gpu(one: SimpleNamespace) -> list:
    """As vLLM's block pool tells of its own blocks, when they come and when they go."""
    keys = [maybe_convert_block_hash(block) for block in one.block_hashes]
    stored = BlockStored(
        block_hashes=keys, parent_block_hash=None, token_ids=one.all_token_ids, block_size=SIZE, lora_id=None,
        medium="GPU", lora_name=None, extra_keys=[None] * BLOCKS, group_idx=0, kv_cache_spec_kind="full_attention",
    )  # fmt: skip
    return [stored], [BlockRemoved(block_hashes=[key], medium="GPU", group_idx=0) for key in reversed(keys)]


def play(describing: bool, chunk: int) -> tuple[list[str], list[list[int]]]:
    group = SimpleNamespace(
        group_idx=0, tokens_per_block=SIZE, tokens_per_chunk=SIZE * chunk, hashes_per_chunk=chunk,
        kv_event_group_spec=offloading.OffloadingEventGroupSpec("full_attention", None), sliding_window_size_in_chunks=None,
        is_eagle_group=False,
    )  # fmt: skip
    tracker = offloading.OffloadingEventsTracker(OffloadingKVEventsConfig(True, describing))
    manager = CPUOffloadingManager(2 * BLOCKS // chunk, "lru", enable_events=True)
    payloads = []
    for text in range(3):
        one, context = request(text), ReqContext(req_id=str(text))
        came, went = on_the_gpu(one)
        keys = [make_offload_key(one.block_hashes[end - 1], 0) for end in range(chunk, BLOCKS + 1, chunk)]
        for number, key in enumerate(keys):
            tracker.record_store(one, group, number, key)
        manager.on_new_request(context)
        manager.prepare_store(keys, context)
        manager.complete_store(keys, context)
        manager.on_request_finished(context)
        for events in (came, list(tracker.take_events(manager.take_events())), went):
            payloads.append(msgspec.msgpack.encode(KVEventBatch(ts=1.5, events=events, data_parallel_rank=0)).hex())
    return payloads, found(group, manager, tracker)


def found(group: SimpleNamespace, manager: CPUOffloadingManager, tracker) -> list[list[int]]:
    scheduler = object.__new__(OffloadingConnectorScheduler)
    scheduler.__dict__ |= {
        "config": SimpleNamespace(kv_group_configs=(group,), supports_partial_tail=False), "manager": manager,
        "_sliding_window_groups": (), "_full_attention_groups": (0,), "_lookup_groups": (0,),
        "_mamba_align_size": None, "_chunks_being_loaded": set(), "_events_tracker": tracker,
    }  # fmt: skip
    rows = []
    for text in range(3):
        for blocks in range(BLOCKS + 1):
            for tokens in range(SIZE // 2, SIZE * (BLOCKS + 1), SIZE // 2):
                one = request(text, blocks, tokens)
                lasts = one.block_hashes[group.hashes_per_chunk - 1 :: group.hashes_per_chunk]
                keys = [make_offload_key(last, 0) for last in lasts]
                for local in range(0, tokens, SIZE):  # as vLLM finds no more there than leaves a token to compute
                    status = SimpleNamespace(
                        req=one, req_context=ReqContext(req_id="found"), num_locally_computed_tokens=local,
                        group_states=[SimpleNamespace(offload_keys=keys)], max_load_tokens=None,
                    )  # fmt: skip
                    rows.append([text, blocks, tokens, local, scheduler._lookup(status)])
    return rows


init_none_hash(sha256)
print(json.dumps({
    "self-describing": play(True, 1)[0], "self-describing, chunks of 2": (of_2 := play(True, 2))[0],
    "self-describing, chunks of 4": (of_4 := play(True, 4))[0],
    "by key": (of_1 := play(False, 1))[0], "by key, chunks of 2": play(False, 2)[0],
    "found, chunks of 1": of_1[1], "found, chunks of 2": of_2[1], "found, chunks of 4": of_4[1],
}))  # fmt: skip

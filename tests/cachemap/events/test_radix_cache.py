"""Against SGLang's own radix tree: its events, and what it finds of prompts after each batch of them.

`radix_cache.json.gz` was recorded with the `RadixCache` and the event types of SGLang 0.5.23, on a CPU: prompts that
share beginnings were inserted, pages were evicted between them, and prompts looked up.
"""

import base64
import gzip
import json
from array import array
from pathlib import Path

import pytest

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.events import records
from cachemap.events.apply import EventApplier
from replicas.engines.sglang import SGLANG

BLOCK = 16
SEED = chain_seed("m", BLOCK)
RECORDED = json.loads(gzip.decompress(Path(__file__).with_name("radix_cache.json.gz").read_bytes()))
decode = SGLANG.event_decoder(records)


@pytest.mark.parametrize(("page", "eagle"), [(1, False), (4, False), (1, True)])
def test_what_it_finds_is_what_is_predicted(page, eagle):
    """With EAGLE its keys are of pairs of tokens: a page is found only if the token behind it is the same."""
    (steps,) = [one["steps"] for one in RECORDED if (one["page"], one["eagle"]) == (page, eagle)]
    table = CacheMap(1 << 20)
    slot = table.attach("r", None, True)
    applier, found = EventApplier(table, slot, "m", BLOCK), []
    for step in steps:
        batch = decode(base64.b64decode(step["payload"]))
        assert not batch.passed_over
        applier.apply(batch.events)
        applier.flush()
        for prompt, matched in step["prompts"]:
            data = array("I", prompt).tobytes()
            hashes = hash_blocks(data, BLOCK, SEED)
            whole = table.match(hashes, 0.0).confirmed[slot]
            assert applier.reach(whole, hashes, SEED, memoryview(data)) == matched
            found.append(matched)
    assert applier.orphans == 0 and applier.fault is None
    assert applier.blocks_removed > 50 and sum(one > BLOCK for one in found) > 20 and any(one % BLOCK for one in found)

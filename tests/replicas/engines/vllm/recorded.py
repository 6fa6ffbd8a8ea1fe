"""A map of cached blocks after KV events that tests/vllm recorded of the real connectors' own classes."""

import json
from array import array
from pathlib import Path

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.events import records
from cachemap.events.apply import EventApplier
from replicas.engines.vllm.events import Decoder

SIZE = 16  # tokens of a block


def recorded(name: str) -> dict:
    return json.loads((Path(__file__).parent / name).read_text())


def hashes_of(ids) -> list[int]:
    return hash_blocks(array("I", ids).tobytes(), SIZE, chain_seed("m", SIZE))


class Told:
    """Of each prompt three events are recorded: it came, it was copied, it went. `found` has the answers of `look()`
    after each prompt."""

    def __init__(self, payloads, look):
        self.map, self.found, self.passed_over = CacheMap(1 << 22), [], []
        self.applier = EventApplier(self.map, self.map.attach("r", None, True), "m", SIZE)
        decode = Decoder(records).decode
        for number, payload in enumerate(payloads):
            batch = decode(bytes.fromhex(payload))
            self.passed_over += batch.passed_over
            self.applier.apply(batch.events)
            self.applier.flush()
            if number % 3 == 2:
                self.found.append(look(self, number // 3))
        assert self.applier.fault is None

    def lower(self, text: int, tokens: int):
        """What is held of a prompt in slower tiers, with nothing of it on the GPU: (tier, blocks) of each part."""
        match = self.map.match(hashes_of(text * 1000 + n for n in range(tokens)), 0.0)
        assert match.held == [0], "no longer on the GPU"
        return match.lower.get(0, [])

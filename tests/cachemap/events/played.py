"""A simulated engine and a map that gets its events as they go over the wire, for tests that compare the two."""

import random
from array import array

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.events.apply import EventApplier
from replicas.simulated.engine import Engine, EngineRequest, Removed
from replicas.simulated.keys import chain, root
from replicas.simulated.publisher import Publisher

from ..publisher import decode

SIZE = 16  # tokens in a block


class Played:
    """An engine and a map.

    `removed`: how many blocks the engine dropped. `cached`: by request, the cached tokens that its answer reports.
    """

    def __init__(self, profile, self_describing: bool = True, **options):
        self.engine = Engine(profile, **options)
        self.publisher = Publisher("127.0.0.1", 0, 0, profile, self_describing)
        self.map = CacheMap(1 << 22)
        self.applier = EventApplier(self.map, self.map.attach("r", None, True), "m", SIZE)
        self.removed = self.number = 0
        self.cached: dict[int, int] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.publisher.close()

    def ask(self, ids: array, prompt: int | None = None, more: int = 3) -> int:
        """Send a request, and return its number.

        Its prompt is the first `prompt` of these tokens, and the rest is the answer. Without `prompt` all of them are
        the prompt, and the answer has `more` tokens.
        """
        keys = chain(ids, SIZE, root(1))
        self.number += 1
        written = {} if prompt is None else {"output_blocks": keys.__getitem__}
        prompt, more = (len(ids), more) if prompt is None else (prompt, len(ids) - prompt)
        owner = (ids, None, None, None)
        self.engine.add(EngineRequest(self.number, keys[: prompt // SIZE], prompt, more, owner=owner, **written))
        return self.number

    def finish(self, *asked, **how) -> int:
        """Send a request and take all steps until it is answered; return its number."""
        number = self.ask(*asked, **how)
        while self.step():
            pass
        return number

    def step(self):
        step = self.engine.step()
        if step is None:
            return None
        self.cached |= {output.id: output.cached_tokens for output in step.outputs}
        if step.events:
            self.publisher.publish(step.events, lambda owner: owner)
            batch = decode(self.publisher._kept[-1][1])
            assert not batch.passed_over
            self.applier.apply(batch.events)
            self.applier.flush()
            assert self.applier.fault is None
        self.removed += sum(len(event.keys) for event in step.events if type(event) is Removed)
        return step

    def match(self, ids: array):
        """Return what the map finds of a prompt with these tokens."""
        return self.map.match(named(ids), 0.0, (len(ids) - 1) // SIZE)

    def predicted(self, ids: array) -> int:
        """Return how many tokens of such a prompt a gateway would take to be cached on the GPU."""
        return self.match(ids).held[0] * SIZE

    def found(self, ids: array) -> int:
        """Return how many tokens of such a prompt the engine would find on the GPU."""
        return self.engine.cached(chain(ids, SIZE, root(1)), len(ids)) * SIZE

    def differ(self, ids) -> tuple[int, int]:
        """Return how many blocks of a prompt the map has beyond those that the engine would find.

        The first number is of its own cache, the second of that and what follows in slower tiers.
        """
        blocks, keys, match = (len(ids) - 1) // SIZE, chain(ids, SIZE, root(1)), self.match(ids)
        held = min(match.held[0], blocks)
        behind = min(sum(count for _, count in match.lower.get(0, ())), blocks - held)
        own = self.engine.cached(keys, len(ids))
        return held - own, held + behind - min(self.engine._offload.find(keys, own, len(keys)).end, blocks)


def named(ids: array) -> list[int]:
    """Return the hashes of a prompt's blocks."""
    return hash_blocks(ids.tobytes(), SIZE, chain_seed("m", SIZE))


def text(seed: int, length: int) -> array:
    return array("I", random.Random(seed).choices(range(500), k=length))

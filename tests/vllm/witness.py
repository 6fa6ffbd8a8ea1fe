"""Reads an engine's events beside the gateway, and says what the engine held at each moment.

Nothing of `cachemap` is used: chains are interned tuples, copies are counted, events are kept in the order and with
the time that the engine gave them. Of an engine with several cache groups chains are those of full attention; a block
of another group is a name of its own.
"""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import zmq

END = b"\xff" * 8
FULL = "full_attention"


@dataclass
class Step:
    """One event: when it was sent (the engine's clock, the same machine), and what it changed."""

    at: float
    stored: list[int] = field(default_factory=list)  # chains, named by `Chains`
    removed: list[int] = field(default_factory=list)
    cleared: bool = False

    def apply(self, held: Counter[int]) -> None:
        if self.cleared:
            held.clear()
        held.update(self.stored)
        held.subtract(self.removed)


class Chains:
    """A small number for each chain of blocks: equal numbers, equal tokens, adapter and salt from the start on."""

    def __init__(self) -> None:
        self.names: dict[tuple, int] = {}

    def name(self, *what: object) -> int:
        return self.names.setdefault(what, len(self.names) + 1)

    def of(self, ids: list[int], size: int, adapter: str | None, salt: str | None) -> list[int]:
        """The chain that ends with each full block of a prompt."""
        parent, chains = self.name("start", adapter, salt), []
        for start in range(0, len(ids) - size + 1, size):
            parent = self.name(parent, tuple(ids[start : start + size]))
            chains.append(parent)
        return chains


class Witness:
    """Follows one engine from its first event on, in a thread, until closed."""

    def __init__(self, engine, chains: Chains):
        self.url, self.id, self.block_size, self.chains = engine.url, engine.id, engine.block_size, chains
        self.steps: list[Step] = []
        self.batches = 0  # that came
        self.events: list[dict] = []
        self._of_key: dict[int | bytes, int] = {}
        self._groups: set[int] = set()  # those of another kind than full attention
        self._live = zmq.Context.instance().socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, 0)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._live.connect(engine.events)
        self._closing = False
        self._ask(engine.replay)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _ask(self, endpoint: str) -> None:
        """All the engine has recorded until now. Its socket drops what is 1,000 messages ahead of the network: the rest
        is asked for."""
        while not self._answered(endpoint, self.batches):
            pass

    def _answered(self, endpoint: str, start: int) -> bool:
        """Whether that was all from `start` on."""
        with zmq.Context.instance().socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.setsockopt(zmq.RCVHWM, 0)
            asking.setsockopt(zmq.RCVTIMEO, 10_000)
            asking.connect(endpoint)
            asking.send_multipart([b"", start.to_bytes(8, "big")])
            while (frames := asking.recv_multipart())[-2] != END:
                if int.from_bytes(frames[-2], "big") > self.batches:
                    assert self.batches > start, f"the engine no longer has batch {start}"
                    return False
                self._batch(frames)
        return True

    def _follow(self) -> None:
        while not self._closing:
            if self._live.poll(50):
                self._batch(self._live.recv_multipart())
        self._live.close(0)

    def _batch(self, frames: list[bytes]) -> None:
        number = int.from_bytes(frames[-2], "big")
        if number < self.batches:
            return  # had from the record already
        assert number == self.batches, f"batch {number} follows {self.batches - 1}"
        at, events, *_ = msgspec.msgpack.decode(frames[-1])
        self._groups |= {event["group_idx"] for event in events if event.get("kv_cache_spec_kind", FULL) != FULL}
        # Groups tell of the same blocks one after the other, and full attention alone tells what is in them.
        self.events += events
        self.steps += [self._step(at, event) for event in events if not self._further(event)]
        self.steps += [self._in_group(at, event) for event in events if self._further(event)]
        self.batches += 1

    def _further(self, event: dict) -> bool:
        return event.get("group_idx") in self._groups

    def _in_group(self, at: float, event: dict) -> Step:
        blocks = [self.chains.name("group", event["group_idx"], self._of_key[key]) for key in event["block_hashes"]]
        return Step(at, stored=blocks) if event["type"] == "BlockStored" else Step(at, removed=blocks)

    def _step(self, at: float, event: dict) -> Step:
        if event["type"] == "AllBlocksCleared":
            return Step(at, cleared=True)
        if event["type"] == "BlockRemoved":
            return Step(at, removed=[self._of_key[key] for key in event["block_hashes"]])
        size, tokens, adapter = event["block_size"], event["token_ids"], event["lora_name"]
        parent = event["parent_block_hash"]
        if parent is None:
            first = ((event["extra_keys"] or [None])[0] or [])[1 if adapter else 0 :]
            chain = self.chains.name("start", adapter, first[0] if first else None)
        else:
            chain = self._of_key[parent]
        stored = []
        for i, key in enumerate(event["block_hashes"]):
            chain = self._of_key[key] = self.chains.name(chain, tuple(tokens[i * size : (i + 1) * size]))
            stored.append(chain)
        return Step(at, stored=stored)

    def reaches(self, chains: list[int], since: float, until: float) -> set[int]:
        """How many leading blocks of a prompt were held: the answers true at some moment of that time."""
        held: Counter[int] = Counter()
        seen: set[int] = set()
        for step in self.steps:
            if step.at > until:
                break
            if step.at >= since:
                seen.add(_reach(held, chains))
            step.apply(held)
        return seen | {_reach(held, chains)}

    @property
    def held(self) -> int:
        """How many different blocks the engine has now."""
        held: Counter[int] = Counter()
        for step in list(self.steps):
            step.apply(held)
        return sum(count > 0 for count in held.values())

    def settled(self, seconds: float = 0.3) -> None:
        """Wait until no event has come for a while."""
        count, since = -1, time.monotonic()
        while time.monotonic() - since < seconds:
            if count != self.batches:
                count, since = self.batches, time.monotonic()
            time.sleep(0.01)

    def close(self) -> None:
        self._closing = True
        self._thread.join()


def _reach(held: Counter[int], chains: list[int]) -> int:
    for count, chain in enumerate(chains):
        if held[chain] <= 0:
            return count
    return len(chains)

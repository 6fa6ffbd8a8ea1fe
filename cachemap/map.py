"""CacheMap: for every replica, how much of a prompt it holds."""


class Match:
    """What each replica holds of one prompt; lists are indexed by slot, in blocks."""

    __slots__ = ("confirmed", "held", "lower")

    def __init__(self, held, confirmed, lower):
        self.held = held
        self.confirmed = confirmed
        self.lower = lower


class CacheMap:
    """Thin first form on dicts, same signatures as the compact one to come."""

    def __init__(self, budget_bytes: int, predicted_seconds: float = 5.0):
        self.predicted_seconds = predicted_seconds
        self._slots: list[dict | None] = []

    def attach(self, name: str, capacity_blocks: int | None, observed: bool) -> int:
        entry = {"name": name, "capacity": capacity_blocks or 8192, "observed": observed,
                 "keys": {}, "blocks": set(), "recent": {}}
        for slot, old in enumerate(self._slots):
            if old is None:
                self._slots[slot] = entry
                return slot
        self._slots.append(entry)
        return len(self._slots) - 1

    def detach(self, slot: int) -> None:
        self._slots[slot] = None

    def match(self, hashes: list[int], now: float) -> Match:
        held, confirmed = [], []
        for entry in self._slots:
            c = h = 0
            if entry is not None:
                blocks, recent = entry["blocks"], entry["recent"]
                while c < len(hashes) and hashes[c] in blocks:
                    c += 1
                h = c
                while h < len(hashes) and (
                    hashes[h] in blocks or recent.get(hashes[h], now) > now
                ):
                    h += 1
            held.append(h)
            confirmed.append(c)
        return Match(held, confirmed, {})

    def expect(self, slot: int, hashes: list[int], now: float) -> None:
        entry = self._slots[slot]
        recent = entry["recent"]
        if entry["observed"]:
            recent.update(dict.fromkeys(hashes, now + self.predicted_seconds))
            return
        for h in reversed(hashes):
            recent.pop(h, None)
            recent[h] = float("inf")
        while len(recent) > entry["capacity"]:
            del recent[next(iter(recent))]

    def store(self, slot: int, hashes: list[int], engine_keys: list, tier: str = "gpu") -> None:
        if tier == "gpu":
            entry = self._slots[slot]
            entry["keys"].update(zip(engine_keys, hashes))
            entry["blocks"].update(hashes)

    def remove(self, slot: int, engine_keys: list, tier: str = "gpu") -> None:
        if tier != "gpu":
            return
        entry = self._slots[slot]
        for key in engine_keys:
            h = entry["keys"].pop(key, None)
            entry["blocks"].discard(h)
            entry["recent"].pop(h, None)

    def clear(self, slot: int) -> None:
        entry = self._slots[slot]
        for name in ("keys", "blocks", "recent"):
            entry[name].clear()

    def observed(self, slot: int, observed: bool) -> None:
        if self._slots[slot]["observed"] != observed:
            self.clear(slot)
            self._slots[slot]["observed"] = observed

    def learn(self, slot: int, hashes: list[int], predicted_blocks: int,
              reported_blocks: int) -> None:
        if not self._slots[slot]["observed"] and reported_blocks < predicted_blocks:
            self._slots[slot]["capacity"] = max(1, int(self._slots[slot]["capacity"] * 0.98))

    def stats(self) -> dict:
        blocks = set().union(*(e["blocks"] for e in self._slots if e))
        return {"blocks": len(blocks), "bytes": 150 * len(blocks), "bytes_per_block": 150.0,
                "evicted": 0,
                "slots": {i: len(e["blocks"]) for i, e in enumerate(self._slots) if e}}

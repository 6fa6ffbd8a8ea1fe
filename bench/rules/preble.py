"""`preble_e2`: exploit a long cached prefix, else explore by the work of the last minutes.

Formula: if the longest overlap is more than half of the prompt, exploit: of the replicas that have it, the one with the
least work. Else explore: argmin of its work + the prefill of what it would have to compute. Work is what was sent there
in the last 3 minutes, in seconds: the prefill of what was not cached, and decoding. Ties at random. Where the mean TTFT
of a prefix on its holder is at least twice as long in the second half of the window as in the first, its next request
explores and so makes a second holder. Source: Srivatsa et al., "Preble: efficient distributed prompt scheduling for LLM
serving" (arXiv 2407.00023), section 3.2, and its code (WukLab/preble, global_scheduler_with_time.py) for the window and
the defaults.

Approximated: overlaps come from KV events (there: the engines tell of evictions); seconds come from the learned costs,
a stream's decoding as its own share of a step x `max_tokens` (45 if not given, as there); a prefix is a first block; a
TTFT ends at the latest request seen, since rules hear of no clock. Left out, as off in the code: the cost of what is
evicted, and moving prefixes from the busiest replica to the least busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from policies import Candidate, Choice, Demand

from .least import Least

_WINDOW = 180.0
_WORSE = 2.0
_OUTPUT = 45


class _Halves:
    """Means over the older and the newer half of a window."""

    def __init__(self) -> None:
        self._old: deque[tuple[float, float]] = deque()
        self._new: deque[tuple[float, float]] = deque()
        self._sums = [0.0, 0.0]

    def add(self, when: float, value: float) -> None:
        self._new.append((when, value))
        self._sums[1] += value

    def slide(self, now: float) -> int:
        """How many are left in the window that ends now."""
        while self._new and self._new[0][0] < now - _WINDOW / 2:
            self._old.append(self._new.popleft())
            self._sums[0] += self._old[-1][1]
            self._sums[1] -= self._old[-1][1]
        while self._old and self._old[0][0] < now - _WINDOW:
            self._sums[0] -= self._old.popleft()[1]
        return len(self._old) + len(self._new)

    def worse(self, now: float) -> bool:
        self.slide(now)
        if not self._old or not self._new:
            return False
        return self._sums[1] / len(self._new) >= _WORSE * self._sums[0] / len(self._old)


class PrebleE2:
    name = "preble_e2"
    source = "Preble, arXiv 2407.00023, section 3.2 (E2); WukLab/preble, global_scheduler_with_time.py"

    def __init__(self, seed: int = 0) -> None:
        self._least, self._now = Least(seed), 0.0
        self._sent: deque[tuple[float, str, float]] = deque()
        self._work: dict[str, float] = {}
        self._ttfts: dict[tuple[int, str], _Halves] = {}
        self._heard: deque[tuple[float, tuple[int, str]]] = deque()

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        self._pass(asked.now)
        work = [self._work.get(candidate.replica, 0.0) for candidate in candidates]
        longest = max(candidate.overlap for candidate in candidates)
        why = f"nobody holds more than {longest} of {asked.tokens} tokens"
        if longest > asked.tokens - longest:
            holders = [index for index, candidate in enumerate(candidates) if candidate.overlap == longest]
            home = holders[self._least([work[index] for index in holders])]
            key = asked.root, candidates[home].replica
            if key not in self._ttfts or not self._ttfts[key].worse(asked.now):
                return Choice(home, f"exploits {longest} tokens")
            del self._ttfts[key]
            why = f"its prefix has become {_WORSE:g} times as slow on its holder"
        costs = [
            spent + candidate.costs.prefill_seconds(asked.tokens - candidate.overlap, candidate.overlap)
            for spent, candidate in zip(work, candidates)
        ]
        return Choice(self._least(costs), f"explores, {why}")

    def placed(self, asked: Demand, candidates: Sequence[Candidate], choice: Choice) -> None:
        candidate = candidates[choice.index]
        costs, output = candidate.costs, asked.max_tokens or _OUTPUT
        _, per_stream, per_token = costs.group.step.coefficients
        seconds = costs.prefill_seconds(asked.tokens - candidate.overlap, candidate.overlap)
        seconds += output * costs.step.value * (per_stream + per_token * asked.tokens)
        self._sent.append((asked.now, candidate.replica, seconds))
        self._work[candidate.replica] = self._work.get(candidate.replica, 0.0) + seconds

    def first(self, replica: str, asked: Demand) -> None:
        key = asked.root, replica
        self._ttfts.setdefault(key, _Halves()).add(self._now, self._now - asked.now)
        self._heard.append((self._now, key))

    def gone(self, replica: str) -> None:
        self._work.pop(replica, None)
        self._sent = deque(entry for entry in self._sent if entry[1] != replica)
        self._ttfts = {key: halves for key, halves in self._ttfts.items() if key[1] != replica}

    def _pass(self, now: float) -> None:
        """Forget what has left the window."""
        self._now = max(self._now, now)
        while self._sent and self._sent[0][0] < now - _WINDOW:
            _, replica, seconds = self._sent.popleft()
            self._work[replica] = max(0.0, self._work[replica] - seconds)
        while self._heard and self._heard[0][0] < now - _WINDOW:
            _, key = self._heard.popleft()
            if key in self._ttfts and not self._ttfts[key].slide(now):
                del self._ttfts[key]

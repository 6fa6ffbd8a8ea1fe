"""What moving a prompt's KV cache between two replicas takes: `LATENCY + bytes / BANDWIDTH` seconds by a prior, times a
factor that is learned of each pair of replicas, and of all pairs for those that have not met.

A price decides whether there is another transfer to learn from, so one that was too high once would stay so. Therefore
what was learned is forgotten while nothing more is: a pair's factor goes to that of all, and that to the prior, by half
in a minute. Once the price is low enough a request tries it, and until it is known how that went, others are told the
price as it was. Where the trial shows that it was right, forgetting takes twice as long from then on. The first
transfer of a pair teaches nothing: two engines that meet shake hands, which NIXL takes up to seconds for.

The bytes are those of the model that the replicas serve (`kv_space`), since a 70B's cache is five times a latent one's:
a factor says how a network differs from the prior, whatever model it was learned of. A pair whose transfer failed is
left out for a while, twice as long each time in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log

# The prior: a network of 100 Gbit/s moves 12.5 GB a second; the second leg's way and the engines' handshake take 10 ms.
LATENCY, BANDWIDTH = 0.010, 12.5e9
# Of a model whose shape is not known: 8 billion parameters have 32 layers x 8 heads x 128 x 2 x 2 bytes a token.
TOKEN_BYTES = 131_072
_BOUND = log(1000.0)  # the factor stays within this and its inverse
_GAIN = 0.1  # of one observation, once there are some
_HALF_LIFE, _LONGEST_HALF_LIFE = 60.0, 3600.0  # seconds in which half of what was learned is forgotten
_PAUSE, _LONGEST_PAUSE = 10.0, 320.0  # seconds without a pair whose transfer failed

Bytes = Callable[[int], int]  # of so many leading tokens of a prompt


@dataclass(slots=True)
class _Factor:
    """How many times longer transfers take than the prior says, as a logarithm. `base`: what is taken instead where
    nothing was learned."""

    value: float = 0.0
    count: float = 0.0  # of observations, as far as they are not forgotten
    half_life: float = _HALF_LIFE
    at: float = 0.0  # the last of them
    tried: float = 0.0  # when a transfer began

    def expected(self, base: float, now: float) -> float:
        return self._kept(base, now - max(self.at, self.tried))[0]

    def aged(self, base: float, now: float) -> float:
        """What is expected, whatever is under way."""
        return self._kept(base, now - self.at)[0]

    def _kept(self, base: float, age: float) -> tuple[float, float]:
        """What is left of the value after so many seconds, and how much of it."""
        trust = 0.5 ** (max(0.0, age) / self.half_life) if self.count else 0.0
        return base + trust * (self.value - base), trust

    def observe(self, seen: float, base: float, now: float) -> None:
        kept, trust = self._kept(base, now - self.at)
        if self.count and trust < 0.5:
            if abs(seen - self.value) < abs(seen - kept):
                kept, trust = self.value, 1.0
                self.half_life = min(2 * self.half_life, _LONGEST_HALF_LIFE)
            else:
                self.half_life = _HALF_LIFE
        self.count = self.count * trust + 1.0
        value = kept + max(_GAIN, 1 / self.count) * (seen - kept)
        self.value, self.at = min(max(value, -_BOUND), _BOUND), now


class Transfers:
    """What was learned of transfers between replicas. Times are in seconds of the caller's clock."""

    def __init__(self) -> None:
        # How many bytes the model of this replica has of a prompt; None: nobody knows.
        self.size_of: Callable[[str], Bytes | None] = lambda replica: None
        self._all = _Factor()
        self._pairs: dict[tuple[str, str], _Factor] = {}
        self._met: set[tuple[str, str]] = set()  # pairs that have had a transfer
        self._paused: dict[tuple[str, str], tuple[float, float]] = {}  # until when, and how long that is

    def prior(self, sender: str, tokens: int) -> float:
        """Return the seconds that it takes before anything was learned."""
        size = self.size_of(sender)
        return LATENCY + (size(tokens) if size is not None else tokens * TOKEN_BYTES) / BANDWIDTH

    def seconds(self, prefiller: str, decoder: str, tokens: int, now: float) -> float:
        """Return the predicted seconds of moving so many tokens' cache."""
        expected, own = self._all.expected(0.0, now), self._pairs.get((prefiller, decoder))
        if own is not None:
            expected = own.expected(expected, now)
        return exp(expected) * self.prior(prefiller, tokens)

    def begin(self, prefiller: str, decoder: str, now: float) -> None:
        """One is placed: what becomes of it is known before others need to try this pair."""
        for factor in (self._all, self._pairs.get((prefiller, decoder))):
            if factor is not None:
                factor.tried = now

    def observe(self, prefiller: str, decoder: str, tokens: int, seconds: float, now: float) -> None:
        """A transfer of `tokens` took `seconds`; what is not positive counts as a tenth of a millisecond."""
        pair = (prefiller, decoder)
        self.came(*pair)
        if pair not in self._met:
            self._met.add(pair)
            return
        seen = log(max(seconds, 1e-4) / self.prior(prefiller, tokens))
        self._pairs.setdefault(pair, _Factor()).observe(seen, self._all.aged(0.0, now), now)
        self._all.observe(seen, 0.0, now)

    def came(self, prefiller: str, decoder: str) -> None:
        """A transfer came, whatever it took: the next failure is a first one."""
        self._paused.pop((prefiller, decoder), None)

    def failed(self, prefiller: str, decoder: str, now: float) -> None:
        """A transfer failed, or nobody knows what became of it."""
        _, before = self._paused.get((prefiller, decoder), (0.0, _PAUSE / 2))
        lasts = min(2 * before, _LONGEST_PAUSE)
        self._paused[prefiller, decoder] = now + lasts, lasts

    def paused(self, prefiller: str, decoder: str, now: float) -> bool:
        until, _ = self._paused.get((prefiller, decoder), (0.0, 0.0))
        return now < until

    def restarted(self, replica: str) -> None:
        """Another process is in its place, which has met nobody: it is tried at once, and what fails there too is a
        failure in a row."""
        self._met = {pair for pair in self._met if replica not in pair}
        for pair, (_, lasts) in self._paused.items():
            if replica in pair:
                self._paused[pair] = 0.0, lasts

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        self.restarted(replica)
        for known in (self._pairs, self._paused):
            for pair in [pair for pair in known if replica in pair]:
                del known[pair]

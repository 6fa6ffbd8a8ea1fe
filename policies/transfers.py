"""The predicted seconds of moving a prompt's KV cache between two replicas.

They are `LATENCY + bytes / BANDWIDTH` by a prior, times a factor learned for each pair of replicas; pairs without a
transfer so far use the factor of all pairs.

The predicted seconds are a price, which decides whether there is another transfer to learn from. A price that was once
too high would therefore stay. So what was learned is forgotten while nothing more is learned: a pair's factor moves to
that of all pairs, and that of all pairs to the prior, by half in a minute. Once the price is low enough, a request
tries the pair, and until its outcome is known, other requests get the old price. If the trial confirms the old price,
forgetting takes twice as long from then on. Nothing is learned from the first transfer of a pair: the engines shake
hands first, which takes seconds with NIXL.

The bytes are those of the model that the replicas serve (`kv_space`), since a 70B model's cache is five times that of a
model with a latent (MLA). So a factor says how a network differs from the prior, whichever model it was learned with. A
pair whose transfer failed is left out for a while, twice as long after each failure in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log

# The prior: a network of 100 Gbit/s moves 12.5 GB a second; the second leg's request and the handshake take 10 ms.
LATENCY, BANDWIDTH = 0.010, 12.5e9
# Assumed for a model of unknown shape: 8 billion parameters have 32 layers x 8 heads x 128 x 2 x 2 bytes a token.
TOKEN_BYTES = 131_072
_BOUND = log(1000.0)  # a factor stays between 1/1000 and 1000
_GAIN = 0.1  # the least weight of one observation
_HALF_LIFE, _LONGEST_HALF_LIFE = 60.0, 3600.0  # seconds in which half of what was learned is forgotten
_PAUSE, _LONGEST_PAUSE = 10.0, 320.0  # seconds for which a pair is left out after a failure

Bytes = Callable[[int], int]  # from a number of leading prompt tokens to the bytes of their cache


@dataclass(slots=True)
class _Factor:
    """The learned logarithm of the factor by which transfers take longer than the prior says.

    While nothing is learned, it moves towards the value that the methods take as `base`.
    """

    value: float = 0.0
    count: float = 0.0  # observations, less those that were forgotten
    half_life: float = _HALF_LIFE
    at: float = 0.0  # when the last observation was made
    tried: float = 0.0  # when the last transfer began

    def expected(self, base: float, now: float) -> float:
        """Return the log factor at the time `now`.

        It has moved towards `base` since the last observation, or since the last transfer began if that is later.
        """
        return self.kept(base, now - max(self.at, self.tried))[0]

    def kept(self, base: float, age: float) -> tuple[float, float]:
        """Return the log factor after `age` seconds of moving towards `base`, and the share of the distance left."""
        trust = 0.5 ** (max(0.0, age) / self.half_life) if self.count else 0.0
        return base + trust * (self.value - base), trust

    def observe(self, seen: float, base: float, now: float) -> None:
        """Learn from one transfer; `seen`: the logarithm of its seconds divided by those that the prior predicts."""
        kept, trust = self.kept(base, now - self.at)
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
    """The learned time of moving KV cache from one replica (`prefiller`, `sender`) to another (`decoder`).

    Times are in seconds of the caller's clock.
    """

    def __init__(self) -> None:
        # For a replica, a function from a prompt's tokens to the bytes of its KV cache; None: its model's shape is
        # unknown.
        self.size_of: Callable[[str], Bytes | None] = lambda replica: None
        self._all = _Factor()
        self._pairs: dict[tuple[str, str], _Factor] = {}
        self._met: set[tuple[str, str]] = set()  # pairs that have had a transfer
        # By pair that is left out after a failure: until when, and for how many seconds in all.
        self._paused: dict[tuple[str, str], tuple[float, float]] = {}

    def prior(self, sender: str, tokens: int) -> float:
        """Return the predicted seconds of moving the KV cache of `tokens` before anything was learned."""
        size = self.size_of(sender)
        return LATENCY + (size(tokens) if size is not None else tokens * TOKEN_BYTES) / BANDWIDTH

    def seconds(self, prefiller: str, decoder: str, tokens: int, now: float) -> float:
        """Return the predicted seconds of moving the KV cache of `tokens` from the prefiller to the decoder."""
        expected, own = self._all.expected(0.0, now), self._pairs.get((prefiller, decoder))
        if own is not None:
            expected = own.expected(expected, now)
        return exp(expected) * self.prior(prefiller, tokens)

    def begin(self, prefiller: str, decoder: str, now: float) -> None:
        """Note that a transfer begins: until its outcome is known, other requests do not need to try this pair."""
        for factor in (self._all, self._pairs.get((prefiller, decoder))):
            if factor is not None:
                factor.tried = now

    def observe(self, prefiller: str, decoder: str, tokens: int, seconds: float, now: float) -> None:
        """Learn that a transfer of `tokens` took `seconds`; a time below 0.1 ms counts as 0.1 ms.

        From the first transfer of a pair only its success is learned.
        """
        pair = (prefiller, decoder)
        self.came(*pair)
        if pair not in self._met:
            self._met.add(pair)
            return
        seen = log(max(seconds, 1e-4) / self.prior(prefiller, tokens))
        self._pairs.setdefault(pair, _Factor()).observe(seen, self._all.kept(0.0, now - self._all.at)[0], now)
        self._all.observe(seen, 0.0, now)

    def came(self, prefiller: str, decoder: str) -> None:
        """Note that a transfer succeeded: the next failure counts as the first in a row."""
        self._paused.pop((prefiller, decoder), None)

    def failed(self, prefiller: str, decoder: str, now: float) -> None:
        """Leave out a pair for a while, as its transfer failed or the outcome is unknown.

        The time is 10 s at first and doubles with each failure in a row, up to 320 s.
        """
        _, before = self._paused.get((prefiller, decoder), (0.0, _PAUSE / 2))
        lasts = min(2 * before, _LONGEST_PAUSE)
        self._paused[prefiller, decoder] = now + lasts, lasts

    def paused(self, prefiller: str, decoder: str, now: float) -> bool:
        """Return whether this pair is left out at the time `now`, as a transfer between the two failed lately."""
        until, _ = self._paused.get((prefiller, decoder), (0.0, 0.0))
        return now < until

    def restarted(self, replica: str) -> None:
        """Note that a new process replaced the replica, whose pairs have to shake hands again.

        Its pairs that were left out after a failure may be tried again at once. If the next transfer of such a pair
        fails too, that counts as one more failure in a row.
        """
        self._met = {pair for pair in self._met if replica not in pair}
        for pair, (_, lasts) in self._paused.items():
            if replica in pair:
                self._paused[pair] = 0.0, lasts

    def forget(self, replica: str) -> None:
        """Forget what was learned about the pairs of a replica that is gone."""
        self.restarted(replica)
        for known in (self._pairs, self._paused):
            for pair in [pair for pair in known if replica in pair]:
                del known[pair]

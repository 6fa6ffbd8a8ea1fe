"""What moving a prompt's KV cache between two replicas takes: `LATENCY + bytes / BANDWIDTH` seconds by a prior, times a
factor that is learned of each pair of replicas, and of all pairs for those that have not met.

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
_BOUND = 1000.0  # the factor stays within this and its inverse
_GAIN = 0.1  # of one observation, once there are some
_PAUSE, _LONGEST_PAUSE = 10.0, 320.0  # seconds without a pair whose transfer failed

Bytes = Callable[[int], int]  # of so many leading tokens of a prompt


@dataclass(slots=True)
class _Factor:
    """How many times longer transfers take than the prior says."""

    value: float = 1.0
    count: int = 0

    def observe(self, gap: float) -> None:
        self.count += 1
        self.value = min(max(self.value * exp(max(_GAIN, 1 / self.count) * gap), 1 / _BOUND), _BOUND)


class Transfers:
    """What was learned of transfers between replicas. Times are in seconds of the caller's clock."""

    def __init__(self) -> None:
        # How many bytes the model of this replica has of a prompt; None: nobody knows.
        self.size_of: Callable[[str], Bytes | None] = lambda replica: None
        self._all = _Factor()
        self._pairs: dict[tuple[str, str], _Factor] = {}
        self._paused: dict[tuple[str, str], tuple[float, float]] = {}  # until when, and how long that is

    def prior(self, sender: str, tokens: int) -> float:
        """Return the seconds that it takes before anything was learned."""
        size = self.size_of(sender)
        return LATENCY + (size(tokens) if size is not None else tokens * TOKEN_BYTES) / BANDWIDTH

    def seconds(self, prefiller: str, decoder: str, tokens: int) -> float:
        """Return the predicted seconds of moving so many tokens' cache."""
        factor = self._pairs.get((prefiller, decoder), self._all)
        return factor.value * self.prior(prefiller, tokens)

    def observe(self, prefiller: str, decoder: str, tokens: int, seconds: float) -> None:
        """A transfer of `tokens` took `seconds`; what is not positive counts as a tenth of a millisecond."""
        pair = (prefiller, decoder)
        self.came(*pair)
        prior = self.prior(prefiller, tokens)
        seconds = max(seconds, 1e-4)
        own = self._pairs.get(pair)
        if own is None:
            own = self._pairs[pair] = _Factor(self._all.value)
        own.observe(log(seconds / (own.value * prior)))
        self._all.observe(log(seconds / (self._all.value * prior)))

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

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        for known in (self._pairs, self._paused):
            for pair in [pair for pair in known if replica in pair]:
                del known[pair]

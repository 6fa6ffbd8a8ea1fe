"""Transfers of KV caches between engines, in virtual time.

An engine sends one cache at a time and receives one at a time, in the order of the requests: its network card is the
bottleneck. A transfer takes a fixed latency, which delays no other transfer, plus its bytes divided by the bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Network:
    """The network between engines; `lease`: seconds a prompt's cache is kept for another engine to begin to read it."""

    gbit_per_s: float = 100.0
    fixed: float = 0.010
    lease: float = 30.0


class Transfer(NamedTuple):
    """A transfer: `waited` seconds until both network cards were free, then `seconds`."""

    prefiller: int
    decoder: int
    tokens: int
    waited: float
    seconds: float


class Links:
    """The network cards of all engines, and the transfers over them."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.transfers: list[Transfer] = []  # all that began
        self._sends: dict[int, float] = {}  # when the engine is free to send
        self._receives: dict[int, float] = {}

    def begin(self, prefiller: int, decoder: int, tokens: int, size: float, now: float, kept_at: float) -> float | None:
        """Move `tokens` tokens of `size` bytes each and return when they have arrived.

        Returns None if the lease, which began at `kept_at`, ends before the transfer can begin.
        """
        begins = max(now, self._sends.get(prefiller, 0.0), self._receives.get(decoder, 0.0))
        if begins > kept_at + self.network.lease:
            return None
        moving = tokens * size * 8e-9 / self.network.gbit_per_s
        self._sends[prefiller] = self._receives[decoder] = begins + moving
        took = moving + self.network.fixed
        self.transfers.append(Transfer(prefiller, decoder, tokens, begins - now, took))
        return begins + took

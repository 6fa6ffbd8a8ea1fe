"""Caches on their way from engine to engine, in virtual time.

An engine sends one cache at a time and receives one at a time, in the order in which they were asked for: its network
card is the bottleneck. A transfer takes a fixed time, which holds up nobody, and its bytes by the bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Network:
    """How caches are moved. `lease`: seconds for which a prompt's cache is kept until another engine begins to read."""

    gbit_per_s: float = 100.0
    fixed: float = 0.010
    lease: float = 30.0


class Transfer(NamedTuple):
    """One transfer. `waited`: seconds until both network cards were free; `seconds` after that."""

    prefiller: int
    decoder: int
    tokens: int
    waited: float
    seconds: float


class Links:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.transfers: list[Transfer] = []  # all that began
        self._sends: dict[int, float] = {}  # until when an engine is busy
        self._receives: dict[int, float] = {}

    def begin(self, prefiller: int, decoder: int, tokens: int, size: float, now: float, kept_at: float) -> float | None:
        """Move so many tokens of `size` bytes each; returns when they are there. None: the lease would be over before
        the transfer could begin."""
        begins = max(now, self._sends.get(prefiller, 0.0), self._receives.get(decoder, 0.0))
        if begins > kept_at + self.network.lease:
            return None
        moving = tokens * size * 8e-9 / self.network.gbit_per_s
        self._sends[prefiller] = self._receives[decoder] = begins + moving
        took = moving + self.network.fixed
        self.transfers.append(Transfer(prefiller, decoder, tokens, begins - now, took))
        return begins + took

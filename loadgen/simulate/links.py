"""Transfers of KV caches between engines, in virtual time.

An engine sends one prompt's cache at a time and receives one at a time, in the order of the requests: its network card
is the bottleneck. A transfer takes a fixed latency, which delays no other transfer, plus its bytes divided by the
bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Network:
    """The network between engines."""

    gbit_per_s: float = 100.0  # of an engine's network card, each way
    fixed: float = 0.010  # seconds that each transfer takes in addition to the time for its bytes
    lease: float = 30.0  # seconds for which a prefiller keeps a prompt's cache until a decoder begins to read it


class Transfer(NamedTuple):
    """A finished or running transfer of one prompt's KV cache between two engines."""

    prefiller: int  # index of the engine that sends
    decoder: int  # index of the engine that receives
    tokens: int  # whose KV cache is sent
    waited: float  # seconds until both network cards were free
    seconds: float  # of the transfer itself, after that


class Links:
    """The network cards of all engines, and the transfers over them."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.transfers: list[Transfer] = []  # all that began
        self._sends: dict[int, float] = {}  # by engine: when its card is free to send
        self._receives: dict[int, float] = {}  # by engine: when its card is free to receive

    def begin(self, prefiller: int, decoder: int, tokens: int, size: float, now: float, kept_at: float) -> float | None:
        """Transfer the KV cache of `tokens` tokens between two engines, and return when it will have arrived.

        `prefiller`, `decoder`: indices of the sender and the receiver; `size`: bytes of KV cache per token; `now`: when
        the decoder asks for it. Returns None if the prefiller's lease, which began at `kept_at`, ends before the
        network cards of both engines are free.
        """
        begins = max(now, self._sends.get(prefiller, 0.0), self._receives.get(decoder, 0.0))
        if begins > kept_at + self.network.lease:
            return None
        moving = tokens * size * 8e-9 / self.network.gbit_per_s
        self._sends[prefiller] = self._receives[decoder] = begins + moving
        took = moving + self.network.fixed
        self.transfers.append(Transfer(prefiller, decoder, tokens, begins - now, took))
        return begins + took

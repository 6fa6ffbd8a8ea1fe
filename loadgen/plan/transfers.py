"""The cost of moving a prompt's KV cache between engines: bytes, buffer, number of transfers, and seconds.

Everything is computed, nothing measured or simulated. A timing profile gives the seconds to recompute the prompt and
those of a decode step.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.kv_space import KvSpace
from policies.transfers import LATENCY
from replicas.simulated.profile import FrontEnd, Profile

BUFFER_STEP = 256 << 20  # bytes; buffers are rounded up to a multiple of this
COLLATED = 128  # tokens per transfer; with fewer, the fixed time of each transfer costs more than the link
# Fixed seconds of one transfer, from LMCache's published figures for NVLink: 7,500 tokens take 20 ms in pieces of
# 16 tokens (469 transfers) and 8 ms in pieces of 128 (59 transfers).
PER_TRANSFER = (0.020 - 0.008) / (469 - 59)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The cost of transferring one prompt's KV cache."""

    tokens: int  # of the prompt
    bytes: int  # on all GPUs of a replica
    bytes_per_gpu: int
    buffer: int  # bytes on each GPU
    count: int  # number of transfers, of one piece each
    seconds: float | None  # of all transfers together; None if no link is given
    compute_seconds: float  # to recompute the prompt instead

    @property
    def pays(self) -> bool | None:
        """Whether moving the KV cache is faster than recomputing the prompt; None if no link is given."""
        return None if self.seconds is None else self.seconds < self.compute_seconds


def transfer(space: KvSpace, tokens: int, piece: int, link: float | None, profile: Profile) -> Transfer:
    """Return the cost of moving the KV cache of a prompt of `tokens` tokens between two replicas.

    `piece`: tokens per transfer; `link`: bytes per second between two replicas, all GPUs together, or None.
    """
    of_gpu = space.moved(tokens)
    total, count = of_gpu * space.tensor_parallel, -(-tokens // piece)
    seconds = LATENCY + count * PER_TRANSFER + total / link if link else None
    compute = FrontEnd(profile).reaches_engine(0.0, tokens, text=True) + prefill_seconds(profile, tokens)
    return Transfer(tokens, total, of_gpu, -(-of_gpu // BUFFER_STEP) * BUFFER_STEP, count, seconds, compute)


def prefill_seconds(profile: Profile, tokens: int) -> float:
    """Return the seconds to compute one uncached prompt alone, in steps of `max_num_batched_tokens` tokens."""
    most = profile.max_num_batched_tokens
    chunks = [(done, min(most, tokens - done)) for done in range(0, tokens, most)]
    return sum(_seconds(profile, chunk, chunk * (done + chunk / 2)) for done, chunk in chunks)


def last_token_seconds(profile: Profile, tokens: int) -> float:
    """Return the seconds that computing the last token of an otherwise cached prompt adds to a step."""
    return _seconds(profile, 1, tokens) - _seconds(profile, 0, 0.0)


def step_seconds(profile: Profile, streams: float, context: float) -> float:
    """Return the seconds of a decode step.

    `streams`: requests that are decoding, a mean that may be fractional; `context`: tokens of each.
    """
    return _seconds(profile, 0, 0.0, streams, streams * context)


def _seconds(profile: Profile, tokens: int, pairs: float, streams: float = 0, context: float = 0.0) -> float:
    """Return the mean seconds of an engine step.

    `tokens`: new prompt tokens; `pairs`: number of pairs of a new token and one that it attends to; `streams`: requests
    that are decoding; `context`: the tokens of all of them together.
    """
    return profile.step.seconds(tokens, pairs, streams, context, profile.in_use(context)) / profile.speedup

"""The cost of moving a prompt's KV cache between engines: bytes, buffer, number of transfers, and seconds.

Pure arithmetic. A timing profile gives the seconds to recompute the prompt and those of a decode step.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.kv_space import KvSpace
from policies.transfers import LATENCY
from replicas.simulated.profile import Profile

BUFFER_STEP = 256 << 20  # bytes: buffers are rounded up to a multiple of it
COLLATED = 128  # tokens: smaller transfers cost more than the link
# Fixed seconds of one transfer, from LMCache's published figures for NVLink: 7,500 tokens take 20 ms in pieces of
# 16 tokens (469 transfers) and 8 ms in pieces of 128 (59 transfers).
PER_TRANSFER = (0.020 - 0.008) / (469 - 59)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of one prompt's cache; bytes are the sum over a replica's GPUs, the buffer is on each GPU."""

    tokens: int
    bytes: int
    bytes_per_gpu: int
    buffer: int
    count: int
    seconds: float | None  # None where no link is given
    compute_seconds: float

    @property
    def pays(self) -> bool | None:
        """Whether moving is faster than recomputing; None without a link."""
        return None if self.seconds is None else self.seconds < self.compute_seconds


def transfer(space: KvSpace, tokens: int, piece: int, link: float | None, profile: Profile) -> Transfer:
    """Return the cost of moving the KV cache of `tokens` tokens.

    `piece`: tokens per transfer; `link`: bytes per second between two replicas, all GPUs together, or None.
    """
    of_gpu = space.moved(tokens)
    total, count = of_gpu * space.tensor_parallel, -(-tokens // piece)
    seconds = LATENCY + count * PER_TRANSFER + total / link if link else None
    return Transfer(tokens, total, of_gpu, -(-of_gpu // BUFFER_STEP) * BUFFER_STEP, count, seconds,
                    _front_seconds(profile, tokens) + prefill_seconds(profile, tokens))  # fmt: skip


def prefill_seconds(profile: Profile, tokens: int) -> float:
    """Return the seconds to compute one prompt alone, in steps of `max_num_batched_tokens`."""
    seconds, done = 0.0, 0
    while done < tokens:
        chunk = min(profile.max_num_batched_tokens, tokens - done)
        seconds += profile.step.seconds(chunk, chunk * (done + chunk / 2), 0, 0, 0.0)
        done += chunk
    return seconds / profile.speedup


def _front_seconds(profile: Profile, tokens: int) -> float:
    """Return the seconds before a prompt's first step: HTTP and tokenizing."""
    request = profile.request
    return (request.work_seconds(tokens, text=True, busy=False) + request.latency * 1e-3) / profile.speedup


def last_token_seconds(profile: Profile, tokens: int) -> float:
    """Return by how many seconds a step is longer that computes the last token of an otherwise cached prompt."""
    step = profile.step
    return (step.seconds(1, tokens, 0, 0, 0.0) - step.seconds(0, 0.0, 0, 0, 0.0)) / profile.speedup


def step_seconds(profile: Profile, streams: float, context: float) -> float:
    """Return the seconds of a decode step with `streams` (a mean, may be fractional) of `context` tokens each."""
    tokens = streams * context
    return profile.step.seconds(0, 0.0, streams, tokens, profile.in_use(tokens)) / profile.speedup

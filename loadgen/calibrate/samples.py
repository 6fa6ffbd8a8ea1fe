"""Samples: measured times, with how often each coefficient of the simulated engine's timing occurs in them.

The names are those of `replicas.simulated.profile` (`latency`, `work`, `token`, `text`, `text_token` of a request; the
others of a step). A prompt of 4,096 new tokens in steps of 2,048, alone, is one `latency`, one `work`, 4,096 `token`,
two `base`, two `prefill`, 4,096 `prefill_token` and 4,096 * 2,048 `attention`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# The regions in which residuals are stated.
NEW, CACHED, TEXT = "new prompt", "prompt behind a cached prefix", "cached prompt as text"
BURST, DECODE = "burst of cached prompts", "decode step"


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured time, its region, and how often each coefficient occurs in it."""

    region: str
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    spread: float | None = None  # of a step, where many were seen: a standard deviation as a share


def prompt(region: str, seconds: float, tokens: int, cached: int, budget: int) -> Sample:
    """Return the sample of a time to first token on an idle engine; `budget` is max_num_batched_tokens."""
    parts = _prefill(tokens - cached, cached, budget)
    parts |= {"latency": 1, "work": 1, "token": tokens, "base": parts["prefill"]}
    return Sample(region, seconds, parts | ({"text": 1, "text_token": tokens} if region == TEXT else {}))


def burst(seconds: float, count: int, tokens: int, cached: int, budget: int) -> Sample:
    """Return the sample of `count` cached prompts sent at once, until the last one has its first token.

    The step of the last one begins when it reaches the engine, or when the step before ends: on average half a step
    later.
    """
    parts = _prefill(tokens - cached, cached, budget) | {"base": 1.5, "prefill": 1.5}
    return Sample(BURST, seconds, parts | {"latency": 1, "work": count, "token": count * tokens})


def decode(seconds: float, sequences: int, context: float, spread: float | None = None) -> Sample:
    """Return the sample of one step that gives `sequences` requests, with `context` tokens in all, a token each."""
    return Sample(DECODE, seconds, {"base": 1, "decode_sequence": sequences, "decode_context_token": context}, spread)


def _prefill(new: int, before: int, budget: int) -> dict[str, float]:
    """Return the parts of a prefill; each new token attends to all before it, however the prompt is chunked."""
    return {"prefill": -(-new // budget), "prefill_token": new, "attention": new * (before + new / 2)}

"""Samples of measured times, and the coefficients of a timing profile that fit them best.

A sample is one measured time with a count for each coefficient: how often the cost that the coefficient stands for
occurs within this time. Coefficients are named as in `replicas.simulated.profile`: `latency`, `work`, `token`, `text`
and `text_token` belong to a request, the others to an engine step. A prompt of 4,096 new tokens in steps of 2,048,
alone, is one `latency`, one `work`, 4,096 `token`, two `base`, two `prefill`, 4,096 `prefill_token` and 4,096 * 2,048
`attention`.

The fit is by robust non-negative least squares. Errors are relative: 10 % count the same for 5 ms and for 500. Outliers
get less weight with each round (Huber); on a machine with other work, every tenth sample is one. A coefficient that
occurs in no sample stays zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# The regions: kinds of measurement. The errors of the fit are stated for each.
NEW, CACHED, TEXT = "new prompt", "prompt behind a cached prefix", "cached prompt as text"
BURST, DECODE = "burst of cached prompts", "decode step"


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured time, and how often each coefficient of the timing profile occurs in it."""

    region: str  # kind of measurement
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)  # by coefficient: how often it occurs in the time
    spread: float | None = None  # standard deviation of many steps, as a share of their duration


def prompt_sample(region: str, seconds: float, tokens: int, cached: int, budget: int) -> Sample:
    """Return the sample of one prompt's time to first token on an idle engine.

    `region`: the kind of measurement, with which errors of the fit are reported: NEW (a new prompt), CACHED (a prompt
    behind a cached prefix) or TEXT (a cached prompt that is sent as text). `seconds`: the measured time. `tokens`:
    length of the prompt. `cached`: how many of these tokens the engine had cached. `budget`: the engine's
    max_num_batched_tokens.
    """
    parts = _prefill(tokens - cached, cached, budget)
    parts |= {"latency": 1, "work": 1, "token": tokens, "base": parts["prefill"]}
    return Sample(region, seconds, parts | ({"text": 1, "text_token": tokens} if region == TEXT else {}))


def burst_sample(seconds: float, count: int, tokens: int, cached: int, budget: int) -> Sample:
    """Return the sample of `count` cached prompts that are sent at the same time.

    `seconds`: from sending until every reply has its first token; `tokens`: length of each prompt; `cached`: how many
    of these tokens the engine had cached; `budget`: the engine's max_num_batched_tokens. The prompt that reaches the
    engine last waits for the running step to end, half a step on average, and is computed in the next step.
    """
    parts = _prefill(tokens - cached, cached, budget) | {"base": 1.5, "prefill": 1.5}
    return Sample(BURST, seconds, parts | {"latency": 1, "work": count, "token": count * tokens})


def decode_sample(seconds: float, sequences: int, context: float, spread: float | None = None) -> Sample:
    """Return the sample of one decode step, in which `sequences` requests get a token each.

    `context`: tokens of the prompts and replies so far, summed over these requests; `spread`: standard deviation of the
    step's duration as a share of the duration, or None if it was not measured.
    """
    return Sample(DECODE, seconds, {"base": 1, "decode_sequence": sequences, "decode_context_token": context}, spread)


def _prefill(new: int, before: int, budget: int) -> dict[str, float]:
    """Return how often each prefill coefficient occurs in computing `new` prompt tokens behind `before` cached ones.

    `budget`: the most tokens of a step. Each new token attends to all tokens before it, so `attention` does not depend
    on how the prompt is divided into steps.
    """
    return {"prefill": -(-new // budget), "prefill_token": new, "attention": new * (before + new / 2)}


# What each coefficient stands for; these words become comments in the profile.
MEANINGS = {
    "latency": "ms of a request that no other waits for: HTTP, scheduling, the way back",
    "work": "ms of the API server, one request after the other",
    "token": "more of it for each prompt token",
    "text": "more of it when the prompt is text",
    "text_token": "and for each of its tokens",
    "base": "ms of any step",
    "prefill": "more, with a prompt in it",
    "prefill_token": "for each new prompt token",
    "attention": "for each pair of a new token and one before it",
    "decode_sequence": "for each decoding request",
    "decode_context_token": "for each token of their contexts",
}
NAMES = tuple(MEANINGS)
ROUNDS = 30  # of weighting outliers less, at most
# An error of more standard deviations is an outlier: Huber's constant, 95 % as efficient as least squares without any.
FAR = 1.345


@dataclass(frozen=True, slots=True)
class Residual:
    """The errors of the fit for one kind of measurement (such as a new prompt), as shares of the measured times."""

    count: int  # of samples
    bias: float  # median of (fit - seen) / seen
    typical: float  # median of |fit - seen| / seen
    worst_tenth: float  # nine in ten values of |fit - seen| / seen are smaller


# A region's fit is poor if its typical error is above POOR or its bias above POOR_BIAS. The medians of a simulated load
# are to be within 15 % of the engine's (bench/results), and a bias shifts them by its full size.
POOR, POOR_BIAS = 0.25, 0.15


@dataclass(frozen=True)
class Fit:
    """The coefficients of a timing profile, and how well they fit the samples."""

    ms: dict[str, float]  # by coefficient: its value in milliseconds
    residuals: dict[str, Residual]  # by region (kind of measurement)
    spread: float = 0.0  # standard deviation of a step's duration, as a share of the duration

    @property
    def poor(self) -> list[str]:
        """The kinds of measurement (such as a new prompt) in which the fit has a large error or a large bias."""
        return [name for name, one in self.residuals.items() if one.typical > POOR or abs(one.bias) > POOR_BIAS]

    def seconds(self, parts: dict[str, float]) -> float:
        """Return the seconds that the fit predicts for a sample.

        `parts`: by name, how often each coefficient occurs in the sample's time.
        """
        return 1e-3 * sum(self.ms[name] * times for name, times in parts.items())


def fit(samples: Sequence[Sample]) -> Fit:
    """Return the coefficients that fit the samples best, with their errors. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    seen = np.array([sample.seconds * 1e3 for sample in samples])
    matrix = np.array([[sample.parts.get(name, 0.0) for name in NAMES] for sample in samples]) / seen[:, None]
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-30)
    weights, found = np.ones(len(seen)), np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        before, found = found, nonnegative(matrix / scale * root[:, None], root) / scale
        off = np.abs(matrix @ found - 1)
        spread = max(1.4826 * float(np.median(off)), 1e-6)
        weights = np.minimum(1, FAR * spread / np.maximum(off, 1e-12))
        if np.allclose(found, before, rtol=1e-6, atol=0):
            break
    off = matrix @ found - 1
    regions = dict.fromkeys(sample.region for sample in samples)
    residuals = {}
    for region in regions:
        mine = off[[sample.region == region for sample in samples]]
        size = np.abs(mine)
        quantiles = float(np.median(mine)), float(np.median(size)), float(np.quantile(size, 0.9))
        residuals[region] = Residual(len(mine), *quantiles)
    spreads = [sample.spread for sample in samples if sample.spread is not None]
    return Fit(dict(zip(NAMES, map(float, found))), residuals, float(np.median(spreads)) if spreads else 0.0)


def nonnegative(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the x >= 0 that minimizes |matrix @ x - wanted| (Lawson and Hanson's active-set method)."""
    count = matrix.shape[1]
    x, free = np.zeros(count), np.zeros(count, bool)
    for _ in range(10 * count):
        gain = matrix.T @ (wanted - matrix @ x)
        gain[free] = -np.inf
        if free.all() or gain.max() <= 1e-10 * len(wanted):
            break
        free[gain.argmax()] = True
        while free.any():
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
            if trial[free].min() > 0:
                x = trial
                break
            negative = free & (trial <= 0)
            share = (x[negative] / np.maximum(x[negative] - trial[negative], 1e-300)).min()
            x = x + share * (trial - x)
            free &= x > 1e-14
            x[~free] = 0
    return x

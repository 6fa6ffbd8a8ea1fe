"""Coefficients of the timing profile from samples, by robust non-negative least squares.

Errors are relative, so that 5 ms count as much as 500. Outliers, every tenth sample on a machine with other work, lose
weight with each round (Huber). A coefficient that occurs in no sample stays zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .samples import Sample

NAMES = ("latency", "work", "token", "text", "text_token", "base", "prefill", "prefill_token", "attention",
         "decode_sequence", "decode_context_token")  # fmt: skip
ROUNDS = 30
FAR = 1.345  # spreads; Huber's constant: 95 % as efficient as least squares without outliers


@dataclass(frozen=True, slots=True)
class Residual:
    """The errors of the fit in one region, as shares of the measured times."""

    count: int
    bias: float  # median of (fit - seen) / seen
    typical: float  # median of its absolute value
    worst_tenth: float  # nine in ten are closer


# A region's fit is poor if its typical error is above POOR or its bias above POOR_BIAS: medians under load shall be
# within 15 % of the engine's (bench/results), and a bias affects them in full.
POOR, POOR_BIAS = 0.25, 0.15


@dataclass(frozen=True)
class Fit:
    """Coefficients in milliseconds, and the errors of the fit by region."""

    ms: dict[str, float]  # by coefficient
    residuals: dict[str, Residual]
    spread: float = 0.0  # of a step: a standard deviation, as a share

    @property
    def poor(self) -> list[str]:
        """The regions in which the fit is poor."""
        return [name for name, one in self.residuals.items() if one.typical > POOR or abs(one.bias) > POOR_BIAS]

    def seconds(self, parts: dict[str, float]) -> float:
        """Return the time that the fit predicts for these parts (see `samples`)."""
        return 1e-3 * sum(self.ms[name] * times for name, times in parts.items())


def fit(samples: Sequence[Sample]) -> Fit:
    """Return the fit of the samples. Raises ValueError when there are none."""
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
    residuals = {region: _residual(off[[sample.region == region for sample in samples]]) for region in regions}
    spreads = [sample.spread for sample in samples if sample.spread is not None]
    return Fit(dict(zip(NAMES, map(float, found))), residuals, float(np.median(spreads)) if spreads else 0.0)


def _residual(off: np.ndarray) -> Residual:
    size = np.abs(off)
    return Residual(len(off), float(np.median(off)), float(np.median(size)), float(np.quantile(size, 0.9)))


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

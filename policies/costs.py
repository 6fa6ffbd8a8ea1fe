"""Predicted seconds on one replica, learned online from what its requests report.

Two models, linear in their features, every coefficient positive:

    TTFT  = base + token x uncached + pair x uncached x (cached + uncached / 2)
            + queued x uncached tokens ahead + crowd x decode step there
    step  = decode_base + decode_seq x streams + decode_ctx x their context tokens

Each is fitted by recursive least squares on a logarithmic scale: the state is the logarithm of
the coefficients, one observation is log(seconds). That keeps coefficients positive, makes an
engine half as fast the same step as one twice as fast, and weighs errors relatively, as queueing
noise is. The prior covariance has a large part common to all coefficients, so the first
observations set the replica's speed and later ones its shape.
"""
from __future__ import annotations

from math import exp, log

import numpy as np

# An 8B model on one data-centre GPU (Dynamo 1.6.1's mocker defaults: 15 us a token, 4.2e-10 s a
# token squared, 16 ms a prefill step, 6 ms a decode step). Wrong by tenfold for others; the first
# dozen requests mend that, and routing depends on ratios in the meantime.
TTFT_PRIOR = (0.016, 15e-6, 8.4e-10, 12e-6, 1.0)
STEP_PRIOR = (0.006, 50e-6, 0.1e-6)
_BOUND = log(100.0)     # a coefficient stays within a hundredfold of its prior
_WALK = 3e-4            # variance a coefficient may drift by per observation
_NOISE = 0.05           # variance of log(observed / predicted) that is not the model's fault
_ENOUGH = 20            # observations before a replica's figures speak for its group


class Fit:
    """One positive linear model, seconds = sum(coefficient x feature), fitted on the log scale."""
    __slots__ = ("prior", "theta", "count", "error", "_prior_error", "_cov", "_limit", "_spread", "coefficients")

    def __init__(self, prior: tuple[float, ...]) -> None:
        self.prior = np.log(np.array(prior))
        self.theta = self.prior.copy()
        self._limit = 1.0 + 0.5 * np.eye(len(prior))
        self._cov = self._limit.copy()
        self._spread = 0.3          # running size of the log error, what an outlier is measured by
        self.count = 0
        self.error = self._prior_error = 0.0    # running |predicted - observed|, seconds
        self.coefficients: tuple[float, ...] = tuple(prior)

    def observe(self, features: tuple[float, ...], seconds: float) -> None:
        """Learn from one answer that took `seconds` > 0; features as in the prior's order, >= 0."""
        x = np.array(features)
        parts = np.exp(self.theta) * x
        predicted = float(parts.sum())
        self._judge(predicted, float(np.exp(self.prior) @ x), seconds)
        gap = log(seconds / predicted)
        self._spread += 0.1 * (min(abs(gap), 5 * self._spread) - self._spread)
        limit = max(3 * self._spread, 0.1)
        gap = max(-limit, min(limit, gap))
        shares = parts / predicted
        gain = self._cov @ shares
        gain_over = gain / (_NOISE + float(shares @ gain))
        self.theta = np.clip(self.theta + gain_over * gap, self.prior - _BOUND, self.prior + _BOUND)
        self._cov = self._cov - np.outer(gain_over, gain) + _WALK * self._limit
        over = np.sqrt(np.minimum(1.0, np.diag(self._limit) / np.diag(self._cov)))
        self._cov *= np.outer(over, over)
        self.count += 1
        better = self.error <= self._prior_error
        self.coefficients = tuple(np.exp(self.theta if better else self.prior).tolist())

    def _judge(self, predicted: float, by_prior: float, seconds: float) -> None:
        rate = max(0.05, 1 / (self.count + 1))
        self.error += rate * (abs(predicted - seconds) - self.error)
        self._prior_error += rate * (abs(by_prior - seconds) - self._prior_error)


class Costs:
    """One replica's coefficients; `error` is the running |predicted - observed| TTFT in seconds."""
    __slots__ = ("ttft", "step", "error", "base", "token", "pair", "queued", "crowd", "decode_base",
                 "decode_seq", "decode_ctx")

    def __init__(self, ttft_prior: tuple[float, ...] = TTFT_PRIOR, step_prior: tuple[float, ...] = STEP_PRIOR) -> None:
        self.ttft, self.step = Fit(ttft_prior), Fit(step_prior)
        self._publish()

    def _publish(self) -> None:
        self.base, self.token, self.pair, self.queued, self.crowd = self.ttft.coefficients
        self.decode_base, self.decode_seq, self.decode_ctx = self.step.coefficients
        self.error = self.ttft.error

    def prefill_seconds(self, uncached: int, context: int) -> float:
        """Computing `uncached` tokens after `context` cached ones."""
        return uncached * (self.token + self.pair * (context + 0.5 * uncached))

    def queue_seconds(self, load) -> float:
        """Draining the uncached tokens reserved ahead."""
        return self.queued * load.prefill_tokens

    def step_seconds(self, load) -> float:
        """One decode step of the streams there now."""
        if not load.decoding:
            return 0.0
        return self.decode_base + self.decode_seq * load.decoding + self.decode_ctx * load.context_tokens

    def ttft_seconds(self, load, uncached: int, context: int) -> float:
        """Time to the first token, met with `load`."""
        return (self.base + self.prefill_seconds(uncached, context) + self.queue_seconds(load)
                + self.crowd * self.step_seconds(load))

    def decode_interference(self, load, uncached: int, context: int) -> float:
        """Seconds by which this prefill holds up the streams decoding there, summed over them."""
        return load.decoding * self.prefill_seconds(uncached, context)

    def observe_ttft(self, seconds: float, uncached: int, cached: int, before) -> None:
        """A first token came after `seconds`; `before` is the load it met (Reservation.before)."""
        if seconds <= 0:
            return
        self.ttft.observe((1.0, uncached, uncached * (cached + 0.5 * uncached), before.prefill_tokens,
                           self.step_seconds(before)), seconds)
        self._publish()

    def observe_itl(self, seconds_per_token: float, decoding: int, context_tokens: int) -> None:
        """A stream's mean time a token, with so many streams (itself included) and their context."""
        if seconds_per_token <= 0:
            return
        self.step.observe((1.0, decoding, context_tokens), seconds_per_token)
        self._publish()


class CostGroup:
    """Replicas of one kind; a new one starts from what the others have learned."""

    def __init__(self) -> None:
        self._members: dict[str, Costs] = {}

    def add(self, replica: str) -> Costs:
        """This replica's costs, the same object until `remove`."""
        costs = self._members.get(replica)
        if costs is None:
            costs = self._members[replica] = Costs(self._prior("ttft", TTFT_PRIOR), self._prior("step", STEP_PRIOR))
        return costs

    def remove(self, replica: str) -> None:
        self._members.pop(replica, None)

    def _prior(self, which: str, fallback: tuple[float, ...]) -> tuple[float, ...]:
        fits = [getattr(costs, which) for costs in self._members.values()]
        known = [np.log(fit.coefficients) for fit in fits if fit.count >= _ENOUGH]
        return tuple(np.exp(np.median(known, axis=0)).tolist()) if known else fallback

"""Predicted seconds, learned online from what the replicas' requests report.

Two models, linear in their features, every coefficient positive:

    TTFT = base + token x uncached + pair x uncached x (cached + uncached / 2)
           + queued x uncached tokens ahead + busy (if a prefill is ahead) + crowd x decode step there x steps
    step = decode_base + decode_seq x streams + decode_ctx x their context tokens

An engine works in steps. A prompt waits for the rest of the step under way, then shares its own
steps with the prompts ahead (first come first served, one token budget) and with one token of each
decoding stream: hence `busy`, `queued` and `crowd`; each step's fixed cost is in `base`. A long prompt takes several
`steps`, each with all that decodes (Mooncake's trace, three seeds: p99 1.4 % less than with one for all). Where it is
known since when the step under way computes prompts, `busy` and their tokens count as far as they are `left`.

The shape is learned once for a group of replicas of one kind, each replica adds a speed of its own.
Learning whole shapes per replica starved some: identical replicas came to differ by their first few
requests (base 6.6 ms against 3.6), and the one that looked slow got no traffic to be proved wrong by.

The shape is fitted by recursive least squares on a logarithmic scale: the state is the logarithm of
the coefficients, one observation is log(seconds), its gradient each term's share of the prediction
(an extended Kalman filter without dynamics). So coefficients stay positive, an engine half as fast is
as far away as one twice as fast, and errors count relatively, as queueing noise does. The prior
covariance has a large part common to all coefficients: first the speed is found, then the shape.

A replica's speed is an exponential average whose gain is the tracking signal of Trigg and Leach
("Exponential smoothing with an adaptive response rate", Operational Research Quarterly 18(1), 1967): small
under noise, large once errors keep their sign. The speed of a replica that gets no requests goes back
to the group's, and that of one which others are chosen over to theirs, within seconds, so that one found slow is tried
again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from math import exp, log
from types import SimpleNamespace
from typing import Any, NotRequired, TypedDict

from .changes import Changes
from .ledger import UNTIMED, ZERO_TOGETHER, Load
from .statement import REQUEST, STANDING, compiled, expressions, python, symbol

# An 8B model on one data-centre GPU (Dynamo 1.6.1's mocker defaults: 15 us a token, 4.2e-10 s a
# token squared, 16 ms a prefill step, 6 ms a decode step). Tenfold wrong for others; a dozen requests
# mend that, and until then what matters is that the ratios are an engine's.
TTFT_PRIOR = (0.016, 15e-6, 8.4e-10, 12e-6, 0.008, 1.0)
STEP_PRIOR = (0.006, 50e-6, 0.1e-6)
# of prompts that a step computes: vLLM's own on large GPUs; where it is another number, `crowd` learns the rest
STEP_TOKENS = 8192
_COMMON, _OWN = 1.0, 0.5  # prior variance of the log coefficients: shared, and each one's own
_WALK = 1e-3  # share of the way back to the prior's covariance, per observation
_NOISE = 0.05  # variance of log(observed / predicted) that is not the model's fault
_BOUND = 100.0  # a coefficient stays within a hundredfold of its prior
_SMOOTH = 0.1  # of the running error sizes
# A replica that is passed over comes half as near to this share of the others' speed in so many seconds: once it is
# thought a little quicker than they are it is tried, and known again. One thought twice as slow as they is after 6 s.
_DECAY_HALF_LIFE, _DECAY_SHARE = 2.0, 0.9
_LATEST, _FADED = 0.3, 0.5  # of the mean of what was delivered; a speed below this share of it has faded
_FORGET = 0.99  # of the log speed stays, each turn without a request

# Tokens in slower tiers, in runs of the prompt's order: (tier, tokens).
Lower = tuple[tuple[str, int], ...]
# Seconds to bring one token's keys and values back to the GPU: 128 KiB a token (Llama 3 8B in 16 bits), at 25 GB/s from
# host memory (PCIe 4.0 x16), 6 GB/s from NVMe and 2.5 GB/s from another machine (25 Gbit/s, 80 % of it). Learned since.
FETCH_PRIOR = {tier: 131_072 / bandwidth for tier, bandwidth in (("cpu", 25e9), ("disk", 6e9), ("remote", 2.5e9))}
PEER = "peer"  # the tier of what another replica passes on, of which `Pull` says how long that takes
_ASIDE = 0.1  # share of a prediction below which the fetch in it disturbs nobody who learns from the rest
_FETCH_LIMIT = 1.0  # of a log error: a client's stall moves nothing far


# --- the two models as statements (see `statement`): the only place where they are written down


def step_seconds(load: Load, pace: float, coefficients: Sequence[float]) -> float:
    """One decode step of a replica's streams; 0 if there are none."""
    base, per_stream, per_token = coefficients
    return pace * (base * min(1, load.decoding) + per_stream * load.decoding + per_token * load.context_tokens)


def ttft_features(
    uncached: float, cached: float, now: float, step: float, load: Load, speed: float, coefficients: Sequence[float]
) -> tuple[float, ...]:
    """What the TTFT of a request of `uncached` tokens after `cached` ones is linear in, if it meets `load` at `now`.

    `step`: seconds of a decode step there. `left` is the share of the step under way that is still to come: 1 if it is
    not known since when it runs. One that is overdue may take as much longer as it is late: a replica that hangs looks
    fully busy again, not done. Its attention is that of prompts of one length, computed whole.
    """
    base, token, pair, _, _, crowd = coefficients
    begun = load.begun_tokens
    lasts = speed * (base + token * begun + pair * (0.5 * begun * begun / max(1, load.begun))) + crowd * step
    left = min(1, load.prefilling) * min(1, abs(1 - (now - load.since) / lasts))
    ahead = load.prefill_tokens - begun + left * begun
    return 1, uncached, uncached * (cached + 0.5 * uncached), ahead, left, step * max(1, uncached / STEP_TOKENS)


def ttft_terms(
    features: Sequence[float], speed: float, coefficients: Sequence[float]
) -> tuple[float, float, float, float]:
    """The TTFT in parts: what each request takes, its own prefill, the queue, and the decode steps that it shares. The
    latter have a pace of their own; the rest is at the replica's `speed`."""
    base, token, pair, queued, busy, crowd = coefficients
    one, uncached, pairs, ahead, left, crowded = features
    return (
        speed * base * one,
        speed * (token * uncached + pair * pairs),
        speed * (queued * ahead + busy * left),
        crowd * crowded,
    )


def late_seconds(now: float, load: Load) -> float:
    """By how much a replica is late: nothing has come of what it was expected to answer by `load.due`.

    So long at least a request is taken to wait behind those that wait there already, since nothing tells how much
    longer that lasts; it is no part of what is learned.
    """
    return max(0, now - load.due)


def ttft_seconds(
    uncached: float,
    cached: float,
    now: float,
    load: Load,
    speed: float,
    pace: float,
    ttft: Sequence[float],
    step: Sequence[float],
) -> float:
    """All of the TTFT that is predicted."""
    features = ttft_features(uncached, cached, now, step_seconds(load, pace, step), load, speed, ttft)
    base, own, queue, crowd = ttft_terms(features, speed, ttft)
    return base + own + queue + crowd + late_seconds(now, load)


LOAD = SimpleNamespace(**{field.name: symbol(f"load.{field.name}", STANDING) for field in fields(Load)})  # of symbols
TTFT, STEP = (
    [f"{of}_{index}" for index in range(len(prior))] for of, prior in (("ttft", TTFT_PRIOR), ("step", STEP_PRIOR))
)
ZEROS = [[getattr(LOAD, name) for name in names] for names in ZERO_TOGETHER]


def _compiled_ttft() -> Callable[..., tuple[float, ...]]:
    """Return `ttft_seconds` of (uncached, cached, now, load, speed, pace, *ttft, *step), in a tuple. Each placement
    asks once: the statements' ten frames would be 8 % of a decision's instructions."""
    uncached, cached, now, speed, pace, *coefficients = (
        symbol(name, REQUEST) for name in ("uncached", "cached", "now", "speed", "pace", *TTFT, *STEP)
    )
    ttft, step = coefficients[: len(TTFT)], coefficients[len(TTFT) :]
    stated = expressions(ttft_seconds, uncached, cached, now, LOAD, speed, pace, ttft, step)
    return python("ttft_seconds", ["uncached", "cached", "now", "load", "speed", "pace", *TTFT, *STEP], [stated], ZEROS)


_ttft_seconds = _compiled_ttft()


class Fit:
    """One positive linear model, seconds = sum(coefficient x feature), fitted on the log scale.

    `error` is the running |predicted - observed| in seconds. While that of the prior is smaller, the
    prior's coefficients are the ones given out: noise can make it learn nothing, never worse.
    """

    __slots__ = ("coefficients", "count", "error", "_prior", "_learned", "_cov", "_spread", "_prior_error")

    def __init__(self, prior: tuple[float, ...]) -> None:
        self.coefficients = self._prior = prior
        self._learned = list(prior)
        size = range(len(prior))
        self._cov = [[_COMMON + (_OWN if i == j else 0.0) for j in size] for i in size]
        self._spread = 0.3  # running size of the log error: what an outlier is measured by
        self.count = 0
        self.error = self._prior_error = 0.0

    def state(self) -> dict[str, object]:
        """All that was learned, in types that JSON has."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "_prior"}

    def restore(self, state: Mapping[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.coefficients = tuple(self.coefficients)

    def observe(self, features: tuple[float, ...], seconds: float) -> None:
        """Learn from one answer that took `seconds` > 0; features >= 0, in the prior's order."""
        _CORRECTIONS[len(features)](self, *features, seconds)
        self.coefficients = tuple(self._learned) if self.error <= self._prior_error else self._prior

    def _gap(self, predicted: float, by_prior: float, seconds: float) -> float:
        """Keep the errors of what was learned and of the prior, and return the log error that is believed."""
        self.count += 1
        rate = max(0.05, 1 / self.count)
        self.error += rate * (abs(predicted - seconds) - self.error)
        self._prior_error += rate * (abs(by_prior - seconds) - self._prior_error)
        gap = log(seconds / predicted)
        # An outlier moves nothing far (a client's stall, a lost packet); errors that persist
        # widen the spread by at most half each time and are then believed.
        self._spread += 0.1 * (min(abs(gap), 5 * self._spread) - self._spread)
        limit = max(3 * self._spread, 0.1)
        return max(-limit, min(limit, gap))


def _correction(size: int) -> Callable[..., None]:
    """Return the Kalman filter's step for a `Fit` of so many coefficients: `step(fit, *features, seconds)`.

    It is straight-line code: both fits take 1,540 bytecodes and 6 frames a streamed answer; as loops over the matrices
    they would take 2,820 and 34.

    `m`: the coefficients, `b`: the prior's, `p`: their parts of the prediction, then the shares; `c`: the covariance;
    `r`: covariance x shares; `g`: the gain.
    """
    every = range(size)

    def names(of: str) -> str:
        return ", ".join([f"{of}{i}" for i in every])

    def product(one: str, other: str) -> str:
        return " + ".join([f"{one}{i} * {other}{i}" for i in every])

    def matrix(element: Callable[[int, int], str]) -> str:
        return ", ".join([f"[{', '.join([element(i, j) for j in every])}]" for i in every])

    def moved(i: int, j: int) -> str:
        """Drift is a small step back to the prior's covariance: bounded by it, and always positive."""
        own = f" + {_WALK * _OWN!r}" if i == j else ""
        return f"c{i}_{j} + {_WALK!r} * ({_COMMON!r} - c{i}_{j}) - g{i} * r{j}{own}"

    def bounded(i: int) -> list[str]:
        return [
            f"m, low, high = m{i} * exp(g{i} * gap), b{i} / {_BOUND!r}, b{i} * {_BOUND!r}",
            f"m{i} = low if low > m else high if high < m else m",
        ]

    body = [
        f"{names('m')} = fit._learned",
        f"{names('b')} = fit._prior",
        f"{matrix(lambda i, j: f'c{i}_{j}')} = fit._cov",
        *[f"p{i} = m{i} * f{i}" for i in every],
        f"predicted = {' + '.join([f'p{i}' for i in every])}",
        f"gap = fit._gap(predicted, {product('b', 'f')}, seconds)",
        *[f"p{i} /= predicted" for i in every],
        *[f"r{i} = {product(f'c{i}_', 'p')}" for i in every],
        f"weight = 1.0 / ({_NOISE!r} + ({product('r', 'p')}))",
        *[f"g{i} = r{i} * weight" for i in every],
        *[line for i in every for line in bounded(i)],
        f"fit._learned = [{names('m')}]",
        f"fit._cov = [{matrix(moved)}]",
    ]
    return compiled("step", [f"def step(fit, {names('f')}, seconds):", *[f"    {line}" for line in body]], exp=exp)


_CORRECTIONS = {size: _correction(size) for size in (len(TTFT_PRIOR), len(STEP_PRIOR))}


class Fetch:
    """How long a group's replicas take to fetch a token from each slower tier, fitted as `Fit` fits: on the logarithmic
    scale, by each tier's share of what was predicted for the request."""

    __slots__ = ("_seconds", "_variance")

    def __init__(self) -> None:
        self._seconds = {**FETCH_PRIOR, PEER: 0.0}
        self._variance = dict.fromkeys(FETCH_PRIOR, _COMMON + _OWN)

    def state(self) -> dict[str, list[float]]:
        return {tier: [self._seconds[tier], variance] for tier, variance in self._variance.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        for tier, (seconds, variance) in state.items():
            self._seconds[tier], self._variance[tier] = seconds, variance

    def seconds(self, lower: Lower) -> float:
        """Fetching these tokens."""
        each = self._seconds
        return sum([tokens * each[tier] for tier, tokens in lower])

    def observe(self, lower: Lower, compute: float, seconds: float) -> None:
        """A first token came after `seconds` > 0; `compute`: what is predicted for all but the fetch."""
        parts = dict.fromkeys((tier for tier, _ in lower), 0.0)
        for tier, tokens in lower:
            parts[tier] += tokens * self._seconds[tier]
        predicted = compute + sum(parts.values())
        gap = max(-_FETCH_LIMIT, min(_FETCH_LIMIT, log(seconds / predicted)))
        shares = {tier: part / predicted for tier, part in parts.items()}
        weight = 1.0 / (_NOISE + sum(self._variance[tier] * share * share for tier, share in shares.items()))
        for tier, share in shares.items():
            variance, prior = self._variance[tier], FETCH_PRIOR[tier]
            gain = variance * share * weight
            moved = self._seconds[tier] * exp(gain * gap)
            self._seconds[tier] = max(prior / _BOUND, min(prior * _BOUND, moved))
            variance -= gain * share * variance
            self._variance[tier] = variance + _WALK * (_COMMON + _OWN - variance)


class Speed:
    """How many times longer one replica takes than its group's model says."""

    __slots__ = ("value", "delivered", "_bias", "_spread", "_heard", "_decaying")

    def __init__(self) -> None:
        self.value = 1.0
        self.delivered = 1.0  # what its last answers took, with no decay: a mean of some five
        self._bias, self._spread = 0.0, 0.3  # running log error, and its size
        self._heard = False
        self._decaying = False  # it follows the speed of others, until it is heard of

    def state(self) -> list[float]:
        return [self.value, self._bias, self._spread]

    def restore(self, state: list[float]) -> None:
        self.value, self._bias, self._spread = state
        self.delivered = self.value

    def observe(self, predicted: float, seconds: float, trust: float = 1.0) -> None:
        """`predicted` with this speed in it; `trust` 0..1: how much the replica's speed explains of it."""
        self.delivered += _LATEST * (self.value * seconds / predicted - self.delivered)
        gap = log(seconds / predicted)
        self._spread += _SMOOTH * (min(abs(gap), 5 * self._spread) - self._spread)
        gap = max(-3 * self._spread, min(3 * self._spread, gap))
        self._bias += _SMOOTH * (gap - self._bias)
        signal = self._bias / max(self._spread, 0.02)
        self.value *= exp(trust * min(0.5, 0.5 * signal * signal) * gap)
        self.value = min(max(self.value, 1 / _BOUND), _BOUND)
        self._heard, self._decaying = True, False

    def decay(self, target: float, kept: float) -> bool:
        """Keep so much of the distance to a lower `target`, of the logarithms; whether there was any."""
        if self.value <= target:
            return False
        self._decaying = True
        target *= _DECAY_SHARE
        self.value = target * (self.value / target) ** kept
        self._bias *= kept
        return True

    def forget(self) -> None:
        """Called now and then: a replica not heard of since the last call goes back to its group's speed. Not one that
        `decay` leads elsewhere: where the others are quicker than their group's model says, it would stay behind them
        for ever."""
        if not (self._heard or self._decaying):
            self.value **= _FORGET
            self._bias *= _FORGET
        self._heard = False


class Costs:
    """One replica: its group's model and its own speeds.

    Tokens are counts, results seconds. `error` is the running |predicted - observed| TTFT.
    """

    __slots__ = ("group", "ttft", "step", "error", "count")

    def __init__(self, group: CostGroup) -> None:
        self.group = group
        self.ttft, self.step = Speed(), Speed()
        self.error, self.count = 0.0, 0

    @property
    def is_fading(self) -> bool:
        """Whether the speeds by which it is chosen are well below those of its last answers."""
        return any(speed.value < _FADED * speed.delivered for speed in (self.ttft, self.step))

    def as_delivered(self) -> Costs:
        """Return these costs with the speeds of the replica's last answers. Those by which it is chosen go towards the
        others' between its answers, so that it is tried again: one at an eighth of its speed was taken for 1.7 times as
        slow."""
        made = Costs(self.group)
        made.ttft.value, made.step.value = self.ttft.delivered, self.step.delivered
        return made

    def prefill_seconds(self, uncached: int, context: int) -> float:
        """Computing `uncached` tokens after `context` cached ones."""
        return ttft_terms(
            self._features(_IDLE, uncached, context, UNTIMED), self.ttft.value, self.group.ttft.coefficients
        )[1]

    def step_seconds(self, load: Load) -> float:
        """One decode step of the streams there now; 0 if there are none."""
        return step_seconds(load, self.step.value, self.group.step.coefficients)

    def ttft_seconds(self, load: Load, uncached: int, context: int, now: float = UNTIMED) -> float:
        """Time to the first token for a request that meets `load`, at `now`."""
        group = self.group
        return _ttft_seconds(
            uncached,
            context,
            now,
            load,
            self.ttft.value,
            self.step.value,
            *group.ttft.coefficients,
            *group.step.coefficients,
        )[0]

    def ttft_parts(
        self, load: Load, uncached: int, context: int, now: float = UNTIMED
    ) -> tuple[float, float, float, float]:
        """The same in the parts that `ttft_terms` names, with `backlog_seconds`: for who is admitted by it."""
        base, own, queue, crowd = self._learned_parts(load, uncached, context, now)
        return base, own, queue + self.backlog_seconds(load, now) + late_seconds(now, load), crowd

    def punctual_seconds(self, load: Load, uncached: int, context: int, now: float = UNTIMED) -> float:
        """The same if the replica is not late: what is held against what was observed."""
        return sum(self._learned_parts(load, uncached, context, now))

    def _learned_parts(self, load: Load, uncached: int, context: int, now: float) -> tuple[float, float, float, float]:
        return ttft_terms(self._features(load, uncached, context, now), self.ttft.value, self.group.ttft.coefficients)

    def backlog_seconds(self, load: Load, now: float = UNTIMED) -> float:
        """By how much longer prompts that wait for more than a step take than `queued` has it, at least.

        An engine computes them no quicker than a prompt that it gets alone, `STEP_TOKENS` a step, and each step has its
        fixed cost and decodes: on average with half of those prompts, which are streams once they are computed. What
        `queued` says was learned behind few, where a request shares a step with those before it. That is near enough
        to choose a replica by; whoever is admitted by its first token has to know of a crowd before the crowd has
        taught it.
        """
        if load.prefill_tokens <= STEP_TOKENS:
            return 0.0
        ahead = max(0.0, self._features(load, 0, 0, now)[3] - STEP_TOKENS)
        speed, (base, token, pair, queued, _, crowd) = self.ttft.value, self.group.ttft.coefficients
        each = 0.5 * load.prefill_tokens / max(1, load.prefilling)
        context = load.context_tokens + 0.5 * load.prefill_tokens
        step = self.stream_step(load.decoding + 0.5 * load.prefilling, context)
        least = speed * (token + pair * each) + (speed * base + crowd * step) / STEP_TOKENS
        return max(0.0, least - speed * queued) * ahead

    def answer_seconds(self, load: Load, uncached: int, context: int, output: float, now: float = UNTIMED) -> float:
        """Time to the last of `output` tokens, with the streams that are there now."""
        return self.ttft_seconds(load, uncached, context, now) + self.decode_seconds(load, uncached + context, output)

    def decode_seconds(self, load: Load, tokens: int, output: float) -> float:
        """From the first of `output` tokens after a prompt of `tokens` to the last, with the streams there now."""
        return max(0.0, output - 1) * self.stream_step(load.decoding + 1, load.context_tokens + tokens + 0.5 * output)

    def stream_step(self, streams: float, context: float) -> float:
        """One decode step of so many streams, at least one, with so many tokens of context in all."""
        base, per_stream, per_token = self.group.step.coefficients
        return self.step.value * (base + per_stream * streams + per_token * context)

    def observe_ttft(
        self, seconds: float, uncached: int, cached: int, before: Load, at: float = UNTIMED, lower: Lower = ()
    ) -> None:
        """A first token came after `seconds`; `before` is the load it met, `at` when (both a Reservation's). `lower`:
        which of the `cached` tokens were fetched. Time spent on those says nothing of computing: where it is much, only
        the fetch is learned from it."""
        if lower and seconds > 0:
            fetch, compute = self.group.fetch, self.punctual_seconds(before, uncached, cached, at)
            fetched = fetch.seconds(lower)
            if fetched > _ASIDE * (fetched + compute):
                fetch.observe(lower, compute, seconds)
                return
            seconds -= fetched
        if seconds <= 0:
            return
        speed = self.ttft.value
        features = self._features(before, uncached, cached, at)
        terms = ttft_terms(features, speed, self.group.ttft.coefficients)
        predicted = sum(terms)
        self.count += 1
        self.error += max(0.05, 1 / self.count) * (abs(predicted - seconds) - self.error)
        # A queue's length in seconds is the engine's luck with batches more than its speed.
        self.ttft.observe(predicted, seconds, sum(terms[:2]) / predicted)
        if self.group.changes is not None:
            self.group.changes.tell(self)
        self.group.learn("ttft", (*features[:5], features[5] / speed), seconds / speed)

    def observe_itl(self, seconds_per_token: float, decoding: int, context_tokens: int) -> None:
        """A stream's mean time a token, among so many streams (itself included) with so much context."""
        if seconds_per_token <= 0:
            return
        base, per_stream, per_token = self.group.step.coefficients
        speed = self.step.value
        self.step.observe(speed * (base + per_stream * decoding + per_token * context_tokens), seconds_per_token)
        if self.group.changes is not None:
            self.group.changes.tell(self)
        self.group.learn("step", (1.0, decoding, context_tokens), seconds_per_token / speed)

    def _features(self, load: Load, uncached: int, cached: int, now: float) -> tuple[float, ...]:
        speed = self.ttft.value
        return ttft_features(uncached, cached, now, self.step_seconds(load), load, speed, self.group.ttft.coefficients)


_IDLE = Load()


class Learned(TypedDict):
    """What a group has learned, in types that JSON has. `replicas`: the states of both speeds, the error and the count
    of each; `fetch`: by tier."""

    ttft: dict[str, object]
    step: dict[str, object]
    fetch: NotRequired[dict[str, list[float]]]
    replicas: dict[str, list[Any]]


class CostGroup:
    """Replicas of one kind: one model for all, which a new replica starts from. `learned` is the `state` of another
    group, to go on from."""

    def __init__(self, learned: Learned | None = None) -> None:
        self.ttft, self.step, self.fetch = Fit(TTFT_PRIOR), Fit(STEP_PRIOR), Fetch()
        self._members: dict[str, Costs] = {}
        self._turns: list[Costs] = []
        self.changes: Changes[Costs] | None = None  # members whose speeds changed, once somebody follows them
        self._known: dict[str, list[Any]] = {}
        if learned is not None:
            self.ttft.restore(learned["ttft"])
            self.step.restore(learned["step"])
            self.fetch.restore(learned.get("fetch", {}))
            self._known = dict(learned["replicas"])

    def follow(self) -> Changes[Costs]:
        """The changes from now on."""
        if self.changes is None:
            self.changes = Changes()
        return self.changes

    def state(self) -> Learned:
        """What was learned: 2 kB, and 150 bytes a replica."""
        replicas = {
            name: [one.ttft.state(), one.step.state(), one.error, one.count] for name, one in self._members.items()
        }
        return {
            "ttft": self.ttft.state(),
            "step": self.step.state(),
            "fetch": self.fetch.state(),
            "replicas": replicas,
        }

    def add(self, replica: str) -> Costs:
        """This replica's costs, the same object until `remove`."""
        if replica not in self._members:
            costs = self._members[replica] = Costs(self)
            if (known := self._known.pop(replica, None)) is not None:
                ttft, step, costs.error, costs.count = known
                costs.ttft.restore(ttft)
                costs.step.restore(step)
        return self._members[replica]

    def remove(self, replica: str) -> None:
        self._members.pop(replica, None)

    def decay_idle(self, idle: Collection[Costs], used: Collection[Costs], seconds: float) -> None:
        """Replicas that others were chosen over for `seconds` more: those thought slower go towards the speed of the
        others, so that they are tried again, however few requests there are to go by."""
        kept = 0.5 ** (seconds / _DECAY_HALF_LIFE)
        ttft = exp(sum(log(one.ttft.value) for one in used) / len(used))
        step = exp(sum(log(one.step.value) for one in used) / len(used))
        for one in idle:
            if one.ttft.decay(ttft, kept) | one.step.decay(step, kept) and self.changes is not None:
                self.changes.tell(one)

    def learn(self, which: str, features: tuple[float, ...], seconds: float) -> None:
        """One observation, as the group's model should have predicted it."""
        getattr(self, which).observe(features, seconds)
        if not self._turns:
            self._turns = list(self._members.values())
        if self._turns:
            member = self._turns.pop()
            member.ttft.forget()
            member.step.forget()
            if self.changes is not None:
                self.changes.tell(member)

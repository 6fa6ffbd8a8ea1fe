"""Predicted seconds, learned online from the replicas' measured latencies.

Two models, linear in their features, with positive coefficients:

    TTFT = base + token x uncached + pair x uncached x (cached + uncached / 2)
           + queued x uncached tokens ahead + busy (if a prefill is ahead) + crowd x decode step there x steps
    step = decode_base + decode_seq x streams + decode_ctx x their context tokens

An engine works in steps. A prompt waits for the rest of the current step (`busy`), then shares its own steps with the
prompts ahead of it (`queued`: first come, first served, one token budget) and with one token of each decoding stream
(`crowd`). The fixed cost of each step is in `base`. A long prompt takes several `steps`, each together with
all streams (on Mooncake's trace, three seeds, p99 was 1.4 % lower than with one step for every prompt). Where the start
of the current prefill step is known, `busy` and the tokens in that step count only by the share of the step that is
`left`.

The coefficients, here called the shape, are learned once for a *group* of replicas of one kind. Each replica has a
speed of its own, a factor on its group's prediction. When whole shapes were learned for each replica, some got no
requests: identical replicas diverged by their first few requests (base 6.6 ms against 3.6), and the one that looked
slow got no traffic that would have corrected this.

The shape is fitted by recursive least squares on a logarithmic scale: the state is the logarithm of the coefficients,
an observation is log(seconds), and its gradient is each term's share of the prediction (an extended Kalman filter
without dynamics). So coefficients stay positive, an engine half as fast is as far away as one twice as fast, and errors
count relatively, as queueing noise does. The prior covariance has a large part common to all coefficients: the speed is
found first, then the shape.

A replica's speed is an exponential average whose gain is the tracking signal of Trigg and Leach ("Exponential smoothing
with an adaptive response rate", Operational Research Quarterly 18(1), 1967): small under noise, large once errors keep
their sign. The speed of a replica that gets no requests returns to the group's. If the replica is passed over while
others get requests, its speed moves to theirs within seconds, so that a replica once found slow is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import exp, log
from typing import Any, NotRequired, TypedDict, cast

from .ledger import UNTIMED, Changes, Load

# An 8B model on one data-centre GPU (Dynamo 1.6.1's mocker defaults: 15 us a token, 4.2e-10 s a
# token squared, 16 ms a prefill step, 6 ms a decode step). Other engines may differ tenfold; a dozen
# requests correct that, and until then it suffices that the ratios are those of an engine.
TTFT_PRIOR = (0.016, 15e-6, 8.4e-10, 12e-6, 0.008, 1.0)
STEP_PRIOR = (0.006, 50e-6, 0.1e-6)
# Prompt tokens computed in one step: vLLM's default on large GPUs. `crowd` learns the effect of another setting.
STEP_TOKENS = 8192
_COMMON, _OWN = 1.0, 0.5  # prior variance of the log coefficients: the part common to all, and each one's own part
_WALK = 1e-3  # the share of its distance to the prior by which the covariance moves back at each observation
_NOISE = 0.05  # the variance of log(observed / predicted) that no model explains
_BOUND = 100.0  # a coefficient, or a speed, stays within a hundredfold of its prior
_SMOOTH = 0.1  # smoothing factor of a speed's running means of errors
# The speed of a passed-over replica moves to _DECAY_SHARE of the others'; _DECAY_HALF_LIFE is the half-life of the
# distance, in seconds. Once the replica counts as a little faster than the others, it is tried and measured again:
# after 6 s if it was thought twice as slow.
_DECAY_HALF_LIFE, _DECAY_SHARE = 2.0, 0.9
_LATEST, _FADED = 0.3, 0.5  # smoothing factor of `Speed.delivered`; a speed below _FADED of it has faded
_FORGET = 0.99  # the share of the log speed that remains after a call of `Speed.forget`

# Tokens in slower tiers, in the prompt's order: (tier, number of adjacent tokens).
Lower = tuple[tuple[str, int], ...]
# Seconds to bring one token's keys and values back to the GPU: 128 KiB a token (Llama 3 8B in 16 bits), at 25 GB/s from
# host memory (PCIe 4.0 x16), 6 GB/s from NVMe and 2.5 GB/s from another machine (25 Gbit/s, 80 % of it). These are what
# is assumed before anything is learned.
FETCH_PRIOR = {tier: 131_072 / bandwidth for tier, bandwidth in (("cpu", 25e9), ("disk", 6e9), ("remote", 2.5e9))}
PEER = "peer"  # the tier of tokens fetched from another replica's memory; `Pull` has their seconds
_ASIDE = 0.1  # if a fetch takes up to this share of the predicted TTFT, the rest is accurate enough to learn from
_FETCH_LIMIT = 1.0  # bound of one observation's log error, so that a client's stall does not move the estimate far


class Fit:
    """One linear model with positive coefficients, seconds = sum(coefficient x feature), fitted on the log scale.

    `prior`: the coefficients before anything was learned. `error` is the running mean of |predicted - observed| in
    seconds. While the prior's error is smaller, `coefficients` are the prior's: noise can keep the model from learning,
    but never make it worse.
    """

    __slots__ = ("coefficients", "count", "error", "_prior", "_learned", "_cov", "_spread", "_prior_error")

    def __init__(self, prior: tuple[float, ...]) -> None:
        self.coefficients = self._prior = prior
        self._learned = list(prior)
        size = range(len(prior))
        self._cov = [[_COMMON + (_OWN if i == j else 0.0) for j in size] for i in size]
        self._spread = 0.3  # running size of the log error, which bounds outliers
        self.count = 0
        self.error = self._prior_error = 0.0

    def state(self) -> dict[str, object]:
        """Return everything that the model has learned, as JSON types, for `restore`."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "_prior"}

    def restore(self, state: Mapping[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.coefficients = tuple(self.coefficients)

    def observe(self, features: tuple[float, ...], seconds: float) -> None:
        """Learn from one observation of `seconds` > 0; `features`: numbers >= 0, one for each coefficient."""
        _CORRECTIONS[len(features)](self, *features, seconds)
        self.coefficients = tuple(self._learned) if self.error <= self._prior_error else self._prior

    def _gap(self, predicted: float, by_prior: float, seconds: float) -> float:
        """Update the running errors of the learned and the prior coefficients; return the error to learn from.

        It is log(observed / predicted seconds), bounded so that single outliers count less. `predicted`, `by_prior`:
        seconds predicted by the learned and by the prior coefficients. `seconds`: the observed ones.
        """
        self.count += 1
        rate = max(0.05, 1 / self.count)
        self.error += rate * (abs(predicted - seconds) - self.error)
        self._prior_error += rate * (abs(by_prior - seconds) - self._prior_error)
        gap = log(seconds / predicted)
        # Bound outliers (a client's stall, a lost packet); errors that persist widen the spread by
        # at most half each time, and count in full after that.
        self._spread += 0.1 * (min(abs(gap), 5 * self._spread) - self._spread)
        limit = max(3 * self._spread, 0.1)
        return max(-limit, min(limit, gap))


def _correction(size: int) -> Callable[..., None]:
    """Return the Kalman step for a `Fit` of `size` coefficients: a function `step(fit, *features, seconds)`.

    It is generated as straight-line code: both fits take 1,540 bytecodes and 6 frames per streamed answer; as loops
    over matrices they would take 2,820 and 34.

    The generated variables: `m`: the coefficients; `b`: those of the prior; `f`: the features; `p`: each coefficient's
    part of the prediction, then its share; `c`: the covariance; `r`: covariance x shares; `g`: the gain.
    """
    every = range(size)

    def names(of: str) -> str:
        return ", ".join([f"{of}{i}" for i in every])

    def product(one: str, other: str) -> str:
        return " + ".join([f"{one}{i} * {other}{i}" for i in every])

    def matrix(element: Callable[[int, int], str]) -> str:
        return ", ".join([f"[{', '.join([element(i, j) for j in every])}]" for i in every])

    def moved(i: int, j: int) -> str:
        """Return the expression for a covariance element's new value, as source code.

        It includes a small drift back to the prior, so that the covariance stays bounded and positive.
        """
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
    source = "\n    ".join([f"def step(fit, {names('f')}, seconds):", *body])
    defined: dict[str, Any] = {"exp": exp}
    exec(compile(source, f"<Kalman step of {size} coefficients>", "exec"), defined)
    return cast("Callable[..., None]", defined["step"])


_CORRECTIONS = {size: _correction(size) for size in (len(TTFT_PRIOR), len(STEP_PRIOR))}


class Fetch:
    """The learned seconds per token that a group's replicas take to fetch KV cache from each slower memory tier.

    Each tier's figure is fitted on the logarithmic scale, as in `Fit`. It learns from an observation in proportion to
    the tier's share of the predicted seconds.
    """

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
        """Return the predicted seconds to fetch these tokens; `lower`: how many in each slower tier."""
        each = self._seconds
        return sum([tokens * each[tier] for tier, tokens in lower])

    def observe(self, lower: Lower, compute: float, seconds: float) -> None:
        """Learn from a first token that came `seconds` > 0 after its request was sent.

        `lower`: the tokens that were fetched, by tier; `compute`: the predicted seconds of everything but the fetch.
        """
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
    """The learned factor by which one replica is slower than its group's model predicts (`value`)."""

    __slots__ = ("value", "delivered", "_bias", "_spread", "_heard", "_decaying")

    def __init__(self) -> None:
        self.value = 1.0
        self.delivered = 1.0  # speed of the last answers (a mean of about five), without `decay` and `forget`
        self._bias, self._spread = 0.0, 0.3  # running means of the log error and of its size
        self._heard = False  # whether there was an observation since the last `forget`
        self._decaying = False  # whether `decay` has moved it towards the others' speed since the last observation

    def state(self) -> list[float]:
        return [self.value, self._bias, self._spread]

    def restore(self, state: list[float]) -> None:
        self.value, self._bias, self._spread = state
        self.delivered = self.value

    def observe(self, predicted: float, seconds: float, trust: float = 1.0) -> None:
        """Learn from one measured time.

        `predicted`, `seconds`: the seconds predicted with this speed, and measured; `trust`: 0..1, the share of the
            predicted seconds that depends on the replica's speed.
        """
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
        """Move this speed towards that of the other replicas, `target`, if theirs is lower; return whether it is.

        A lower speed means faster answers. The speed moves towards 0.9 times the target, so that this replica is tried
        again. `kept`: the share of the distance, on the logarithmic scale, that remains.
        """
        if self.value <= target:
            return False
        self._decaying = True
        target *= _DECAY_SHARE
        self.value = target * (self.value / target) ** kept
        self._bias *= kept
        return True

    def forget(self) -> None:
        """Move this speed towards 1, the group's speed, if there was no observation since the last call.

        A speed that `decay` moves is left alone. If the other replicas are faster than the group's model predicts,
        moving it to 1 would leave this replica slower than them for ever.
        """
        if not (self._heard or self._decaying):
            self.value **= _FORGET
            self._bias *= _FORGET
        self._heard = False


class Costs:
    """The predicted costs of one replica in seconds: its group's model and its own speeds.

    `ttft`, `step`: its speeds for prefill and for decode steps; `error`: the running mean of |predicted - observed|
        TTFT.
    """

    __slots__ = ("group", "ttft", "step", "error", "count")

    def __init__(self, group: CostGroup) -> None:
        self.group = group
        self.ttft, self.step = Speed(), Speed()
        self.error, self.count = 0.0, 0

    @property
    def is_fading(self) -> bool:
        """Whether a speed of this replica has decayed to less than half of the speed of its last answers.

        It decays while the replica gets no requests, so that the replica is tried again.
        """
        return any(speed.value < _FADED * speed.delivered for speed in (self.ttft, self.step))

    def as_delivered(self) -> Costs:
        """Return a copy with the speeds that the replica's last answers showed, without the decay since then.

        Decayed speeds understate how slow a replica was: one that ran at an eighth of its speed counted as only 1.7
        times as slow.
        """
        made = Costs(self.group)
        made.ttft.value, made.step.value = self.ttft.delivered, self.step.delivered
        return made

    def prefill_seconds(self, uncached: int, context: int) -> float:
        """Return the seconds to compute `uncached` prompt tokens after `context` cached ones on an idle replica.

        The fixed cost of a step is not included.
        """
        return self._ttft(_IDLE, uncached, context, UNTIMED)[1][1]

    def step_seconds(self, load: Load) -> float:
        """Return the seconds of one decode step with the replica's present streams; 0 if it has none."""
        return self.stream_step(load.decoding, load.context_tokens) if load.decoding else 0.0

    def ttft_seconds(self, load: Load, uncached: int, context: int, now: float = UNTIMED) -> float:
        """Return the predicted TTFT in seconds of a request that meets `load` at time `now`.

        `uncached`: prompt tokens to compute; `context`: cached tokens before them.
        """
        base, own, queue, crowd = self._ttft(load, uncached, context, now)[1]
        return base + own + queue + crowd + max(0.0, now - load.due)

    def ttft_parts(
        self, load: Load, uncached: int, context: int, now: float = UNTIMED
    ) -> tuple[float, float, float, float]:
        """Return the predicted TTFT in four parts, in seconds: fixed cost, own prefill, queue, and shared decode steps.

        The queue includes the backlog (`backlog_seconds`) and the time by which the replica's next answer is overdue.
        Admission predicts latencies from these parts.
        """
        base, own, queue, crowd = self._ttft(load, uncached, context, now)[1]
        return base, own, queue + self.backlog_seconds(load, now) + max(0.0, now - load.due), crowd

    def punctual_seconds(self, load: Load, uncached: int, context: int, now: float = UNTIMED) -> float:
        """Return the predicted TTFT in seconds, to compare with a measured one.

        It leaves out the time by which the replica's next answer is overdue.
        """
        return sum(self._ttft(load, uncached, context, now)[1])

    def _ttft(
        self, load: Load, uncached: float, cached: float, now: float
    ) -> tuple[tuple[float, ...], tuple[float, float, float, float]]:
        """Return the features of the TTFT model for a request that meets `load`, and the four parts of its TTFT.

        The parts are those of `ttft_parts`, in seconds: fixed cost, own prefill, queue, and shared decode steps. The
        first three scale with the replica's speed of prefill; decode steps have a speed of their own. No part includes
        the time by which an answer is overdue, because nothing is learned from that time.

        The variable `left` is the share of the current prefill step that remains, 1 if the step's start is unknown. An
        overdue step is assumed to take as much longer as it is late already. A replica that hangs therefore looks fully
        busy, not done. The attention in the step is estimated as if its prompts were of equal length and uncached.
        `least_time` has the same formulas, and a test compares both.
        """
        speed, step = self.ttft.value, self.step_seconds(load)
        base, token, pair, queued, busy, crowd = self.group.ttft.coefficients
        ahead = left = 0.0
        if load.prefilling:
            begun = load.begun_tokens
            lasts = speed * (base + token * begun + pair * (0.5 * begun * begun / max(1, load.begun))) + crowd * step
            left = min(1, abs(1 - (now - load.since) / lasts))
            ahead = load.prefill_tokens - begun + left * begun
        pairs, shared = uncached * (cached + 0.5 * uncached), step * max(1, uncached / STEP_TOKENS)
        return (1, uncached, pairs, ahead, left, shared), (
            speed * base,
            speed * (token * uncached + pair * pairs),
            speed * (queued * ahead + busy * left),
            crowd * shared,
        )

    def backlog_seconds(self, load: Load, now: float = UNTIMED) -> float:
        """Return by how many seconds, at least, a long queue takes longer than the coefficient `queued` predicts.

        A queue is long if it has more prompt tokens than one step computes (STEP_TOKENS). An engine computes at most
        STEP_TOKENS of the waiting tokens in a step. Each step also takes its fixed cost and a decode step. On average
        half of the waiting prompts decode in it too, since a prompt decodes once it is computed.
        `queued` was learned behind few prompts, where a request shares a step with those before it. That suffices to
        choose a replica. But admission by TTFT must allow for a burst before anything could be learned from the burst.
        """
        if load.prefill_tokens <= STEP_TOKENS:
            return 0.0
        ahead = max(0.0, self._ttft(load, 0, 0, now)[0][3] - STEP_TOKENS)
        speed, (base, token, pair, queued, _, crowd) = self.ttft.value, self.group.ttft.coefficients
        each = 0.5 * load.prefill_tokens / max(1, load.prefilling)
        context = load.context_tokens + 0.5 * load.prefill_tokens
        step = self.stream_step(load.decoding + 0.5 * load.prefilling, context)
        least = speed * (token + pair * each) + (speed * base + crowd * step) / STEP_TOKENS
        return max(0.0, least - speed * queued) * ahead

    def answer_seconds(self, load: Load, uncached: int, context: int, output: float, now: float = UNTIMED) -> float:
        """Return the predicted seconds from sending a request to the last of its `output` tokens.

        `load`: the replica's present load; `uncached`, `context`: prompt tokens to compute, and cached ones before
        them.
        """
        return self.ttft_seconds(load, uncached, context, now) + self.decode_seconds(load, uncached + context, output)

    def decode_seconds(self, load: Load, tokens: int, output: float) -> float:
        """Return the predicted seconds from the first to the last of `output` tokens after `tokens` prompt tokens."""
        return max(0.0, output - 1) * self.stream_step(load.decoding + 1, load.context_tokens + tokens + 0.5 * output)

    def stream_step(self, streams: float, context: float) -> float:
        """Return the seconds of one decode step of `streams` >= 1 streams that have `context` tokens together."""
        base, per_stream, per_token = self.group.step.coefficients
        return self.step.value * (base + per_stream * streams + per_token * context)

    def observe_ttft(
        self, seconds: float, uncached: int, cached: int, before: Load, at: float = UNTIMED, lower: Lower = ()
    ) -> None:
        """Learn from a first token that came `seconds` after its request was sent.

        `uncached`, `cached`: the prompt tokens that the engine computed, and those that it had in its cache.
        `before`, `at`: the load that the request met, and the time at which it was reserved (from its Reservation).
        `lower`: those of the cached tokens that were fetched from slower tiers. If the fetch took a large part of the
        predicted time, only the seconds of the fetch are learned, as the measurement then says little about computing.
        """
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
        features, terms = self._ttft(before, uncached, cached, at)
        predicted = sum(terms)
        self.count += 1
        self.error += max(0.05, 1 / self.count) * (abs(predicted - seconds) - self.error)
        # The time spent in a queue depends more on how requests were batched than on the replica's speed.
        self.ttft.observe(predicted, seconds, sum(terms[:2]) / predicted)
        if self.group.changes is not None:
            self.group.changes.tell(self)
        self.group.learn("ttft", (*features[:5], features[5] / speed), seconds / speed)

    def observe_itl(self, seconds_per_token: float, decoding: int, context_tokens: int) -> None:
        """Learn the time of decode steps from an answer's mean seconds per token.

        `decoding`, `context_tokens`: streams and context tokens on the replica, this stream included.
        """
        if seconds_per_token <= 0:
            return
        base, per_stream, per_token = self.group.step.coefficients
        speed = self.step.value
        self.step.observe(speed * (base + per_stream * decoding + per_token * context_tokens), seconds_per_token)
        if self.group.changes is not None:
            self.group.changes.tell(self)
        self.group.learn("step", (1.0, decoding, context_tokens), seconds_per_token / speed)


_IDLE = Load()


class Learned(TypedDict):
    """All that a cost group has learned, as JSON types.

    `ttft`, `step`: the states of its two models; `fetch`: by slower tier, the state of its fetch time; `replicas`: by
        name, the states of both speeds, the error and the count of observations.
    """

    ttft: dict[str, object]
    step: dict[str, object]
    fetch: NotRequired[dict[str, list[float]]]
    replicas: dict[str, list[Any]]


class CostGroup:
    """A group of replicas of one kind that share one learned model of costs, from which a new replica starts.

    `learned`: the `state` of an earlier group, to continue from.
    """

    def __init__(self, learned: Learned | None = None) -> None:
        self.ttft, self.step, self.fetch = Fit(TTFT_PRIOR), Fit(STEP_PRIOR), Fetch()
        self._members: dict[str, Costs] = {}
        self._turns: list[Costs] = []
        self.changes: Changes[Costs] | None = None  # log of members whose speeds change; None until `follow` is called
        self._known: dict[str, list[Any]] = {}
        if learned is not None:
            self.ttft.restore(learned["ttft"])
            self.step.restore(learned["step"])
            self.fetch.restore(learned.get("fetch", {}))
            self._known = dict(learned["replicas"])

    def follow(self) -> Changes[Costs]:
        """Return the log of the replicas whose speeds change, as their `Costs`; the log begins at the first call."""
        if self.changes is None:
            self.changes = Changes()
        return self.changes

    def state(self) -> Learned:
        """Return everything that the group has learned, as JSON types: 2 kB, and 150 bytes for each replica."""
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
        """Return the costs of a replica, which is added if it is new; the same object until `remove`."""
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
        """Move the speeds of `idle` replicas towards the mean of the `used` ones, where the idle ones are slower.

        In this way slow replicas are tried again, however few requests there are. `seconds`: the time since the last
        call.
        """
        kept = 0.5 ** (seconds / _DECAY_HALF_LIFE)
        ttft = exp(sum(log(one.ttft.value) for one in used) / len(used))
        step = exp(sum(log(one.step.value) for one in used) / len(used))
        for one in idle:
            if one.ttft.decay(ttft, kept) | one.step.decay(step, kept) and self.changes is not None:
                self.changes.tell(one)

    def learn(self, which: str, features: tuple[float, ...], seconds: float) -> None:
        """Learn from one observation, and move the speeds of the replica whose turn it is towards the group's.

        `which`: the model that learns, "ttft" or "step". `features`: the values of that model's features. `seconds`:
        the observed time, divided by the replica's speed. At each call it is another replica's turn (`Speed.forget`).
        """
        getattr(self, which).observe(features, seconds)
        if not self._turns:
            self._turns = list(self._members.values())
        if self._turns:
            member = self._turns.pop()
            member.ttft.forget()
            member.step.forget()
            if self.changes is not None:
                self.changes.tell(member)

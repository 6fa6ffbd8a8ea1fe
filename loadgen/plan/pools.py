"""How many prefill and how many decode replicas hold a load within an SLO, by the arithmetic of a timing profile.

Requests arrive at random (Poisson), all alike. A prefill replica computes one prompt after the other, and a prompt goes
to the first that is free: a queue with several servers and equal service times, whose wait is half of that with
exponential ones (Erlang's C). A decode replica's streams are shared evenly; their number is arrivals times the time
that an answer takes (Little), which depends on their number; around that mean they vary as a Poisson number does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from loadgen.plan.transfers import Transfer, last_token_seconds, prefill_seconds, step_seconds
from replicas.simulated.profile import Profile

_ROUNDS = 2_000  # of the fixed point; a pool that has not settled by then can't keep up
_SETTLED = 1e-6  # streams, or share of a step


@dataclass(frozen=True, slots=True)
class Load:
    """`rate` requests a second of so many tokens; limits in seconds, for `share` of the requests."""

    rate: float
    prompt: int
    output: int
    ttft: float | None
    tpot: float | None
    share: float


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of both pools. `transfer` is of a prompt of the load; `streams`: how many requests' cache a decode
    replica holds."""

    profile: Profile
    transfer: Transfer
    link: float | None
    streams: float


@dataclass(frozen=True, slots=True)
class Pool:
    """What a pool of so many replicas makes of a load. `limits`: what it does not hold; empty where it holds all."""

    replicas: int
    limits: tuple[str, ...]
    busy: float  # share of its capacity: of time for prefill, of streams for decode
    link_busy: float | None
    ttft: float | None = None  # s; None where its prompts pile up
    wait: float | None = None
    streams: float = 0.0
    room: float = 0.0  # streams that fit
    step: float = 0.0


@dataclass(frozen=True, slots=True)
class Sizing:
    """The smallest pools, or the largest that was tried (then with limits), and why one replica less is too few."""

    pool: Pool
    one_less: Pool | None


def decode_pool(load: Load, engines: Engines, replicas: int) -> Pool:
    room = min(float(engines.profile.max_num_seqs), engines.streams)
    mean = _mean_streams(load, engines.profile, replicas, room)
    spread = max(0.0, NormalDist().inv_cdf(load.share)) * math.sqrt(mean * replicas)
    streams = max(1.0, mean + spread / replicas)
    step = decode_seconds(load, engines.profile, replicas, min(streams, room))
    limits = ["TPOT"] if load.tpot and step > load.tpot else []
    if streams > room and not limits:
        limits.append("max_num_seqs" if engines.streams > engines.profile.max_num_seqs else "KV cache")
    link_busy, link_limit = _link(load, engines, replicas)
    return Pool(replicas, (*limits, *link_limit), streams / room, link_busy, streams=streams, room=room, step=step)


def _mean_streams(load: Load, profile: Profile, replicas: int, room: float) -> float:
    """Of a replica; more than `room` where they would outgrow it."""
    streams = 1.0
    for _ in range(_ROUNDS):
        before = streams
        step = decode_seconds(load, profile, replicas, max(1.0, before))
        streams = load.rate * max(1, load.output - 1) * step / replicas
        if abs(streams - before) < _SETTLED or streams > room:
            return streams
    return math.inf


def decode_seconds(load: Load, profile: Profile, replicas: int, streams: float) -> float:
    """The mean step with so many streams. The last token of a prompt that was fetched is computed in one of them."""
    alone = step = step_seconds(profile, streams, load.prompt + load.output / 2)
    for _ in range(_ROUNDS):
        arrived = 1 - math.exp(-load.rate / replicas * step)  # share of the steps in which a prompt has come
        before, step = step, alone + arrived * last_token_seconds(profile, load.prompt)
        if step - before < _SETTLED * alone:
            break
    return step


def prefill_pool(load: Load, engines: Engines, replicas: int, decode_step: float) -> Pool:
    profile = engines.profile
    service = prefill_seconds(profile, load.prompt)
    busy = load.rate * service / replicas
    link_busy, link_limit = _link(load, engines, replicas)
    if busy >= 1:
        return Pool(replicas, ("prefill rate", *link_limit), busy, link_busy)
    wait = waited(load.rate * service, replicas, service, load.share)
    first = 1.5 * decode_step + last_token_seconds(profile, load.prompt)  # half of the step that it meets, and its own
    ttft = wait + engines.transfer.compute_seconds + (engines.transfer.seconds or 0.0) + first
    limits = ("TTFT",) if load.ttft and ttft > load.ttft else ()
    return Pool(replicas, (*limits, *link_limit), busy, link_busy, ttft, wait)


def waited(offered: float, servers: int, service: float, share: float) -> float:
    """Seconds that `share` of the requests wait at most; `offered` is arrivals times `service`, below `servers`."""
    blocked = 1.0
    for number in range(1, servers + 1):  # Erlang's B, by its recursion
        blocked = offered * blocked / (number + offered * blocked)
    waits = blocked / (1 - offered / servers * (1 - blocked))
    if waits <= 1 - share:
        return 0.0
    return math.log(waits / (1 - share)) * service / (2 * (servers - offered))


def _link(load: Load, engines: Engines, replicas: int) -> tuple[float | None, tuple[str, ...]]:
    """Return which share of a replica's link is busy, None without a link, and the limit that this exceeds, if any."""
    busy = load.rate * engines.transfer.bytes / engines.link / replicas if engines.link else None
    return busy, ("link",) if busy and busy >= 1 else ()


def smallest(pool: Callable[[int], Pool], most: int) -> Sizing:
    """The fewest replicas of `pool(replicas)` without a limit, up to `most`."""
    before = None
    for number in range(1, most + 1):
        found = pool(number)
        if not found.limits:
            return Sizing(found, before)
        before = found
    return Sizing(found, None)

"""The numbers of prefill and decode replicas that keep an SLO, computed from a timing profile.

Requests are equal and arrive as a Poisson process. A prefill replica computes one prompt at a time, and a prompt goes
to the first free replica: an M/D/c queue, whose wait is approximated as half that of M/M/c (Erlang's C). Decode
replicas share the streams (requests that are decoding) evenly. The mean number of streams is the arrival rate times the
duration of an answer (Little's law). That duration itself depends on the number of streams, so the mean is found by
iteration. Around its mean the number varies as a Poisson variable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from loadgen.plan.transfers import Transfer, last_token_seconds, prefill_seconds, step_seconds
from replicas.simulated.profile import Profile

_ROUNDS = 2_000  # fixed-point iterations at most; a pool that has not converged by then cannot keep up
_SETTLED = 1e-6  # converged: the last iteration changed fewer streams, or a smaller share of the step's time, than this


@dataclass(frozen=True, slots=True)
class Load:
    """A load of equal requests, and the limits within which they are to be answered."""

    rate: float  # requests per second
    prompt: int  # tokens of each
    output: int  # tokens of each
    ttft: float | None  # limit in seconds
    tpot: float | None  # limit in seconds
    share: float  # of the requests that must be within the limits


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a prefill and a decode pool: their timing, and the cost of moving KV caches between the pools."""

    profile: Profile
    transfer: Transfer  # of the KV cache of one prompt of the load
    link: float | None  # bytes per second between two replicas; None: not given
    streams: float  # requests whose KV cache fits in a decode replica


@dataclass(frozen=True, slots=True)
class Pool:
    """How a pool of `replicas` serves a load.

    A prefill pool sets `ttft` and `wait`, a decode pool `streams`, `room` and `step`; both set the other fields.
    """

    replicas: int
    limits: tuple[str, ...]  # names of the limits that it exceeds; empty if it suffices
    busy: float  # share of its capacity in use: of a replica's time in prefill, of its room for streams in decode
    link_busy: float | None  # share of a replica's link that is in use; None without a link
    ttft: float | None = None  # seconds; None if prompts pile up
    wait: float | None = None  # seconds of the TTFT before the prefill begins
    streams: float = 0.0  # requests that are decoding in a replica
    room: float = 0.0  # streams that fit in a replica
    step: float = 0.0  # seconds of a decode step


@dataclass(frozen=True, slots=True)
class Sizing:
    """The smallest pool that suffices, and the pool with one replica less, which shows why more replicas are needed.

    If no pool suffices, `pool` is the largest that was tried. `one_less` is None then, and also if one replica
    suffices.
    """

    pool: Pool
    one_less: Pool | None


def decode_pool(load: Load, engines: Engines, replicas: int) -> Pool:
    """Return how a decode pool of `replicas` replicas serves the load."""
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
    """Return the mean number of requests that decode in a replica, found by iteration.

    `room`: the number that fits in a replica. The iteration stops when the mean exceeds it, so a larger result only
    says that the replica is overloaded. The result is infinite if the iteration does not converge.
    """
    streams = 1.0
    for _ in range(_ROUNDS):
        before = streams
        step = decode_seconds(load, profile, replicas, max(1.0, before))
        streams = load.rate * max(1, load.output - 1) * step / replicas
        if abs(streams - before) < _SETTLED or streams > room:
            return streams
    return math.inf


def decode_seconds(load: Load, profile: Profile, replicas: int, streams: float) -> float:
    """Return the mean seconds of a decode step in a replica that decodes `streams` requests.

    For each prompt that arrives from a prefill replica, one step takes longer: it also computes the prompt's last
    token.
    """
    alone = step = step_seconds(profile, streams, load.prompt + load.output / 2)
    for _ in range(_ROUNDS):
        arrived = 1 - math.exp(-load.rate / replicas * step)  # share of the steps in which a prompt arrives
        before, step = step, alone + arrived * last_token_seconds(profile, load.prompt)
        if step - before < _SETTLED * alone:
            break
    return step


def prefill_pool(load: Load, engines: Engines, replicas: int, decode_step: float) -> Pool:
    """Return how a prefill pool of `replicas` replicas serves the load.

    `decode_step`: seconds of a step in the decode pool, where a request still waits for its first token.
    """
    profile = engines.profile
    service = prefill_seconds(profile, load.prompt)
    busy = load.rate * service / replicas
    link_busy, link_limit = _link(load, engines, replicas)
    if busy >= 1:
        return Pool(replicas, ("prefill rate", *link_limit), busy, link_busy)
    wait = waited(load.rate * service, replicas, service, load.share)
    first = 1.5 * decode_step + last_token_seconds(profile, load.prompt)  # half a running step, and its own step
    ttft = wait + engines.transfer.compute_seconds + (engines.transfer.seconds or 0.0) + first
    limits = ("TTFT",) if load.ttft and ttft > load.ttft else ()
    return Pool(replicas, (*limits, *link_limit), busy, link_busy, ttft, wait)


def waited(offered: float, servers: int, service: float, share: float) -> float:
    """Return the wait for a free server, in seconds, that a `share` of the requests does not exceed.

    `service`: seconds that a server takes for a request; `offered`: arrival rate times `service`, below `servers`.
    """
    blocked = 1.0
    for number in range(1, servers + 1):  # Erlang's B, by its recursion
        blocked = offered * blocked / (number + offered * blocked)
    waits = blocked / (1 - offered / servers * (1 - blocked))
    if waits <= 1 - share:
        return 0.0
    return math.log(waits / (1 - share)) * service / (2 * (servers - offered))


def _link(load: Load, engines: Engines, replicas: int) -> tuple[float | None, tuple[str, ...]]:
    """Return the share of a replica's network link that is in use, and the names of the limits that it exceeds.

    The share is None if no link is given. The names are ("link",) if the link is full, else ().
    """
    busy = load.rate * engines.transfer.bytes / engines.link / replicas if engines.link else None
    return busy, ("link",) if busy and busy >= 1 else ()


def smallest(pool: Callable[[int], Pool], most: int) -> Sizing:
    """Return the smallest pool that exceeds no limit, or the pool of `most` replicas if none suffices.

    `pool`: returns the pool with a given number of replicas.
    """
    before = None
    for number in range(1, most + 1):
        found = pool(number)
        if not found.limits:
            return Sizing(found, before)
        before = found
    return Sizing(found, None)

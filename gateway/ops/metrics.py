"""The gateway's metrics, and their text for Prometheus.

A *series* is one metric with one combination of label values; a request changes about ten series. With
prometheus_client, a labelled increment and an observation take 3.4 us together on this project's machine (a lock, a
label tuple and a child object each). The plain attributes here take 0.4 us, and become text at a scrape. Nothing is
locked, since the single-threaded event loop is the only writer. A scrape runs on the event loop too, and yields to
other work every few milliseconds: with 1,024 replicas the page has 70,000 lines.

Every series is on the page before its first event, with the value 0. Prometheus' `rate()` does not see a counter that
appears with the value 1, so the first failure of a kind would be missed. A metric therefore states the values that its
labels can have. Values that are known only at run time, such as the replicas' ids, come from `Metrics(known)`.

Names are `hitherto_*` in base units. Labels have few and bounded values: endpoints, outcomes, replicas. When a replica
is removed, its series are removed too (`forget`). Nothing that a client sends ever becomes a label.

Counters and histograms are written as things happen. Values that the gateway has anyway (load, states, the size of the
cache map) are read at scrape time: `metrics.read_from(callable)`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from bisect import bisect_left, bisect_right
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate, chain, islice, product, repeat
from operator import add, contains
from time import perf_counter
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, GCCollector, ProcessCollector, generate_latest

from policies.control import FROM
from policies.decisions import DECISIONS, REASONS

from ..prompt.prompt import MEDIA, PROMPT_PATHS
from ..tenants.limits import WORDS

# Seconds. TTFT and whole requests: from a cached prompt on a fast GPU to a queue that lasts minutes.
LATENCY_BUCKETS = (.005, .01, .02, .04, .06, .08, .1, .15, .2, .3, .4, .6, .8, 1, 1.5, 2, 3, 5, 8, 15, 30, 60, 120, 300)  # fmt: skip
# The gateway's own stages take microseconds; above 10 ms something is wrong.
STAGE_BUCKETS = (5e-6, 1e-5, 2e-5, 3e-5, 5e-5, 7.5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, .25)  # fmt: skip

# Times of answers by priority class and model. There are 20 buckets a decade, so each bound is 12 % above the one
# before it, and every quantile is precise to 12 %.
FIGURE_BUCKETS = tuple(float(f"{10 ** (step / 20 - 3):.3g}") for step in range(111))  # 1 ms to 316 s
TOKEN_BUCKETS = tuple(bound for bound in FIGURE_BUCKETS if bound <= 10.0)

# Delays of the event loop's timers, whose resolution is a millisecond. A quarter of a second delays clients noticeably.
DELAY_BUCKETS = (.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5)  # fmt: skip

log = logging.getLogger("hitherto.metrics")

SLICE_SECONDS = 0.002  # the longest time for which a scrape occupies the event loop
LOOK_LINES = 64  # lines of the page that are made between two looks at the clock

PLAIN = re.compile(r'[^"\\\n]*').fullmatch  # a label value that needs no escaping

# The values of labels that several metrics have.
APIS = (*PROMPT_PATHS.values(), "other")
STATUSES = ("2xx", "3xx", "4xx", "5xx", "aborted", "cut")
STATUS_FAULTS = tuple(f"status {code}" for code in (401, 403, 404, 429, 500, 502, 503, 504))
CONNECTION_FAULTS = ("connect", "closed", "protocol", "hung", "aborted")
ANSWER_FAULTS = ("error answer", "foreign answer")  # an error after a status 200; an answer that no engine wrote
# Phases of a request: preparing its prompt, waiting in the gateway's queue, failed attempts, from the start of the
# successful attempt to its first byte (the engine's queue and prefill), and from there to the last byte.
PHASES = ("prepare", "queue", "retry", "engine", "decode")
# Why no replica resumed a stream that broke off.
NOT_CONTINUED = (
    "n", "tools", "stored", "field", "framing", "events", "budget", "ids", "prompt", "boundary",
    "crashes", "differs", "no replica", "unlike", "replicas", "timeout", "shutting_down",
)  # fmt: skip
LATER: Collection[str] = ()  # for a label whose values are known at run time only, from `Metrics(known)`

# Metrics whose values are read at a scrape: name -> (kind, help, labels). Readers return {name: number} for metrics
# without labels, {name: {value: number}} for one label and {name: {(value, value): number}} for two.
READ = {
    "tenant_running_requests": ("gauge", "Requests of a tenant with limits that have not ended", ("tenant",)),
    "unusable_files": ("gauge", "1 for a file of the settings that cannot be used as it is now; what was read of it before stays in use", ("file",)),
    "inflight_requests": ("gauge", "Requests sent to a replica and not finished", ("replica",)),
    "reservations": ("gauge", "Reservations in the load ledger; zero when the gateway is idle", ()),
    "reserved_prefill_tokens": ("gauge", "Uncached prompt tokens on their way to a first byte", ("replica",)),
    "reserved_context_tokens": ("gauge", "Context tokens of streams past their first byte: prompts, and what has come of answers", ("replica",)),
    "replica_state": ("gauge", "1 for the state the replica is in", ("replica", "state")),
    "replica_models": ("gauge", "1 for each model or adapter that a replica serves", ("replica", "model")),
    "model_gone": ("gauge", "1 for a model or adapter that no replica has served since a pod of it went", ("model",)),
    "replica_waiting_requests": ("gauge", "Requests the engine itself reports as waiting", ("replica",)),
    "replica_running_requests": ("gauge", "Requests the engine itself reports as running", ("replica",)),
    "replica_kv_usage_ratio": ("gauge", "Share of the KV cache in use, as the engine reports it", ("replica",)),
    "replica_restarts": ("counter", "Restarts of a replica the gateway looks after", ("replica",)),
    "queued_requests": ("gauge", "Requests that wait in the gateway's queue", ("class",)),
    "queued_bytes": ("gauge", "Bytes of requests that wait in the gateway's queue", ()),
    "control_level": ("gauge", "Steps that the control of overload takes from lower classes now, of the model's replicas", ("model",)),
    "control_pressure_ratio": ("gauge", "Slowest answers of a class in a window by its limits, 1 at least if refused; else absent", ("class", "model")),
    "more_replicas_wanted": ("gauge", "1 while a class of this model misses its limits, whatever is taken from others", ("model",)),
    "map_blocks": ("gauge", "Distinct blocks in the map of who holds what", ()),
    "map_bytes": ("gauge", "Memory the map takes", ()),
    "map_budget_bytes": ("gauge", "Memory the map may take", ()),
    "map_evicted_blocks": ("counter", "Blocks dropped from the map to stay within its budget", ()),
    "map_replica_blocks": ("gauge", "Blocks the map says a replica holds", ("replica",)),
    "map_role": ("gauge", "1 for how the replica's part of the shared map is kept: joining, follower, leader, standalone", ("replica", "role")),
    "map_redis_up": ("gauge", "1 while the Redis of the shared map answers for all replicas and takes all that this gateway does there", ()),
    "map_leases": ("gauge", "Replicas whose events this gateway follows for all gateways", ()),
    "map_follower_lag_seconds": ("gauge", "From a change's arrival in Redis to its being known here, the worst of the last 5 to 10 s", ()),
    "map_reloads": ("counter", "Parts of the shared map that had to be loaded anew", ()),
    "map_takeovers": ("counter", "Leases taken over from gateways that gave them up or died", ()),
    "map_snapshots": ("counter", "Snapshots of a replica's part written to Redis", ()),
    "ledger_joined": ("gauge", "1 while load is counted in the ledger of all gateways", ()),
    "ledger_repairs": ("counter", "Loads in Redis that were lost or damaged and were mended: what this gateway has on a replica (part), "
                       "or what all have (sum)", ("what",)),
    "map_redis_errors": ("counter", "Calls of Redis for the shared map that failed or took too long", ()),
    "events_state": ("gauge", "1 for the state of the replica's KV event stream: connecting, live, gap, unobserved", ("replica", "state")),
    "event_batches": ("counter", "KV event batches taken in", ("replica",)),
    "event_blocks_stored": ("counter", "Blocks that KV events reported as stored", ("replica",)),
    "event_blocks_removed": ("counter", "Blocks that KV events reported as removed", ("replica",)),
    "event_blocks_orphaned": ("counter", "Blocks of KV events left out as the block before them, or their tokens, are not known", ("replica",)),
    "event_blocks_ignored": ("counter", "Blocks of KV events left out as slower tiers have them in pieces that cannot be mapped, for another cache group, "
                             "from a store that does not tell what goes, or beyond the budget", ("replica",)),
    "event_lag_seconds": ("gauge", "From an engine's sending its last batch of KV events to its being in the map here, by the clocks of both", ("replica",)),
    "event_gaps": ("counter", "Holes in the sequence of KV event batches", ("replica",)),
    "event_batches_replayed": ("counter", "KV event batches fetched again after a gap or on connecting", ("replica",)),
    "client_connections": ("gauge", "Open connections from clients, with those whose TLS handshake is not complete", ()),
    "request_bytes": ("gauge", "Bytes of requests that are received, prepared or have no answer yet; --request-budget bounds them", ()),
    "prompt_memo_bytes": ("gauge", "Memory of the tokens and hashes of prompts that were seen before, up to 256 MiB a process", ()),
    "upstream_connections": ("gauge", "Open connections to a replica, idle ones included", ("replica",)),
    "worker_up": ("gauge", "With --workers: 1 while the worker takes connections", ("worker",)),
    "worker_restarts": ("counter", "With --workers: workers that ended and were replaced", ()),
    "background_failures": ("counter", "Faults of the gateway's own background work, which was started again", ("work",)),
    "policy_failures": ("counter", "Calls of a policy of your own that failed; requests without a choice went where the fewest are", ("policy",)),
    "uptime_seconds": ("gauge", "Time since the gateway started", ()),
    "build_info": ("gauge", "Always 1", ("version", "policy")),
}  # fmt: skip

Reading = Mapping[str, float | Mapping[str | tuple[str, ...], float]]


Labels = tuple[str, ...]  # the values of a series' labels, in their order
Key = str | Labels  # names a series: the values of its labels, or the value of its only label


def labels_of(key: Key) -> Labels:
    """Return the label values of a series as a tuple; `key`: that tuple, or the value of its only label."""
    return (key,) if isinstance(key, str) else key


class Metric:
    """A metric: its name, its help text, and its series by the values of their labels.

    `labels`: for each label, all values that it can have, or LATER if they are known at run time only.
    """

    __slots__ = ("name", "help", "labels", "values")

    def __init__(self, help: str, labels: Mapping[str, Collection[str]]) -> None:
        self.name, self.help, self.labels = "", help, labels
        self.values: dict[Labels, Any] = {}

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def _at(self, label: str) -> int:
        return list(self.labels).index(label)

    def forget(self, label: str, value: str) -> None:
        """Drop the series with this value of a label."""
        if label in self.labels:
            at, values = self._at(label), self.values
            for key in [key for key in values if key[at] == value]:
                del values[key]

    def keys(self, known: Mapping[str, Collection[str]]) -> Iterator[Labels]:
        """Return the label values of all series: first every possible combination, then any other that has counts.

        `known`: the present values of each label whose values are known at run time only.
        """
        possible = [dict.fromkeys(values or known.get(label, ())) for label, values in self.labels.items()]
        return chain(product(*possible), [key for key in self.values if not all(map(contains, possible, key))])


class Counter(Metric):
    """A number per label combination that only grows: `inc("chat", "2xx")`, `inc("r1", by=512)`.

    Code that runs for every request does without the call: `counter.values["chat", "2xx"] += 1`.
    """

    __slots__ = ()

    def __init__(self, help: str, **labels: Collection[str]) -> None:
        super().__init__(help, labels)
        self.values: defaultdict[Labels, float] = defaultdict(int)

    def inc(self, *labels: str, by: float = 1) -> None:
        self.values[labels] += by

    def total(self, **where: str) -> float:
        """Return the sum over all series, or over those with these values of labels (`status="5xx"`)."""
        if len(where) == len(self.labels):
            return self.values.get(tuple(where[label] for label in self.labels), 0)
        places = [(self._at(label), value) for label, value in where.items()]
        return sum(number for key, number in self.values.items() if all(key[place] == value for place, value in places))

    def by(self, label: str, **leave_out: Collection[str]) -> dict[str, float]:
        """Return the sum of the series for each value of a label.

        `leave_out`: by the name of another label, the values whose series are left out of the sums.
        """
        at, sums = self._at(label), {}
        others = [(self._at(name), values) for name, values in leave_out.items()]
        for key, number in self.values.items():
            if not any(key[place] in values for place, values in others):
                sums[key[at]] = sums.get(key[at], 0) + number
        return sums

    def lines(self, known: Mapping[str, Collection[str]]) -> Iterator[str]:
        """Yield the metric's lines of the metrics page.

        `known`: the present values of each label whose values are known at run time only.
        """
        series = ((key, self.values.get(key, 0)) for key in self.keys(known))
        return _lines(self.name, "counter", self.help, self.labels, series)


class Histogram(Metric):
    """A distribution per combination of labels' values: `observe("r1", 0.25)`, `observe(("premium", "m"), 0.25)`.

    Code that runs for every request only appends to a series of `waiting`. `count_waiting` counts these observations
    together: a few times a second, and when the metric is read.

    `bounds`: the upper bounds of the buckets; an observation that equals a bound is in that bound's bucket.
    """

    __slots__ = ("_counts", "bounds", "waiting")

    def __init__(self, help: str, bounds: tuple[float, ...], **labels: Collection[str]) -> None:
        self.waiting: defaultdict[Labels, list[float]] = defaultdict(list)
        super().__init__(help, labels)
        self.bounds = bounds

    @property
    def values(self) -> dict[Labels, list[float]]:  # type: ignore[override]
        """For each series: the count per bucket, the count above the last bound, the sum."""
        self.count_waiting()
        return self._counts

    @values.setter
    def values(self, counts: dict[Labels, list[float]]) -> None:
        self._counts, self.waiting = counts, defaultdict(list)

    def count_waiting(self) -> None:
        """Count the observations that were only appended to `waiting`."""
        for key, numbers in self.waiting.items():
            counts = self._series(key)
            for place, times in Tally(map(bisect_left, repeat(self.bounds), numbers)).items():
                counts[place] += times
            counts[-1] += sum(numbers)
        self.waiting.clear()  # with the keys: those of removed replicas would stay

    def _series(self, key: Labels) -> list[float]:
        return self._counts.get(key) or self._counts.setdefault(key, [0] * (len(self.bounds) + 2))

    def split(self, at: Iterable[float]) -> None:
        """Add bucket bounds at these values, so that observations above and below each are counted exactly.

        Call this before anything is observed.
        """
        assert not self.values
        self.bounds = tuple(sorted({*self.bounds, *at}))

    def observe(self, key: Key, number: float, times: int = 1) -> None:
        """Add an observation to a series, or `times` observations whose mean is `number`."""
        counts = self._series(labels_of(key))
        counts[bisect_left(self.bounds, number)] += times
        counts[-1] += times * number

    def count(self, key: Key) -> int:
        return int(sum(self.values.get(labels_of(key), (0,))[:-1]))

    def mean(self, key: Key) -> float | None:
        """Return the mean of a series, or None if nothing was observed."""
        count = self.count(key)
        return self.values[labels_of(key)][-1] / count if count else None

    def quantile(self, share: float, key: Key | None = None) -> float | None:
        """Estimate the value below which a share (0 to 1) of the observations lies; None if there are none.

        `key`: the series; None: all series together.
        """
        chosen = [*self.values.values()] if key is None else filter(None, [self.values.get(labels_of(key))])
        return quantile(self.bounds, [sum(column) for column in zip(*chosen, strict=True)][:-1], share)

    def lines(self, known: Mapping[str, Collection[str]]) -> Iterator[str]:
        """Yield the metric's text for the metrics page, one piece for each series.

        All lines of a series are made at one moment, and so agree with each other. `known`: the present values of each
        label whose values are known at run time only.
        """
        name, nothing = "hitherto_" + self.name, [0.0] * (len(self.bounds) + 2)
        bounds = [*map(repr, map(float, self.bounds)), "+Inf"]
        yield _head(name, "histogram", self.help)
        for key in self.keys(known):
            counts, pairs = self._counts.get(key, nothing), _label_pairs(self.labels, key)
            labels, more = f"{{{pairs}}}" if pairs else "", f",{pairs}" if pairs else ""
            running = list(accumulate(map(float, counts[:-1])))
            buckets = [f'{name}_bucket{{le="{bound}"{more}}} {count}\n' for bound, count in zip(bounds, running)]
            yield f"{''.join(buckets)}{name}_count{labels} {running[-1]}\n{name}_sum{labels} {float(counts[-1])}\n"


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """Estimate the value below which a share (0 to 1) of the observations lies; None if there are none.

    Within a bucket the value is interpolated linearly, as by Prometheus' histogram_quantile. `bounds`: the upper bounds
    of the buckets. `counts`: the number of observations in each bucket, then the number above the last bound.
    """
    upto = [*accumulate(counts)]
    if not upto or not upto[-1]:
        return None
    rank = share * upto[-1]
    at = bisect_left(upto, rank) if rank else bisect_right(upto, 0.0)
    if at >= len(bounds):
        return bounds[-1]
    lower = bounds[at - 1] if at else 0.0
    return lower + (bounds[at] - lower) * (rank - upto[at] + counts[at]) / counts[at]


class Metrics:
    """The catalogue of all metrics of the gateway; each instance has its own counts."""

    # fmt: off
    # requests, as clients see them
    requests = Counter("Requests answered", path=APIS, status=STATUSES)
    request_seconds = Histogram("From the complete request to the last byte of its whole answer (2xx)", LATENCY_BUCKETS, path=APIS)
    ttft_seconds = Histogram("From the complete request to the first byte of a streamed answer", LATENCY_BUCKETS)
    replica_ttft_seconds = Histogram("From when the replica that answers was sent the request to the first byte of its streamed answer",
        LATENCY_BUCKETS, replica=LATER)
    replica_answer_seconds = Counter("From when the replica that answers was sent the request to the last byte of its complete answer (2xx), in seconds",
        replica=LATER)
    replica_decode_seconds = Counter("Time in which a replica wrote the tokens after the first, of complete answers with one sequence, in seconds",
        replica=LATER)
    replica_decode_tokens = Counter("The tokens that hitherto_replica_decode_seconds_total is of", replica=LATER)
    client_aborts = Counter("Clients that left before their answer was complete", path=APIS)
    stage_seconds = Histogram("Time in the gateway's own stages", STAGE_BUCKETS, stage=("prepare", "prepare_offloaded", "choose"))
    loop_delay_seconds = Histogram("How much later than it was due a timer of the event loop ran, four times a second", DELAY_BUCKETS)
    # prompts
    prompts = Counter("Prompts sent to a replica, but for 4xx answers, by how tokens were found", mode=("exact", "media", "engine", "partly", "text", "load"))
    media_prompts = Counter("Prompts with images, sound or video, by what of their blocks is not known (exact: nothing)", why=tuple(MEDIA))
    prompt_failures = Counter("Prompts not known to their end: a template or tokenizer failed, a body has what is not followed", reason=tuple(PROMPT_PATHS))
    # cached tokens of prompts: predicted when the replica is chosen, and reported by the engine in its answer
    prompt_tokens = Counter("Prompt tokens sent to a replica", replica=LATER)
    predicted_cached_tokens = Counter("Prompt tokens the map said the replica holds, in all tiers", replica=LATER)
    reported_prompt_tokens = Counter("Prompt tokens of the answers that reported cached tokens", replica=LATER)
    reported_cached_tokens = Counter("Prompt tokens the engine reported as cached", replica=LATER)
    prefill_saved_tokens = Counter("Prompt tokens not computed again: as reported, else as predicted", replica=LATER)
    prediction_error_tokens = Counter("Distance of prediction and report", replica=LATER, direction=("over", "under"))
    predictions = Counter("Predictions that a report confirmed or corrected", replica=LATER, outcome=("equal", "over", "under"))
    prompt_mismatches = Counter("Exact prompts of which the replica counted another number of tokens", replica=LATER)
    heals = Counter("Times a replica's part of the map was repaired because it had drifted", replica=LATER)
    # choosing and sending
    replica_requests = Counter("Requests by the replica sent them last, first legs by their prefiller, and how they ended", replica=LATER, status=STATUSES)
    long_prompts = Counter("Prompts worth tokenizing only once, by what the replica was sent", replica=LATER, sent=("ids", "text"))
    ids_refused = Counter("Times a replica was found not to take token ids, or not ours", replica=LATER)
    token_id_checks = Counter("Long prompts of which a replica was asked for the token ids it makes itself, by how they compare with the gateway's",
        replica=LATER, outcome=("same", "different", "unanswered"))
    shared_decisions = Counter("With Redis: choices made in the shared ledger, by this gateway's own view because that came too late, or because Redis is away",
        outcome=("shared", "late", "away"))
    shared_decision_seconds = Histogram("Time a request waited for the shared ledger's choice", STAGE_BUCKETS, outcome=("shared",))
    decisions = Counter("Decisions for another proxy, by how they ended: it told, or its lease ran out", outcome=("done", "expired"))
    # shadow mode: the choices of policies that are only compared with the one in effect
    shadow_decisions = Counter("Choices a policy in shadow would have made, by whether the acting one made the same", policy=LATER, choice=("same", "other"))
    shadow_legs = Counter("Choices of a policy in shadow where replicas have roles, by whether two of them would share the request", policy=LATER,
        choice=("apart", "whole"))
    shadow_prefill_tokens = Counter("Prompt tokens to compute that its other choices would have saved, or cost", policy=LATER, effect=("saved", "cost"))
    shadow_ttft_seconds = Counter("Predicted time to the first token that its other choices would have saved, or cost", policy=LATER,
        effect=("saved", "cost"))
    shadow_answer_seconds = Counter("Predicted time to the last token that its other choices would have saved, or cost", policy=LATER,
        effect=("saved", "cost"))
    # admission, where requests have classes or limits
    admission = Counter("Requests judged before they were sent: admitted, queued, refused, sent though `reject` would have refused them (observed), "
        "sent with a capped answer (degraded) or to the slow pool (spilled), or left by their clients while they waited",
        **{"decision": DECISIONS, "class": LATER, "reason": REASONS})
    control_steps = Counter("Steps that the control of overload took from a class, or gave back", step=tuple(FROM),
        **{"class": LATER}, change=("taken", "undone"))
    slo_requests = Counter("Answers to requests that were admitted with limits, by whether they kept them, missed them or failed; of answers in one "
        "piece those with both limits, by TTFT + TPOT for each further token",
        **{"class": LATER, "model": LATER, "outcome": ("met", "missed", "failed")})
    predicted_answers = Counter("Streamed answers that came from where their requests were admitted to", **{"class": LATER})
    predicted_ttft_seconds = Counter("Sum of the times to the first token that were predicted when those were admitted", **{"class": LATER})
    delivered_ttft_seconds = Counter("Sum of the times to the first token that they had", **{"class": LATER})
    queue_seconds = Histogram("Time that requests which were sent had waited in the gateway's queue", LATENCY_BUCKETS, **{"class": LATER})
    # times and tokens of answers by class and model; counted with classes, with limits, or with --slo-figures
    answer_ttft_seconds = Histogram("From the complete request to the first byte of a streamed answer", FIGURE_BUCKETS, **{"class": LATER, "model": LATER})
    answer_itl_seconds = Histogram("From one piece of a streamed answer to the next, as the mean of those within a quarter of a second; longer pauses alone",
        TOKEN_BUCKETS, **{"class": LATER, "model": LATER})
    answer_tpot_seconds = Histogram("Time per output token after the first, one mean per streamed answer", TOKEN_BUCKETS, **{"class": LATER, "model": LATER})
    answer_e2e_seconds = Histogram("From the complete request to the last byte of a complete answer", FIGURE_BUCKETS, **{"class": LATER, "model": LATER})
    answer_tokens = Counter("Tokens of complete answers and their prompts; cached ones are part of the input",
        **{"class": LATER, "model": LATER, "kind": ("input", "cached", "output")})
    answer_phase_seconds = Counter("Time of complete answers by phase; its rate is the mean number of requests in that phase",
        **{"class": LATER, "phase": PHASES})
    # tenants, with --api-keys
    tenant_requests = Counter("Requests of a tenant, by how they were answered", tenant=LATER, status=STATUSES)
    tenant_tokens = Counter("Tokens of a tenant's requests; cached ones are part of the input", tenant=LATER, kind=("input", "cached", "output"))
    tenant_refusals = Counter("Requests of a tenant that one of its limits refused", tenant=LATER,
        limit=tuple(WORDS))
    limit_decisions = Counter("With Redis: claims of tenants' limits that were decided there, by what it told last because that came too late, or "
        "by this gateway's share because Redis is away", outcome=("shared", "late", "away"))
    usage_lines_dropped = Counter("Lines of the usage log that could not be written, or not fast enough")
    peer_pulls = Counter("Prompts whose beginning a replica was to take from another's memory, by whether its engine found all of it "
        "or the request failed (unknown: it did not tell)",
        replica=LATER, outcome=("complete", "missed", "failed", "unknown"))
    # retries, legs and failures
    retries = Counter("Requests sent to another replica before their first byte, or once more to the same one",
        reason=(*CONNECTION_FAULTS, *STATUS_FAULTS, *ANSWER_FAULTS, "removed", "replaced", "left", "elsewhere", "ids", "reconnect", "not kept", "leg refused",
                "transfer stalled", "prefill failed", "differs"))
    continued_streams = Counter("With --continue-streams: breaks of streams that were resumed, by how: from the ids, by the same request again, "
        "or only the end was missing (over)", way=("ids", "repeat", "over"))
    streams_not_continued = Counter("With --continue-streams: streams that broke off and were not resumed", reason=NOT_CONTINUED)
    continue_gap_seconds = Histogram("From a stream's break to the first text of the replica that resumed it", LATENCY_BUCKETS, way=("ids", "repeat"))
    leg_choices = Counter("Requests that could have been computed on two replicas, by whether they were", choice=("apart", "whole"))
    legs = Counter("Legs of requests that were computed on two replicas, by how each ended", leg=("prefill", "decode"),
        outcome=("complete", "failed", "not kept", "refused", "abandoned"))
    leg_failures = Counter("The legs that hitherto_legs_total counts as failed, by why", leg=("prefill", "decode"),
        reason=(*CONNECTION_FAULTS, *STATUS_FAULTS, *ANSWER_FAULTS, "status 5xx", "removed", "replaced", "left", "own", "elsewhere", "transfer stalled",
                "shutting_down", "prefill failed", "timeout", "stalled", "differs"))
    transfer_seconds = Histogram("What a second leg's first token took beyond what its replica takes itself", LATENCY_BUCKETS, replica=LATER)
    predicted_transfer_seconds = Counter("What the transfers of hitherto_transfer_seconds were predicted to take, in seconds", replica=LATER)
    upstream_errors = Counter("Failures of replicas", replica=LATER,
        kind=(*CONNECTION_FAULTS, *STATUS_FAULTS, *ANSWER_FAULTS, "status 5xx", "timeout", "stalled", "request"))
    rejections = Counter("Requests refused without asking a replica, or by all engines that were asked (engines_...)",
        reason=("400", "401", "403", "405", "408", "413", "415", "417", "429", "431", "500", "501", "503", "505",
            "path_not_allowed", "model_not_found", "model_not_known", "no_replica_ready", "shutting_down",
            "engines_full", "engines_unauthorized"))
    # fmt: on

    def __init__(self, known: Mapping[str, Collection[str]] = {}) -> None:
        """Create the metrics with nothing counted.

        `known`: for each of the labels `replica`, `policy`, `class`, `model` and `tenant`, a collection of its values,
        which the caller keeps up to date and each scrape reads.
        """
        self._known = dict(known)
        self._histograms: list[Histogram] = []
        for name, metric in vars(Metrics).items():
            if isinstance(metric, Metric):
                setattr(self, name, made := copy(metric))
                made.values = metric.values.copy()
                if isinstance(made, Histogram):
                    self._histograms.append(made)
        self._readers: list[Callable[[], Reading]] = []
        # Called before counts are read, so that counts made in other threads can be added first.
        self.before_reading: list[Callable[[], None]] = []
        # Called with the name of a part of the page that could not be made, and the error; other parts are served.
        self.on_failure: Callable[[str, Exception], None] = _log_failure
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        GCCollector(registry=self._process)

    def all(self) -> Iterator[Any]:
        return (value for value in vars(self).values() if isinstance(value, Metric))

    def know(self, label: str, values: Collection[str]) -> None:
        """Set the collection from which each scrape reads a label's present values."""
        self._known[label] = values

    def read_from(self, reader: Callable[[], Reading]) -> None:
        """Add a reader, a function that each scrape calls for values that are not counted here.

        It returns the values by the names of their metrics, which READ defines with type, help text and labels.
        """
        self._readers.append(reader)

    def forget(self, value: str, label: str = "replica") -> None:
        """Drop all series with this value of a label, such as a removed replica's, so that labels stay bounded."""
        for metric in self.all():
            metric.forget(label, value)

    def counts(self) -> dict[str, list]:
        """Return all counts with their label values as JSON data, which `add` takes in another process."""
        self._prepare_reading()
        return {metric.name: [*map(list, metric.values.items())] for metric in self.all()}

    def add(self, counts: Mapping[str, list]) -> None:
        """Add the counts of another process, as `counts` returned them."""
        for name, series in counts.items():
            values = getattr(self, name).values
            for key, by in ((tuple(labels), by) for labels, by in series):
                if isinstance(by, list):
                    values[key] = [*map(add, by, values.get(key, [0] * len(by)))]
                else:
                    values[key] += by

    def count_waiting(self) -> None:
        """Count the observations that wait in histograms; called a few times a second, so that few wait."""
        for histogram in self._histograms:
            histogram.count_waiting()

    def _prepare_reading(self) -> None:
        for prepare in self.before_reading:
            prepare()

    def _lines(self) -> Iterator[str]:
        self._prepare_reading()
        for metric in self.all():
            yield from metric.lines(self._known)
        for reader in self._readers:
            try:
                yield from lines(reader())
            except Exception as error:  # a bug in one part must not hide the others
                self.on_failure(getattr(reader, "__qualname__", repr(reader)), error)

    def _of_process(self) -> bytes:
        try:
            return generate_latest(self._process)
        except Exception as error:
            self.on_failure("the process", error)
            return b""

    async def exposition(self) -> tuple[bytes, str]:
        """Return the body for GET /metrics in Prometheus' text format, and its content type."""
        parts, lines, begun = [self._of_process()], self._lines(), perf_counter()
        while some := "".join(islice(lines, LOOK_LINES)):
            parts.append(some.encode())
            if perf_counter() - begun > SLICE_SECONDS:
                await asyncio.sleep(0)
                begun = perf_counter()
        return b"".join(parts), CONTENT_TYPE_LATEST


def _log_failure(part: str, error: Exception) -> None:
    log.error("the metrics of %s cannot be read", part, exc_info=error)


# --- Prometheus' text format


def lines(reading: Reading) -> Iterator[str]:
    """Yield the lines of the metrics page for values that a reader returned (`Metrics.read_from`).

    `reading`: the values by the names of their metrics, which READ defines with type, help text and labels.
    """
    for name, numbers in reading.items():
        kind, help, labels = READ[name]
        series = ((labels_of(key), number) for key, number in (numbers.items() if labels else [((), numbers)]))
        yield from _lines(name, kind, help, labels, series)


def _lines(
    name: str, kind: str, help: str, labels: Iterable[str], series: Iterable[tuple[Labels, float]]
) -> Iterator[str]:
    """Yield the HELP and TYPE lines of a counter or gauge, then a line for each combination of label values."""
    name = f"hitherto_{name}_total" if kind == "counter" else f"hitherto_{name}"
    yield _head(name, kind, help)
    for values, number in series:
        pairs = _label_pairs(labels, values)
        yield f"{name}{{{pairs}}} {float(number)}\n" if pairs else f"{name} {float(number)}\n"


def _label_pairs(labels: Iterable[str], values: Labels) -> str:
    return ",".join([f'{label}="{_escaped(value)}"' for label, value in zip(labels, values)])


def _head(name: str, kind: str, help: str) -> str:
    return f"# HELP {name} {help}\n# TYPE {name} {kind}\n"


def _escaped(value: str) -> str:
    return value if PLAIN(value) else value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

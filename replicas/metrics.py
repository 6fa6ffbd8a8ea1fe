"""The few Prometheus series that routing needs, read from an engine's /metrics page.

A full parse of an engine's page takes milliseconds, and a gateway reads one page per replica and second. So only the
lines with the needed names are searched and read. Each kind of engine has its own names (`MetricNames`); older names
are tried after current ones, and a series that is missing gives None.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

_COUNTERS = attrgetter("running", "waiting", "kv_usage", "prefix_queries", "prefix_hits", "prompted", "generated")


class Scrape(NamedTuple):
    """The figures of one engine's /metrics page; None where the page has none.

    With several data-parallel ranks, counts are the sums over all ranks, `kv_usage` is that of the fullest rank, and
    `ranks` has the figures of each rank, in order.
    """

    at: float  # monotonic seconds when the page was read
    running: int | None  # requests
    waiting: int | None  # requests
    kv_usage: float | None  # share of the KV cache in use, 0 to 1
    prefix_queries: int | None  # tokens looked up since the process began
    prefix_hits: int | None  # tokens found in the cache since the process began
    started: float | None  # unix time at which the process began
    block_size: int | None  # tokens
    num_blocks: int | None  # blocks in the KV cache
    prefix_caching: bool | None = None
    ranks: tuple["Scrape", ...] = ()
    engines: tuple[int, ...] = ()  # the ranks' numbers as the engine counts them
    prompted: int | None = None  # prompt tokens of requests that reached their first token
    generated: int | None = None  # tokens
    external_queries: int | None = None  # tokens looked up in slower tiers; None for an engine without those
    cache_dtype: str | None = None  # data type of the KV cache, by the engine's own name
    too_many: int = 0  # ranks reported, if they exceed the limit; the engine then counts as one
    created: float | None = None  # unix time of a counter's creation, to the microsecond: unique to a process
    # tokens of a full-attention block, if the engine reports them apart from `block_size`, which is one GPU's share
    attention_block_size: int | None = None

    @property
    def counters(self) -> tuple[float | None, ...]:
        """The values that show progress: while an engine has work, each of its steps changes at least one of them."""
        counters: tuple[float | None, ...] = _COUNTERS(self)
        return counters


class MetricNames(NamedTuple):
    """The names that one kind of engine gives its Prometheus series.

    A tuple has the current name, then older ones, which are tried in turn.
    """

    prefix: str  # of all its series
    running: tuple[bytes, ...]
    waiting: tuple[bytes, ...]
    kv_usage: tuple[bytes, ...]
    prefix_queries: tuple[bytes, ...]
    prefix_hits: tuple[bytes, ...]
    prompted: tuple[bytes, ...]
    generated: tuple[bytes, ...]
    # The start time of the process, or, as some deployments export no process metrics, the creation time of a counter,
    # which changes with a restart too.
    started: tuple[bytes, ...]
    cache_config: bytes  # the series whose labels, named in the next lines, give the cache's size
    block_size: bytes
    num_blocks: bytes  # label with the number of blocks, which may be for all ranks together
    rank_tokens: bytes  # label with the tokens that one rank's cache holds
    prefix_caching: bytes  # label with True or False
    rank: bytes  # label of every series with the number of the data-parallel rank
    external_queries: tuple[bytes, ...] = ()
    cache_dtype: bytes = b""
    created: tuple[bytes, ...] = ()
    attention_block_size: bytes = b""


# How the ranks' values of a field are combined; all but `kv_usage` are counts.
COMBINED: dict[str, Callable[[Iterable[float]], float]] = {
    "kv_usage": max,
    **dict.fromkeys("running waiting prefix_queries prefix_hits prompted generated external_queries".split(), sum),
}
# Fields that are read only to see whether they change; `missing` does not report them.
MOVING = ("prompted", "generated", "external_queries")
# Fields read from the labels of the cache configuration.
CACHE = ("block_size", "num_blocks", "rank_tokens", "prefix_caching", "cache_dtype", "attention_block_size")

MOST_RANKS = 128  # ranks of one page: each becomes a replica
MOST_SAMPLES = 4096  # lines read that begin with one name: one for each rank and value of other labels
MOST_LINE = 1 << 14  # bytes; the longest line, the cache configuration's, has some 2,000
# The lookbehind allows a match only at the start of a name: a long word without a value would otherwise be scanned
# again from each of its letters.
_LABEL = re.compile(rb'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')


def _lines(page: bytes, name: bytes) -> list[tuple[bytes, float]]:
    """Return (labels, value) of each sample of the series with exactly this name."""
    found, at, lines = [], 0, 0
    if page.startswith(name):
        page = b"\n" + page
    while lines < MOST_SAMPLES and (at := page.find(b"\n" + name, at)) >= 0:
        end = page.find(b"\n", at + 1)
        line = page[at + 1 + len(name) : end if end >= 0 else len(page)]
        at, lines = at + len(name), lines + 1
        if len(line) > MOST_LINE:
            continue
        labels, value = b"", line
        if line[:1] == b"{":
            labels, _, value = line[1:].rpartition(b"}")
        elif line[:1] not in (b" ", b"\t"):
            continue  # a longer name with the same beginning
        try:
            found.append((labels, float(value.split()[0])))
        except (ValueError, IndexError):
            continue
    return found


def _found(page: bytes, names: tuple[bytes, ...], rank: bytes) -> list[tuple[int | None, float]]:
    """Return (data-parallel rank, value) of each sample of a series.

    `names`: of the series, current one first; the first name with samples is used. `rank`: the label with the rank's
    number.
    """
    samples = next(filter(None, (_lines(page, name) for name in names)), [])
    return [(_rank(labels, rank), value) for labels, value in samples]


def _rank(labels: bytes, label: bytes) -> int | None:
    engine = re.search(rb'(?:^|,)\s*%b="(\d{1,6})"' % label, labels)
    return int(engine[1]) if engine else None


def _cache_configs(page: bytes, names: MetricNames) -> list[tuple[int | None, dict[str, bytes]]]:
    """Return (data-parallel rank, labels) of each cache configuration on the page that has a block size.

    The labels are given by the field names in `CACHE`, not by the engine's own names.
    """
    found = []
    for labels, _ in _lines(page, names.cache_config):
        told = dict(_LABEL.findall(labels))
        config = {field: told.get(getattr(names, field), b"") for field in CACHE}
        if _number(config["block_size"]):
            found.append((_rank(labels, names.rank), config))
    return found


def parse(page: bytes, now: float, names: MetricNames) -> Scrape:
    """Return the figures of a Prometheus text page. Never raises.

    `now`: monotonic seconds when the page was read.
    """
    samples = {field: _found(page, getattr(names, field), names.rank) for field in COMBINED}
    configs = _cache_configs(page, names)
    started = min((value for _, value in _found(page, names.started, names.rank)), default=None)
    made = (value for _, value in _found(page, names.created, names.rank))
    created = min((value for value in made if value % 1.0), default=None)  # whole seconds do not identify a process
    blank = Scrape(now, None, None, None, None, None, started, None, None, created=created)
    whole = _scrape(blank, {field: [value for _, value in found] for field, found in samples.items()}, configs[:1])
    # With several API servers, gauges of a rank appear with its first request; counters and the configuration are there
    # from the start.
    ranked = (rank for found in samples.values() for rank, _ in found)
    numbers = sorted({rank for rank in chain(ranked, (rank for rank, _ in configs)) if rank is not None})
    if len(numbers) > MOST_RANKS:
        return whole._replace(too_many=len(numbers))
    if len(numbers) < 2:
        return whole._replace(engines=tuple(numbers))
    share = max((_number(config["num_blocks"]) for _, config in configs), default=0) // len(numbers) or None
    of_rank: dict[int | None, dict[str, list[float]]] = {number: {} for number in (None, *numbers)}
    for field, found in samples.items():
        for rank, value in found:
            of_rank[rank].setdefault(field, []).append(value)
    first: dict[int | None, tuple[int | None, dict[str, bytes]]] = {}
    for one in configs:
        first.setdefault(one[0], one)
    ranks = []
    for number in numbers:
        config = first.get(number) or first.get(None)
        ranks.append(_scrape(blank, of_rank[number], [config] if config else [], share))
    return whole._replace(ranks=tuple(ranks), engines=tuple(numbers))


def _scrape(
    blank: Scrape,
    samples: Mapping[str, list[float]],
    configs: Sequence[tuple[int | None, dict[str, bytes]]],
    share: int | None = None,
) -> Scrape:
    """Return the figures of one rank, or of all ranks combined.

    `blank`: a Scrape with the fields that do not depend on the rank. `samples`: the values by field. `configs`: the
    cache configuration, if there is one. `share`: for one rank, how many of the engine's blocks it has; None: all ranks
    are combined.
    `share` is used only if the configuration lacks the size of the rank's cache in tokens. The label with the number of
    blocks cannot be used for one rank, as it may count several ranks: vLLM (0.28, 0.32) adds the blocks up as ranks
    report, so with two ranks of 256 blocks the labels say 256 and 512, or 512 for both.
    """
    told = {field: COMBINED[field](values) for field, values in samples.items() if values}
    usage = told.pop("kv_usage", None)
    # a page may have NaN and infinities
    figures: dict[str, Any] = {field: int(value) for field, value in told.items() if abs(value) < 2**63}
    if usage is not None and usage == usage:
        figures["kv_usage"] = min(max(usage, 0.0), 1.0)
    found = blank._replace(**figures)
    for _, config in configs:
        size = _number(config["attention_block_size"]) or _number(config["block_size"])
        blocks = _number(config["rank_tokens"]) // size or share if share else _number(config["num_blocks"])
        found = found._replace(
            block_size=_number(config["block_size"]),
            attention_block_size=_number(config["attention_block_size"]) or None,
            num_blocks=blocks or None,
            prefix_caching={b"True": True, b"False": False}.get(config["prefix_caching"]),
            cache_dtype=config["cache_dtype"].decode(errors="replace") or None,
        )
    return found if configs or not share else found._replace(num_blocks=share)


def _number(digits: bytes) -> int:
    """Return the number in a text; 0 if the text is no number of at most ten digits."""
    return int(digits) if digits.isdigit() and len(digits) <= 10 else 0


def missing(page: bytes, names: MetricNames) -> list[str]:
    """Return the needed series that a /metrics page lacks, each by its current name.

    A series is present if the page has it under its current or an older name. A description without a sample is enough:
    with several API servers a gauge has no sample before the first request.
    """
    wanted = [getattr(names, field) for field in COMBINED if field not in MOVING]
    return [known[0].decode() for known in wanted if not any(name in page for name in known)]

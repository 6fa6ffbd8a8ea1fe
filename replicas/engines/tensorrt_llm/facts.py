"""What trtllm-serve tells of itself: its name in /v1/models, and its series at /prometheus/metrics
(`return_perf_metrics`)."""

import re
from collections.abc import Mapping

from replicas.answer import Answer
from replicas.engines.dialect import Sources, Told
from replicas.event_source import EventSource
from replicas.metrics import MetricNames
from replicas.problems import NO_REPLAY, Problem, Remedies

METRICS = "/prometheus/metrics"
PATHS = (METRICS,)
EVENTS = "/kv_cache_events"
OWNER = "tensorrt_llm"
BLOCK = 32  # tokens of a block unless it is told otherwise
NAMES = MetricNames(
    prefix="trtllm_",
    running=(b"trtllm_num_requests_running",),
    waiting=(b"trtllm_num_requests_waiting",),
    kv_usage=(b"trtllm_kv_cache_utilization",),
    prefix_queries=(b"trtllm_prompt_tokens_total",),
    prefix_hits=(b"trtllm_prompt_cached_tokens_total",),
    prompted=(b"trtllm_prompt_tokens_total",),
    generated=(b"trtllm_generation_tokens_total",),
    started=(b"process_start_time_seconds",),
    cache_config=b"trtllm_cache_config_info",
    block_size=b"tokens_per_block",
    num_blocks=b"max_blocks",
    rank_tokens=b"",
    prefix_caching=b"",
    rank=b"rank",
)
_GAUGE = rb"^trtllm_kv_cache_%s(?:\{[^}]*\})? (\d+)(?:\.0*)?\s*$"
_BLOCK_SIZE, _BLOCKS = (re.compile(_GAUGE % name, re.M) for name in (b"tokens_per_block", b"max_blocks"))


def speaks(answers: Mapping[str, Answer]) -> bool:
    listed = answers["/v1/models"].json().get("data")
    named = isinstance(listed, list) and any(isinstance(one, dict) and one.get("owned_by") == OWNER for one in listed)
    return named or b"\ntrtllm_" in answers[METRICS].body


def told(answers: Mapping[str, Answer]) -> Told:
    """Before its first iteration its gauges are 0, or not there."""
    version, page = answers["/version"].json().get("version"), answers[METRICS].body
    return Told(
        version if isinstance(version, str) else None,
        block_size=_number(_BLOCK_SIZE, page) or BLOCK,
        num_blocks=_number(_BLOCKS, page),
    )


def _number(gauge: re.Pattern[bytes], page: bytes) -> int | None:
    found = gauge.search(page)
    return int(found[1]) or None if found else None


def sources(remedies: Remedies) -> Sources:
    """Whether events are on is not told: without `event_buffer_max_size` there is never one to fetch."""
    return Sources({0: EventSource(EVENTS, None, "")}, {"replay": Problem(NO_REPLAY, remedies.replay)})

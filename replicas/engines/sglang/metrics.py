"""The names of SGLang's Prometheus series; it has them with --enable-metrics."""

from replicas.metrics import MetricNames

NAMES = MetricNames(
    prefix="sglang:",
    running=(b"sglang:num_running_reqs",),
    waiting=(b"sglang:num_queue_reqs",),
    kv_usage=(b"sglang:token_usage",),
    prefix_queries=(b"sglang:prompt_tokens_total",),
    prefix_hits=(b"sglang:cached_tokens_total",),
    prompted=(b"sglang:prompt_tokens_total",),
    generated=(b"sglang:generation_tokens_total",),
    # Its page has no series of the process itself, so a restart is detected in other ways.
    started=(b"process_start_time_seconds",),
    cache_config=b"sglang:cache_config_info",
    block_size=b"page_size",
    num_blocks=b"num_pages",
    rank_tokens=b"",
    prefix_caching=b"",
    rank=b"dp_rank",
)

"""The names of vLLM's Prometheus series, and of the labels of its cache configuration."""

from replicas.metrics import MetricNames

NAMES = MetricNames(
    prefix="vllm:",
    running=(b"vllm:num_requests_running",),
    waiting=(b"vllm:num_requests_waiting",),
    kv_usage=(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
    prefix_queries=(b"vllm:prefix_cache_queries_total", b"vllm:gpu_prefix_cache_queries_total"),
    prefix_hits=(b"vllm:prefix_cache_hits_total", b"vllm:gpu_prefix_cache_hits_total"),
    prompted=(b"vllm:prompt_tokens_total",),
    generated=(b"vllm:generation_tokens_total",),
    started=(b"process_start_time_seconds", b"vllm:prompt_tokens_created"),
    cache_config=b"vllm:cache_config_info",
    block_size=b"block_size",
    attention_block_size=b"effective_attention_block_size",
    num_blocks=b"num_gpu_blocks",
    rank_tokens=b"kv_cache_size_tokens",
    prefix_caching=b"enable_prefix_caching",
    cache_dtype=b"cache_dtype",
    rank=b"engine",
    created=(b"vllm:prompt_tokens_created",),
    external_queries=(b"vllm:external_prefix_cache_queries_total",),
)

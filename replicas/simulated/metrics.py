"""The engine's /metrics page: the series of vLLM that gateways, benchmarks and people look at.

The text is put together without a library, so that making a page costs little.
"""

import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from .engine import Engine

_FIRST = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)


class _Histogram:
    def __init__(self, name: str, bounds: tuple):
        self._name, self._bounds = name, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, labels: str) -> Iterator[str]:
        yield f"# TYPE vllm:{self._name} histogram"
        total = 0
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts):
            total += count
            yield f'vllm:{self._name}_bucket{{{labels},le="{bound}"}} {float(total)}'
        yield f"vllm:{self._name}_count{{{labels}}} {float(total)}"
        yield f"vllm:{self._name}_sum{{{labels}}} {self._sum}"


class Metrics:
    """The metrics of one engine.

    This object counts the times that clients see, and how requests ended. All other figures are read from the engine.
    """

    def __init__(self, engine: Engine, model: str, cache_dtype: str = "auto", has_nixl: bool = False):
        self._engine, self._cache_dtype, self._has_nixl = engine, cache_dtype, has_nixl
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._labels = f'engine="0",model_name="{escaped}"'
        self._started = time.time()
        self.ended = Counter({"stop": 0, "length": 0, "abort": 0})
        self.first = _Histogram("time_to_first_token_seconds", _FIRST)
        self.between = _Histogram("inter_token_latency_seconds", _BETWEEN)

    def text(self) -> str:
        """Return the page of GET /metrics."""
        lines: list[str] = []
        for kind, name, more, value in self._series():
            if (line := f"# TYPE vllm:{name} {kind}") not in lines:
                lines.append(line)
            lines.append(f"vllm:{name}{{{self._labels}{more}}} {float(value)}")
        cpu = os.times()
        lines += [
            *self.first.lines(self._labels),
            *self.between.lines(self._labels),
            "# TYPE vllm:prompt_tokens_created gauge",  # prometheus_client has one for each counter
            f"vllm:prompt_tokens_created{{{self._labels}}} {self._started}",
            "# TYPE process_start_time_seconds gauge",
            f"process_start_time_seconds {self._started}",
            "# TYPE process_cpu_seconds_total counter",
            f"process_cpu_seconds_total {cpu.user + cpu.system}",
        ]
        return "\n".join(lines) + "\n"

    def _series(self) -> Iterator[tuple[str, str, str, float]]:
        """Yield each series that is no histogram: kind, name without prefix, further labels, value."""
        engine, profile, counters = self._engine, self._engine.profile, self._engine.counters
        yield "gauge", "num_requests_running", "", engine.running
        yield "gauge", "num_requests_waiting", "", engine.waiting
        yield "gauge", "kv_cache_usage_perc", "", engine.kv_usage
        whole = f',effective_attention_block_size="{profile.block_size}"' if profile.context_parallel == 1 else ""
        yield "gauge", "cache_config_info", (
            f',block_size="{profile.block_size // profile.context_parallel}",cache_dtype="{self._cache_dtype}",enable_prefix_caching="True"{whole},'
            f'kv_cache_size_tokens="{profile.num_blocks * profile.block_size}",num_gpu_blocks="{profile.num_blocks}"'
        ), 1  # fmt: skip
        yield "counter", "prefix_cache_queries_total", "", counters.prefix_queries
        yield "counter", "prefix_cache_hits_total", "", counters.prefix_hits
        yield "counter", "external_prefix_cache_queries_total", "", counters.external_queries
        yield "counter", "external_prefix_cache_hits_total", "", counters.external_hits
        yield "counter", "num_preemptions_total", "", counters.preemptions
        yield "counter", "prompt_tokens_total", "", counters.prompt_tokens
        yield "counter", "generation_tokens_total", "", counters.generated_tokens
        for reason, count in self.ended.items():
            yield "counter", "request_success_total", f',finished_reason="{reason}"', count
        if profile.drops_block:
            yield "counter", "spec_decode_num_drafts_total", "", 0
        if self._has_nixl:
            yield "counter", "nixl_num_failed_transfers_total", "", 0

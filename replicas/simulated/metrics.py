"""The engine's Prometheus text, with vLLM's names and buckets. Written by hand, so that a scrape costs little."""

import os
import time
from bisect import bisect_left
from collections.abc import Iterator

from .engine import Engine, Step

_FIRST = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(n * 10**power for power in range(6) for n in (1, 2, 5))
_STEP = tuple(2**power for power in range(15))
Series = tuple[str, str, str, str, float]  # kind, name, description, further labels, value


class _Histogram:
    def __init__(self, name: str, about: str, bounds: tuple):
        self.name, self.about, self._bounds = name, about, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, labels: str) -> list[str]:
        lines, total = [f"# HELP {self.name} {self.about}", f"# TYPE {self.name} histogram"], 0
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts):
            total += count
            lines.append(f'{self.name}_bucket{{{labels},le="{bound}"}} {float(total)}')
        return [*lines, f"{self.name}_count{{{labels}}} {float(total)}", f"{self.name}_sum{{{labels}}} {self._sum}"]


class Metrics:
    """The metrics that the engine itself does not count: times seen by clients, and how requests ended."""

    def __init__(self, engine: Engine, model: str):
        self._engine = engine
        self.cache_dtype, self.has_nixl = "auto", False  # the engine's flags
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._labels = f'engine="0",model_name="{escaped}"'
        self._started = time.time()
        self._ended = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self._first = _Histogram("vllm:time_to_first_token_seconds", "Time to first token.", _FIRST)
        self._between = _Histogram("vllm:inter_token_latency_seconds", "Time between tokens.", _BETWEEN)
        self._each = _Histogram("vllm:request_time_per_output_token_seconds", "Time per output token.", _BETWEEN)
        self._whole = _Histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the end.", _WHOLE)
        self._decode = _Histogram("vllm:request_decode_time_seconds", "Time from first to last token.", _WHOLE)
        self._prompt = _Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output = _Histogram("vllm:request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self._step = _Histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", _STEP)

    def stepped(self, step: Step) -> None:
        self._step.observe(step.prefill_tokens + step.decode_tokens)

    def first_token(self, generation, now: float) -> None:
        self._first.observe(now - generation.arrived)

    def next_token(self, seconds: float) -> None:
        self._between.observe(seconds)

    def finished(self, generation, reason: str, now: float) -> None:
        self._ended[reason] += 1
        self._whole.observe(now - generation.arrived)
        self._prompt.observe(len(generation.prompt))
        self._output.observe(generation.sent if reason == "abort" else len(generation.ids))
        if generation.begun:
            self._decode.observe(now - generation.begun)
            if len(generation.ids) > 1 and reason != "abort":
                self._each.observe((now - generation.begun) / (len(generation.ids) - 1))

    def text(self) -> str:
        """Return the page of GET /metrics."""
        lines, told = [], set()
        for kind, name, about, more, value in (*self._gauges(), *self._counters()):
            if name not in told:
                told.add(name)
                lines += (f"# HELP vllm:{name} {about}", f"# TYPE vllm:{name} {kind}")
            lines.append(f"vllm:{name}{{{self._labels}{more}}} {float(value)}")
        for histogram in (
            self._first,
            self._between,
            self._each,
            self._whole,
            self._decode,
            self._prompt,
            self._output,
            self._step,
        ):
            lines += histogram.lines(self._labels)
        cpu = os.times()
        lines += [
            "# TYPE vllm:prompt_tokens_created gauge",  # prometheus_client has one for each counter
            f"vllm:prompt_tokens_created{{{self._labels}}} {self._started}",
            "# TYPE process_start_time_seconds gauge",
            f"process_start_time_seconds {self._started}",
            "# TYPE process_cpu_seconds_total counter",
            f"process_cpu_seconds_total {cpu.user + cpu.system}",
        ]
        return "\n".join(lines) + "\n"

    def _gauges(self) -> Iterator[Series]:
        engine, profile, by_reason = self._engine, self._engine.profile, "num_requests_waiting_by_reason"
        yield "gauge", "num_requests_running", "Requests in the running batch.", "", engine.running
        yield "gauge", "num_requests_waiting", "Requests waiting to be scheduled.", "", engine.waiting
        yield "gauge", by_reason, "Requests waiting, by reason.", ',reason="capacity"', engine.waiting
        yield "gauge", by_reason, "Requests waiting, by reason.", ',reason="deferred"', 0
        yield "gauge", "engine_sleep_state", "1 for the state the engine is in.", ',sleep_state="awake"', 1
        yield "gauge", "kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", "", engine.kv_usage
        whole = f',effective_attention_block_size="{profile.block_size}"' if profile.context_parallel == 1 else ""
        config = (
            f',block_size="{profile.block_size // profile.context_parallel}",cache_dtype="{self.cache_dtype}",enable_prefix_caching="True"{whole},'
            f'kv_cache_size_tokens="{profile.num_blocks * profile.block_size}",'
            f'num_gpu_blocks="{profile.num_blocks}",num_gpu_blocks_override="None",'
            f'prefix_caching_hash_algo="xxhash"'
        )
        yield "gauge", "cache_config_info", "The cache's configuration.", config, 1

    def _counters(self) -> Iterator[Series]:
        counters = self._engine.counters
        cached = counters.prefix_hits + counters.external_hits
        for name, about, more, value in (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", "", counters.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", "", counters.prefix_hits),
            ("external_prefix_cache_queries", "Tokens looked up in a connector.", "", counters.external_queries),
            ("external_prefix_cache_hits", "Tokens found in a connector.", "", counters.external_hits),
            ("num_preemptions", "Times a request gave up its blocks.", "", counters.preemptions),
            ("prompt_tokens", "Prompt tokens admitted.", "", counters.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens not computed.", "", cached),
            ("generation_tokens", "Tokens generated.", "", counters.generated_tokens),
            *[
                ("prompt_tokens_by_source", "Prompt tokens by where they came from.", f',source="{source}"', value)
                for source, value in (
                    ("local_compute", counters.prompt_tokens - cached),
                    ("local_cache_hit", counters.prefix_hits),
                    ("external_kv_transfer", counters.external_hits),
                )
            ],
            *[
                ("request_success", "Requests by how they ended.", f',finished_reason="{reason}"', count)
                for reason, count in self._ended.items()
            ],
        ):
            yield "counter", f"{name}_total", about, more, value
        if self._engine.profile.drops_block:
            yield "counter", "spec_decode_num_drafts_total", "Number of spec decoding drafts.", "", 0
        if self.has_nixl:
            yield "counter", "nixl_num_failed_transfers_total", "Number of failed NIXL KV Cache transfers.", "", 0

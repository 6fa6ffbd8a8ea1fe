"""TensorRT-LLM's trtllm-serve: `TRTLLM_SERVE` is its dialect, `TENSORRT_LLM` its way of moving caches.

Read in its sources; `docs/engines.md` says what was tried. Its /metrics hands out statistics of iterations as JSON;
what Prometheus reads is elsewhere. KV events are fetched, each once, with POST /kv_cache_events.
"""

from collections.abc import Callable, Mapping
from typing import Any

from replicas.answer import Answer
from replicas.engines.dialect import EventRecords, Sources, Tokenizing, Told
from replicas.engines.tensorrt_llm import facts
from replicas.engines.tensorrt_llm.events import Decoder
from replicas.engines.tensorrt_llm.transfer import TENSORRT_LLM
from replicas.engines.vllm import aborts
from replicas.launch.exits import PLAIN
from replicas.problems import EVENTS_BY_HAND, Remedies

__all__ = ["TENSORRT_LLM", "TRTLLM_SERVE"]

_OPTIONS = "in the file of trtllm-serve's --extra_llm_api_options"
REMEDIES = Remedies(
    models="give the gateway the key with --engine-api-key @FILE (HITHERTO_ENGINE_API_KEY); without it clients' keys are passed on",
    figures=f"set return_perf_metrics: true and enable_iter_perf_stats: true {_OPTIONS}",
    names="a TensorRT-LLM that names them differently needs a newer Hitherto",
    caching=f"set kv_cache_config: {{enable_block_reuse: true}} {_OPTIONS}",
    repeats=f"set kv_cache_config: {{enable_block_reuse: true}} {_OPTIONS}; without it every replica is as good as any other",
    events=f"set kv_cache_config: {{event_buffer_max_size: 16384}} {_OPTIONS}",
    tiers="let the gateway alone fetch its events, so that none of those that move blocks are missed",
    unlisted=f"if KV events are on, give their address as {EVENTS_BY_HAND}",
    binding="its events are fetched over HTTP",
    ranks="attention data parallelism is not followed: start one engine a rank and give the URL of each",
    nodes="start one engine a rank and give the URL of each",
    replay="TensorRT-LLM keeps no record of them: let nobody else fetch /kv_cache_events, and give gateways one Redis (--redis-url)",
    cached_tokens="a TensorRT-LLM that tells usage.prompt_tokens_details is needed",
    transfer="name the way with #transfer=tensorrt-llm behind its URL, and start it with a cache transceiver",
)  # fmt: skip


class TrtllmServe:
    """The dialect of trtllm-serve; `replicas.engines.dialect.EngineDialect` says what each part is."""

    id = "tensorrt-llm"
    name = "TensorRT-LLM"
    paths = facts.PATHS
    health_seconds = 0.0
    metrics = facts.NAMES
    metrics_path = facts.METRICS
    tokenizing = Tokenizing("/_internal/tokenize", chooses_special=False)
    remedies = REMEDIES
    log = PLAIN
    rank_header = ""
    rank_paths = ()
    chat_token_ids = None
    fills_templates_alike = False
    priority_paths, priority_header, priority_header_paths = (), None, ()
    limits_path = ""
    transfer = None
    peer_pull = None
    aborted = aborts.ABORTED

    def speaks(self, answers: Mapping[str, Answer]) -> bool:
        return facts.speaks(answers)

    def told(self, answers: Mapping[str, Answer]) -> Told:
        return facts.told(answers)

    def event_sources(self, answers: Mapping[str, Answer], host: str) -> Sources:
        return facts.sources(self.remedies)

    def event_decoder(self, records: EventRecords, block_size: int) -> Callable[[bytes], Any]:
        return Decoder(records, block_size).decode

    def version_quirks(self, version: str | None) -> dict[str, Any]:
        """None are known: prompts are made as for the newest, and held against what it makes itself. What it writes
        by rules in its code has not been compared."""
        return {"rules_are_known": False}

    def has_random_hash_seed(self, version: str | None) -> bool:
        return False

    def launch_profile(self) -> None:
        """It is adopted only."""

    def scheduler_limits(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}


TRTLLM_SERVE = TrtllmServe()

"""SGLang, which the gateway can adopt but not launch: `SGLANG` is its dialect.

Read in the sources of 0.5.4 and 0.5.23; `docs/engines.md` lists what was tested.
"""

from collections.abc import Callable, Mapping
from typing import Any

from replicas.answer import Answer
from replicas.engines.dialect import EngineDialect, Sources, Told
from replicas.engines.sglang import facts, metrics
from replicas.engines.sglang.events import Decoder
from replicas.engines.vllm import aborts
from replicas.problems import EVENTS_BY_HAND, Remedies

REMEDIES = Remedies(
    models="give the gateway the key with --engine-api-key @FILE (HITHERTO_ENGINE_API_KEY); without it clients' keys are passed on",
    figures="start SGLang with --enable-metrics",
    names="an SGLang that names them differently needs a newer Hitherto",
    caching="start SGLang without --disable-radix-cache",
    repeats="start SGLang without --disable-radix-cache; without the cache every replica is as good as any other",
    events='start SGLang with --kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557",'
           '"replay_endpoint":"tcp://*:5558"}\'',
    tiers="start SGLang with --page-size 16 or more: copies of smaller pages are left out",
    unlisted=f"if KV events are on, give their address as {EVENTS_BY_HAND}; else start SGLang with --kv-events-config",
    binding="write the endpoint in --kv-events-config as tcp://*:PORT",
    ranks="publish over tcp://*:PORT, to which SGLang adds the rank",
    nodes="start one engine a rank and give the URL of each",
    replay='add "replay_endpoint":"tcp://*:PORT" to --kv-events-config, and replay=tcp://HOST:PORT if events= is given in the URL',
    cached_tokens="start SGLang with --enable-cache-report",
    transfer="leave its role out: how SGLang passes caches on is not known here",
)  # fmt: skip


class Sglang(EngineDialect):
    """The dialect of SGLang; `replicas.engines.dialect.EngineDialect` explains each part."""

    id = "sglang"
    name = "SGLang"
    paths = facts.PATHS
    health_seconds = 3.0  # it checks once a second whether anything was computed since the request
    metrics = metrics.NAMES
    remedies = REMEDIES
    rank_header = "X-Data-Parallel-Rank"  # takes precedence over `routed_dp_rank` in a body
    rank_paths = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
    chat_token_ids = (b'"input_ids":', b"")
    limits_path = "/server_info"
    aborted = aborts.ABORTED  # like vLLM's: the finish reason "abort"

    def speaks(self, answers: Mapping[str, Answer]) -> bool:
        return bool(facts.info(answers)) or b"\n" + self.metrics.prefix.encode() in answers["/metrics"].body

    def told(self, answers: Mapping[str, Answer]) -> Told:
        return facts.told(answers)

    def event_sources(self, answers: Mapping[str, Answer], host: str) -> Sources:
        return facts.sources(answers, host, self.remedies)

    def event_decoder(self, records: Any) -> Callable[[bytes], Any]:
        return Decoder(records).decode

    def version_quirks(self, version: str | None) -> dict[str, Any]:
        """Return how SGLang 0.5.23 prepares prompts differently from vLLM; this is assumed for all versions.

        The values come from comparing the gateway's chat prompts with the engine's. Prompts that SGLang builds by rules
        in its code, without a template, were not compared.
        """
        return {
            "between_parts": " ",
            "tools_as_given": True,
            "rules_are_known": False,
            "media_identity": None,
            "chats_known": None,
            "refuses_alike": False,
            "ids_field": "input_ids",
            "unfollowed": facts.UNFOLLOWED,
        }

    def scheduler_limits(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        step = told.get("chunked_prefill_size") or 0
        if not isinstance(step, int) or step <= 0:  # prompts are not split
            step = told.get("max_prefill_tokens")
        return {"max_num_seqs": told.get("max_running_requests"), "max_num_batched_tokens": step}


SGLANG = Sglang()

"""vLLM: `VLLM` is its dialect. Read in the sources of 0.28 to 0.32 and tested with 0.28 and 0.32 (`tests/vllm`)."""

from collections.abc import Callable, Mapping
from typing import Any

from replicas.answer import Answer
from replicas.engines.dialect import EngineDialect, Sources, Told
from replicas.engines.vllm import aborts, log, metrics, sources
from replicas.engines.vllm.events import Decoder
from replicas.engines.vllm.transfer import NIXL, pull_from_peer
from replicas.engines.vllm.versions import finds_all, has_random_hash_seed, is_known, version_quirks
from replicas.launch.command import LaunchProfile
from replicas.problems import EVENTS_BY_HAND, Remedies

REMEDIES = Remedies(
    models="give the gateway the key with --engine-api-key @FILE (HITHERTO_ENGINE_API_KEY); without it clients' keys are passed on",
    figures="start vLLM without --disable-log-stats, or set block_size in the gateway's config",
    names="a vLLM that names them differently needs a newer Hitherto",
    caching="start vLLM without --no-enable-prefix-caching",
    repeats="turn prefix caching on (vLLM: --enable-prefix-caching); without it every replica is as good as any other",
    events='start vLLM with --kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq",'
           '"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}\'',
    tiers="of LMCache use kv_connector LMCacheMPConnector with kv_connector_module_path lmcache.integration.vllm.lmcache_mp_connector "
          "and a server that keeps an event log: LMCacheConnectorV1, and the connector of that name in vLLM itself, tell nothing to go by; "
          "vLLM's own tiers (--kv-offloading-size) tell of theirs with --kv-events-config",
    unlisted=f"if KV events are on, give their address as {EVENTS_BY_HAND}; else start vLLM with --kv-events-config",
    binding="write the endpoint in --kv-events-config as tcp://*:PORT",
    ranks="publish over tcp://*:PORT, to which vLLM adds the rank, and let all ranks run one version",
    nodes="start one engine a rank (--data-parallel-external-lb) and give the URL of each",
    replay='add "replay_endpoint":"tcp://*:PORT" to --kv-events-config, and replay=tcp://HOST:PORT if events= is given in the URL',
    cached_tokens="start vLLM with --enable-prompt-tokens-details",
    transfer='start it with --kv-transfer-config \'{"kv_connector":"NixlConnector","kv_role":"kv_both"}\', with the package nixl '
             "installed, and VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT where its counterparts reach it",
)  # fmt: skip


NIXL_SERIES = b"\nvllm:nixl_"
DRAFTS = b"\nvllm:spec_decode_num_drafts_total"  # present from the start with any speculator, ngram included


class Vllm(EngineDialect):
    """The dialect of vLLM; `replicas.engines.dialect.EngineDialect` explains each part."""

    id = "vllm"
    name = "vLLM"
    paths = (sources.PATH,)
    metrics = metrics.NAMES
    remedies = REMEDIES
    log = log.GRAMMAR
    rank_header = "X-data-parallel-rank"
    rank_paths = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
    # vLLM takes this field out of the request before anything else reads it: without a KV connector it changes nothing
    # but the prompt.
    chat_token_ids = (b'"kv_transfer_params":{"prompt_token_ids":', b"}")
    priority_paths = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    # Read by 0.28 to 0.32; versions that do not know it ignore it.
    priority_header, priority_header_paths = b"x-vllm-priority", ("/v1/messages",)
    limits_path = "/server_info?config_format=json"  # with VLLM_SERVER_DEV_MODE=1
    transfer = NIXL
    peer_pull = staticmethod(pull_from_peer)
    version_quirks = staticmethod(version_quirks)
    has_random_hash_seed = staticmethod(has_random_hash_seed)
    aborted = aborts.ABORTED

    def speaks(self, answers: Mapping[str, Answer]) -> bool:
        return b"\n" + self.metrics.prefix.encode() in answers["/metrics"].body

    def told(self, answers: Mapping[str, Answer]) -> Told:
        told, page = answers["/version"].json().get("version"), answers["/metrics"].body
        version = told if isinstance(told, str) else None
        # A connector has its series from the start, also within a MultiConnector (0.28 and 0.32).
        has_page = b"\n" + self.metrics.cache_config in page and is_known(version)
        return Told(
            version,
            unable=frozenset({NIXL.id} if has_page and NIXL_SERIES not in page else ()),
            drops_block=DRAFTS in page,
            looks_to_end=finds_all(version),
            finds_parts=finds_all(version),
            takes_priority=self.speaks(answers) and is_known(version),
        )

    def event_sources(self, answers: Mapping[str, Answer], host: str) -> Sources:
        return sources.read(answers[sources.PATH], host, self.remedies)

    def event_decoder(self, records: Any) -> Callable[[bytes], Any]:
        return Decoder(records).decode

    def launch_profile(self) -> type[LaunchProfile]:
        from replicas.engines.vllm.profile import VllmProfile

        return VllmProfile

    def scheduler_limits(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in ("vllm_config", "scheduler_config"):
            inner = told.get(name)
            told = inner if isinstance(inner, dict) else {}
        return told


VLLM = Vllm()

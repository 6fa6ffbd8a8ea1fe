"""Command lines of `vllm serve`, judged by vLLM's own argument parser: those of all examples of profiles, those that
the documents show, and those of compose.gpu.yaml."""

import json

import pytest

from replicas.engines.vllm.profile import VllmProfile
from replicas.launch import profile
from replicas.launch.command import Model, Ports

from ..deploy.test_compose import GPUS, compose
from ..test_commands import ALL, words
from .engines import by_vllm

pytestmark = pytest.mark.exact

EXAMPLES = [name for name in profile.names() if profile.load(name).engine == "vllm"]
# Each field that is a flag, with a value; apart where values exclude each other.
FIELDS = [
    {
        "dtype": "float16", "quantization": "awq", "kv_cache_dtype": "fp8", "load_format": "auto", "max_model_len": 4096,
        "trust_remote_code": True, "seed": 3,
        "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2, "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True,
        "all2all_backend": "deepep_low_latency", "distributed_executor_backend": "mp", "attention_backend": "FLASHMLA",
        "block_size": 64, "gpu_memory_utilization": 0.85, "num_gpu_blocks_override": 100, "cpu_offload_gb": 8,
        "prefix_caching_hash_algo": "xxhash", "enable_sleep_mode": True,
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu",
                               "kv_connector_extra_config": {"a": 1}, "kv_load_failure_policy": "fail"},
        "scheduling_policy": "priority", "enable_chunked_prefill": True, "max_num_batched_tokens": 4096, "max_num_seqs": 32,
        "long_prefill_token_threshold": 1024, "async_scheduling": True,
        "speculative_config": {"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 3,
                               "draft_tensor_parallel_size": 1, "max_model_len": 2048, "quantization": "fp8"},
        "cudagraph_capture_sizes": [1, 2, 4], "max_cudagraph_capture_size": 4, "compilation_config": {"mode": 3},
        "lora_modules": {"sql": "/a/sql", "chat": "/a/chat"}, "max_loras": 2, "max_lora_rank": 32, "max_cpu_loras": 4,
    },
    {
        "enable_prefix_caching": False, "kv_events": False, "enforce_eager": False, "enable_lora": True,
        "kv_cache_memory_bytes": "1.5g", "kv_offloading_size": 4, "kv_offloading_backend": "native",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    },
]  # fmt: skip
DOCUMENTED = [(page.name, words(command)[2:]) for page, command in ALL if command.startswith("vllm serve ")]
DOCUMENTED += [
    (GPUS, service["command"])
    for service in compose(GPUS)["services"].values()
    if service.get("entrypoint") == ["vllm", "serve"]
]


@pytest.fixture(scope="module")
def judged(model) -> dict[object, dict]:
    """Verdicts by what a command line is of, of a model that is here in place of the one that is named. vLLM is
    imported once, which takes 5 s and more."""

    def launched(one: VllmProfile) -> list[str]:
        return one.command("127.0.0.1", Ports.run(20000, one.ranks), Model(model, "tiny")).argv[2:]

    lines = {
        **{name: launched(profile.load(name)) for name in EXAMPLES},
        **{at: launched(profile.parse(json.dumps({"engine": "vllm", **one}))) for at, one in enumerate(FIELDS)},
        **{(page, " ".join(flags)): [str(model), *flags] for page, (_, *flags) in DOCUMENTED},
        "nonsense": [str(model), "--no-such-flag"],
    }
    # The parser leaves the model to be served out: offline, vLLM would look for its default one on this machine.
    found = by_vllm("parser.py", asked=json.dumps([*lines.values()]), env={"HF_HUB_OFFLINE": "0"})
    verdicts = json.loads(found[-1])  # 0.28 logs before it
    return dict(zip(lines, verdicts, strict=True))


@pytest.mark.parametrize("name", EXAMPLES)
def test_vllm_accepts_every_example(judged, name):
    verdict, wanted = judged[name], profile.load(name)
    assert "refused" not in verdict, verdict["refused"]
    values = verdict["accepted"]
    assert values["served_model_name"] == ["tiny"]
    assert values["enable_prompt_tokens_details"] and values["enable_prefix_caching"]
    assert values["tensor_parallel_size"] == wanted.tensor_parallel_size
    assert values["kv_events_config"]["endpoint"] == "tcp://*:20001"
    if wanted.attention_backend:
        assert wanted.attention_backend in str(values["attention_backend"])


def test_vllm_knows_every_field(judged):
    assert not [judged[at]["refused"] for at in range(len(FIELDS)) if "refused" in judged[at]]
    first, second = (judged[at]["accepted"] for at in range(len(FIELDS)))
    assert first["cudagraph_capture_sizes"] == [1, 2, 4] and first["max_lora_rank"] == 32
    assert first["kv_transfer_config"]["kv_connector"] == "NixlConnector"
    assert second["kv_cache_memory_bytes"] == 1_500_000_000
    assert second["enable_prefix_caching"] is False and second["enable_prompt_tokens_details"] is True


def test_vllm_takes_what_the_documents_show(judged):
    shown = {line: verdict for line, verdict in judged.items() if isinstance(line, tuple)}
    assert len(shown) >= 6
    assert not {line: verdict["refused"] for line, verdict in shown.items() if "refused" in verdict}


def test_the_parser_does_refuse(judged):
    assert "--no-such-flag" in judged["nonsense"]["refused"]

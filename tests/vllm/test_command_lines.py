"""Every example's command line, judged by vLLM's own argument parser."""

import json
import subprocess
from pathlib import Path

import pytest

from replicas.engines.vllm.profile import VllmProfile
from replicas.launch import profile
from replicas.launch.command import Model, Ports

pytestmark = pytest.mark.exact

EXAMPLES = [name for name in profile.names() if profile.load(name).engine == "vllm"]
PARSER = Path(__file__).with_name("parser.py")
# Each field that is a flag, with a value; apart where values exclude each other.
FIELDS = [
    """
    dtype: float16
    quantization: awq
    max_model_len: 4096
    trust_remote_code: true
    load_format: auto
    seed: 3
    tensor_parallel_size: 2
    pipeline_parallel_size: 2
    data_parallel_size: 2
    prefill_context_parallel_size: 2
    decode_context_parallel_size: 2
    enable_expert_parallel: true
    enable_eplb: true
    all2all_backend: deepep_low_latency
    distributed_executor_backend: mp
    attention_backend: FLASHMLA
    kv_cache_dtype: fp8
    block_size: 64
    gpu_memory_utilization: 0.85
    num_gpu_blocks_override: 100
    prefix_caching_hash_algo: xxhash
    kv_transfer_config: {kv_connector: NixlConnector, kv_role: kv_producer, kv_buffer_device: cpu,
                         kv_connector_extra_config: {a: 1}, kv_load_failure_policy: fail}
    cpu_offload_gb: 8
    scheduling_policy: priority
    enable_chunked_prefill: true
    max_num_batched_tokens: 4096
    max_num_seqs: 32
    long_prefill_token_threshold: 1024
    async_scheduling: true
    speculative_config: {method: draft_model, model: org/draft, num_speculative_tokens: 3, draft_tensor_parallel_size: 1,
                         max_model_len: 2048, quantization: fp8}
    cudagraph_capture_sizes: [1, 2, 4]
    max_cudagraph_capture_size: 4
    compilation_config: {mode: 3}
    enable_sleep_mode: true
    lora_modules: {sql: /a/sql, chat: /a/chat}
    max_loras: 2
    max_lora_rank: 32
    max_cpu_loras: 4
    """,
    """
    enable_prefix_caching: false
    kv_events: false
    enforce_eager: false
    enable_lora: true
    kv_cache_memory_bytes: 1.5g
    kv_offloading_size: 4
    kv_offloading_backend: native
    speculative_config: {method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4, prompt_lookup_min: 2}
    """,
]


def words(one: VllmProfile) -> list[str]:
    return one.command("127.0.0.1", Ports.run(20000, one.ranks), Model(Path("/models/tiny"), "tiny")).argv[2:]


@pytest.fixture(scope="module")
def judged(vllm_python):
    """{"examples": {name: verdict}, "fields": [verdict], "nonsense": verdict}: vLLM is
    imported once, which takes 5 s and more."""
    fields = [
        profile.parse("engine: vllm\n" + "\n".join(line.strip() for line in text.splitlines())) for text in FIELDS
    ]
    lines = (
        [words(profile.load(name)) for name in EXAMPLES] + [words(one) for one in fields] + [["/m", "--no-such-flag"]]
    )
    run = subprocess.run([vllm_python, PARSER], input=json.dumps(lines), capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-2000:]
    said = json.loads(run.stdout[run.stdout.index('{"verdicts"') :])
    verdicts = said["verdicts"]
    return {
        "examples": dict(zip(EXAMPLES, verdicts)),
        "fields": verdicts[len(EXAMPLES) : -1],
        "nonsense": verdicts[-1],
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_vllm_accepts_every_example(judged, name):
    verdict, wanted = judged["examples"][name], profile.load(name)
    assert "refused" not in verdict, verdict["refused"]
    values = verdict["accepted"]
    assert (
        values["served_model_name"] == ["tiny"]
        and values["enable_prompt_tokens_details"]
        and values["enable_prefix_caching"]
    )
    assert values["tensor_parallel_size"] == wanted.tensor_parallel_size
    assert values["kv_events_config"]["endpoint"] == "tcp://*:20001"
    if wanted.attention_backend:
        assert wanted.attention_backend in str(values["attention_backend"])


@pytest.mark.parametrize("number", range(len(FIELDS)))
def test_vllm_knows_every_field(judged, number):
    verdict = judged["fields"][number]
    assert "refused" not in verdict, verdict["refused"]
    values = verdict["accepted"]
    if number == 0:
        assert values["cudagraph_capture_sizes"] == [1, 2, 4] and values["max_lora_rank"] == 32
        assert values["kv_transfer_config"]["kv_connector"] == "NixlConnector"
    else:
        assert values["kv_cache_memory_bytes"] == 1_500_000_000
        assert values["enable_prefix_caching"] is False and values["enable_prompt_tokens_details"] is True


def test_the_parser_does_refuse(judged):
    assert "--no-such-flag" in judged["nonsense"]["refused"]
